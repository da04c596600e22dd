package router

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// The types that only a catalog knows, in the tests' relations.
const (
	testEnumOID   = 50001
	testDomainOID = 50002 // over integer
)

func TestBacklogOfAnOutbox(t *testing.T) {
	for _, tt := range []struct {
		name    string
		columns string // NAME TYPE, comma; = behind what has a default, ! behind what is NOT NULL
		seq     string
		key     string
		want    Backlog
	}{
		{"published_at, number as key", "id bigint!, published_at timestamptz", "", "id",
			Backlog{"published_at", `"published_at" IS NULL`, nil, []string{"id"}, true, true, "pg_catalog.now()"}},
		{"published_at goes before status", "id bigint!, status text, published_at timestamp", "", "id",
			Backlog{"published_at", `"published_at" IS NULL`, nil, []string{"id"}, true, true, "pg_catalog.now()"}},
		{"a published_at that is no time is no mark", "id bigint!, published_at text, status int", "", "id",
			Backlog{"status", `"status" IS DISTINCT FROM 1`, nil, []string{"id"}, true, true, "1"}},
		{"a published_at that is never NULL is no mark", "id bigint!, status text, published_at timestamptz!", "", "id",
			Backlog{"status", `"status" IS DISTINCT FROM 'processed'`, nil, []string{"id"}, true, true, "'processed'"}},
		{"a published_at that an INSERT sets is no mark", "id bigint=!, published_at timestamptz=", "", "id",
			Backlog{"", "", nil, []string{"id"}, true, true, ""}},
		{"status as number", "id int!, status smallint", "", "id",
			Backlog{"status", `"status" IS DISTINCT FROM 1`, nil, []string{"id"}, true, true, "1"}},
		{"status as text", "id int!, status varchar", "", "id",
			Backlog{"status", `"status" IS DISTINCT FROM 'processed'`, nil, []string{"id"}, true, true, "'processed'"}},
		{"status as enum", "id int!, status enum", "", "id",
			Backlog{"status", `"status"::pg_catalog.text IS DISTINCT FROM 'processed'`, nil, []string{"id"}, true, true, "'processed'"}},
		{"status as domain", "id int!, status domain", "", "id",
			Backlog{"status", `"status" IS DISTINCT FROM 1`, nil, []string{"id"}, true, true, "1"}},
		{"status of another type", "id int!, status jsonb", "", "id",
			Backlog{"", "", nil, []string{"id"}, true, true, ""}},
		{"other spellings are no marks", "id int!, Status int, processed_at timestamptz", "", "id",
			Backlog{"", "", nil, []string{"id"}, true, true, ""}},

		{"a uuid has no order", "event_id uuid!, created_at timestamptz", "", "event_id",
			Backlog{"", "", nil, []string{"event_id"}, false, false, ""}},
		{"the time of writing", "event_id uuid!, created_at timestamptz!, occurred_at timestamptz!", "", "event_id",
			Backlog{"", "", nil, []string{"created_at", "event_id"}, true, false, ""}},
		{"the time of the event", "event_id uuid!, created_at timestamptz, occurred_at timestamp!", "", "event_id",
			Backlog{"", "", nil, []string{"occurred_at", "event_id"}, true, false, ""}},
		{"a sequence goes before a time", "event_id uuid!, created_at timestamptz!, sequence_num bigint!", "", "event_id",
			Backlog{"", "", nil, []string{"sequence_num", "event_id"}, true, true, ""}},
		{"a row number beside the key", "event_id uuid!, id bigint!, created_at timestamptz!", "", "event_id",
			Backlog{"", "", nil, []string{"id", "event_id"}, true, true, ""}},
		{"numbers that may be null do not order", "event_id uuid!, sequence_num bigint", "", "event_id",
			Backlog{"", "", nil, []string{"event_id"}, false, false, ""}},
		{"other numbers do not order", "event_id uuid!, aggregate_seq bigint!, version int!", "", "event_id",
			Backlog{"", "", nil, []string{"event_id"}, false, false, ""}},
		{"a text that is called a number does not order", "event_id uuid!, sequence_num text!", "", "event_id",
			Backlog{"", "", nil, []string{"event_id"}, false, false, ""}},
		{"a key of several columns", "aggregate_id text!, sequence_num bigint!", "", "aggregate_id,sequence_num",
			Backlog{"", "", nil, []string{"sequence_num", "aggregate_id"}, true, true, ""}},
		{"a domain over a number as key", "n domain!, created_at timestamptz!", "", "n",
			Backlog{"", "", nil, []string{"n"}, true, true, ""}},
		{"a number within an aggregate, of one time", "event_id uuid!, created_at timestamptz!, aggregate_seq bigint!", "aggregate_seq", "event_id",
			Backlog{"", "", nil, []string{"created_at", "aggregate_seq", "event_id"}, true, true, ""}},
		{"and without a time", "event_id uuid!, created_at timestamptz, n domain!", "n", "event_id",
			Backlog{"", "", nil, []string{"n", "event_id"}, false, true, ""}},
		{"one that may be null", "event_id uuid!, created_at timestamptz!, version int", "version", "event_id",
			Backlog{"", "", nil, []string{"created_at", "event_id"}, true, false, ""}},
		{"one that is no number", "event_id uuid!, version text!", "version", "event_id",
			Backlog{"", "", nil, []string{"event_id"}, false, false, ""}},
		{"one in the key", "aggregate_id text!, aggregate_seq int!, created_at timestamptz!", "aggregate_seq", "aggregate_id,aggregate_seq",
			Backlog{"", "", nil, []string{"created_at", "aggregate_seq", "aggregate_id"}, true, true, ""}},
		{"one beside a row number", "event_id uuid!, id bigint!, version int!", "version", "event_id",
			Backlog{"", "", nil, []string{"id", "event_id"}, true, true, ""}},
		{"a key that begins with a number", "n bigint!, day timestamptz!, version int!", "version", "n,day",
			Backlog{"", "", nil, []string{"n", "day"}, true, true, ""}},
		{"a key that begins with a time", "at timestamptz!, event_id uuid!, version int!", "version", "at,event_id",
			Backlog{"", "", nil, []string{"at", "version", "event_id"}, true, true, ""}},
		{"no key", "event_id uuid!, created_at timestamptz!", "", "",
			Backlog{"", "", nil, []string{"created_at"}, true, false, ""}},
		{"nothing to go by", "event_id uuid!", "", "", Backlog{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rel, notNull, filled := backlogTable(t, tt.columns)
			o := testOptions()
			o.Types = func(oid uint32) (*format.Type, error) {
				return map[uint32]*format.Type{
					testEnumOID:   {OID: testEnumOID, Kind: format.KindEnum},
					testDomainOID: {OID: testDomainOID, Kind: format.KindDomain, Base: format.Builtin(oidInt4)},
				}[oid], nil
			}
			if tt.key != "" {
				tt.want.Primary = strings.Split(tt.key, ",")
			}
			for _, name := range tt.want.Primary {
				rel.PrimaryKey = append(rel.PrimaryKey, slices.IndexFunc(rel.Columns, func(c replication.Column) bool { return c.Name == name }))
			}
			got, err := mustRouter(t, o, newFixedTopics()).Backlog(rel, tt.seq, replication.ColumnFacts{NotNull: notNull, Filled: filled})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func backlogTable(t *testing.T, columns string) (rel *replication.Relation, notNull, filled []string) {
	rel = relationOf(t, "outbox")
	for _, c := range strings.Split(columns, ", ") {
		c, must := strings.CutSuffix(c, "!")
		c, has := strings.CutSuffix(c, "=")
		name, typ, _ := strings.Cut(c, " ")
		if must {
			notNull = append(notNull, name)
		}
		if has {
			filled = append(filled, name)
		}
		switch typ {
		case "enum":
			rel.Columns = append(rel.Columns, replication.Column{Name: name, TypeOID: testEnumOID})
		case "domain":
			rel.Columns = append(rel.Columns, replication.Column{Name: name, TypeOID: testDomainOID})
		default:
			rel.Columns = append(rel.Columns, relationOf(t, "x", c).Columns[0])
		}
	}
	return rel, notNull, filled
}
