package router

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/replication"
)

// asideShapes are the ways to write records.
var asideShapes = map[string]func(o *Options){
	"plain":            func(*Options) {},
	"debezium":         func(o *Options) { o.Debezium = &DebeziumOptions{} },
	"debezium schemas": func(o *Options) { o.Debezium = &DebeziumOptions{Schemas: true} },
	"unwrapped":        func(o *Options) { o.Unwrapped = true },
}

// asideChanges are changes that cannot be delivered, for the reason that stands first.
func asideChanges(t *testing.T) map[string]*replication.Change {
	big, odd := strings.Repeat("x", 2<<20), "\xe9"
	rel := relationOf(t, "t", "id int", "v text")
	of := func(op replication.Op, v string) *replication.Change {
		c := insertOf(rel, "1", v)
		c.Op = op
		switch op {
		case replication.OpUpdate:
			c.Old, c.OldIsKey = rowOf("0", null), true // a key change: three records, of which one fails
		case replication.OpDelete:
			full := *rel
			full.Identity, full.PrimaryKey = replication.IdentityFull, []int{0}
			c.Relation, c.Old, c.New = &full, c.New, nil
		case replication.OpRead:
			return readOf(insertOf(rel, "1", v))
		}
		return c
	}
	message := messageOf(big)
	oddKey := insertOf(relationOf(t, "k", "id text", "v text"), odd, "v")
	changes := map[string]*replication.Change{"oversize message": message, "encode key": oddKey, "encode snapshot key": readOf(oddKey)}
	for name, op := range map[string]replication.Op{"insert": replication.OpCreate, "key change": replication.OpUpdate, "delete": replication.OpDelete, "snapshot row": replication.OpRead} {
		changes["oversize "+name], changes["encode "+name] = of(op, big), of(op, odd)
	}
	return changes
}

// Whatever cannot be delivered is put aside, once and whole, where its reason is listed;
// where it is not, the stream stops there. Nothing is skipped, in no form of records.
func TestWhatCannotBeDeliveredIsPutAsideOrStops(t *testing.T) {
	reasons := []string{ReasonOversize, ReasonRoute, ReasonEncode, ReasonMalformed}
	for shape, set := range asideShapes {
		for name, c := range asideChanges(t) {
			reason, _, _ := strings.Cut(name, " ")
			if shape == "unwrapped" && strings.HasSuffix(name, "delete") {
				continue // a tombstone alone, which has no value
			}
			for _, listed := range [][]string{reasons, {reason}, nil, slices.DeleteFunc(slices.Clone(reasons), func(r string) bool { return r == reason })} {
				t.Run(fmt.Sprintf("%s/%s/%v", shape, name, listed), func(t *testing.T) {
					o := testOptions()
					o.DeadLetterOn = listed
					set(&o)
					r := mustRouter(t, o, newFixedTopics())
					b := NewBatch(Limits{Bytes: 64 << 20, Records: 1000})
					before := contents(b)
					err := r.Route(c, b)
					if !slices.Contains(listed, reason) {
						var stop *StopError
						if !errors.As(err, &stop) || stop.Reason != reason || !strings.Contains(err.Error(), reason+" in dead-letter.on") {
							t.Errorf("%v", err)
						}
						if after := contents(b); after != before {
							t.Errorf("something was left in the batch: %.300s", after)
						}
						return
					}
					if err != nil || len(b.records) != 1 || !b.records[0].dead || b.records[0].topic.Name != "shop.dead-letter" {
						t.Fatalf("%d records, %v", len(b.records), err)
					}
					value := string(b.bytes(b.records[0].value))
					if !strings.HasPrefix(value, `{"reason":"`+reason+`"`) || len(value) > 1048588 {
						t.Errorf("%d bytes: %.300s", len(value), value)
					}
					for _, count := range b.counts {
						if count.outcome != outcomeDeadLettered || count.n != 1 {
							t.Errorf("counted %+v", count)
						}
					}
					if len(b.counts) != 1 {
						t.Errorf("%d counts", len(b.counts))
					}
				})
			}
		}
	}
}
