package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/walrelay/walrelay/checkpoint"
)

// fakeMode in the environment makes this test binary the connector, as a child
// process of the demo.
const fakeMode = "WALRELAY_DEMO_TEST_CONNECTOR"

func TestMain(m *testing.M) {
	switch os.Getenv(fakeMode) {
	case "":
		goleak.VerifyTestMain(m)
	case "parent":
		runParent()
	case "crash":
		fmt.Fprintln(os.Stderr, "no way")
		os.Exit(3)
	default:
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := runFakeFromFile(ctx, os.Args[len(os.Args)-1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// runFakeFromFile reads what it needs from the YAML that the demo wrote.
func runFakeFromFile(ctx context.Context, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	dsn := regexp.MustCompile(`dsn: (\S+)`).FindStringSubmatch(string(text))[1]
	file := regexp.MustCompile(`\$\{file:([^}]+)\}`).FindStringSubmatch(dsn)
	password, err := os.ReadFile(file[1])
	if err != nil {
		return err
	}
	brokers := regexp.MustCompile(`brokers: \[(\S+)\]`).FindStringSubmatch(string(text))[1]
	f := fake{}
	if os.Getenv(fakeMode) == "double" {
		f.double = true
	}
	return f.run(ctx, strings.Replace(dsn, file[0], string(password), 1), []string{brokers}, "")
}

// fake is a connector that is good enough for a shop: it polls the slot by SQL,
// delivers each poll as one Kafka transaction, and after a restart skips what the
// topics hold. It can be told to do each thing wrong that the demo must notice.
type fake struct {
	double bool // deliver the first source transaction twice
	lose   bool // leave the third source transaction out
}

func (f fake) run(ctx context.Context, dsn string, brokers []string, _ string) error {
	work := context.WithoutCancel(ctx) // a poll in hand is finished
	conn, err := pgx.Connect(work, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(work)
	var exists bool
	if err := conn.QueryRow(work, `SELECT count(*) > 0 FROM pg_replication_slots WHERE slot_name = $1`, slotName).Scan(&exists); err != nil {
		return err
	}
	if !exists {
		if _, err := conn.Exec(work, `CREATE PUBLICATION p FOR ALL TABLES`); err != nil {
			return err
		}
		if _, err := conn.Exec(work, `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, slotName); err != nil {
			return err
		}
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.TransactionalID("fake"), kgo.AllowAutoTopicCreation())
	if err != nil {
		return err
	}
	defer client.Close()
	if _, _, err := client.ProducerID(work); err != nil { // ends the killed one's transaction
		return err
	}
	last, err := lastPosition(work, brokers)
	if err != nil {
		return err
	}
	dec := decoder{relations: map[uint32]*pglogrepl.RelationMessage{}, last: last, fake: f}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		// The slot is the lease: a killed predecessor's backend holds it until it has
		// noticed, in the peek or the advance, neither of which has then begun.
		var held *pgconn.PgError
		if err := poll(work, conn, client, &dec); errors.As(err, &held) && held.Code == "55006" {
			// the next tick asks again
		} else if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	return nil
}

func poll(ctx context.Context, conn *pgx.Conn, client *kgo.Client, dec *decoder) error {
	rows, err := conn.Query(ctx, `SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL,
		'proto_version', '1', 'publication_names', 'p')`, slotName)
	if err != nil {
		return err
	}
	var records []*kgo.Record
	var lsn string
	var data []byte
	dec.end = ""
	if _, err := pgx.ForEachRow(rows, []any{&lsn, &data}, func() error {
		rs, err := dec.decode(data)
		records = append(records, rs...)
		return err
	}); err != nil {
		return err
	}
	if len(records) > 0 {
		if err := client.BeginTransaction(); err != nil {
			return err
		}
		if err := client.ProduceSync(ctx, records...).FirstErr(); err != nil {
			return err
		}
		if err := client.EndTransaction(ctx, kgo.TryCommit); err != nil {
			return err
		}
	}
	if dec.end != "" {
		_, err = conn.Exec(ctx, `SELECT pg_replication_slot_advance($1, $2::text::pg_lsn)`, slotName, dec.end)
	}
	return err
}

// lastPosition reads all topics and gives the highest position in them.
func lastPosition(ctx context.Context, brokers []string) (string, error) {
	screen := NewScreen(new(strings.Builder), nil, false)
	c, err := newConsumer(brokers, shopName, NewLedger(), screen)
	if err != nil {
		return "", err
	}
	defer c.client.Close()
	p := startPart(ctx, c.run)
	if err := c.drain(ctx, p.done); err != nil {
		return "", err
	}
	if err := p.stop(); err != nil {
		return "", err
	}
	last := ""
	for _, pos := range c.checker.last {
		last = max(last, pos)
	}
	return last, nil
}

// decoder turns pgoutput messages into the records of INTERFACE's form.
type decoder struct {
	fake
	relations map[uint32]*pglogrepl.RelationMessage
	begin     *pglogrepl.BeginMessage
	seq       uint64
	txns      int
	last      string // deliver what is behind it
	end       string
}

func (d *decoder) decode(data []byte) ([]*kgo.Record, error) {
	msg, err := pglogrepl.Parse(data)
	if err != nil {
		return nil, err
	}
	switch m := msg.(type) {
	case *pglogrepl.RelationMessage:
		d.relations[m.RelationID] = m
	case *pglogrepl.BeginMessage:
		d.begin, d.seq = m, 0
		d.txns++
	case *pglogrepl.CommitMessage:
		d.end = m.TransactionEndLSN.String()
	case *pglogrepl.InsertMessage:
		return d.records("c", d.relations[m.RelationID], nil, m.Tuple), nil
	case *pglogrepl.UpdateMessage:
		return d.records("u", d.relations[m.RelationID], m.OldTuple, m.NewTuple), nil
	case *pglogrepl.DeleteMessage:
		return d.records("d", d.relations[m.RelationID], m.OldTuple, nil), nil
	}
	return nil, nil
}

func (d *decoder) records(op string, rel *pglogrepl.RelationMessage, before, after *pglogrepl.TupleData) []*kgo.Record {
	position := string(checkpoint.AppendHeader(nil, checkpoint.LSN(d.begin.FinalLSN), d.seq))
	d.seq++
	if position <= d.last || d.lose && d.txns == 3 {
		return nil
	}
	d.last = position
	headers := []kgo.RecordHeader{{Key: "position", Value: []byte(position)}}
	tuple := after
	if tuple == nil {
		tuple = before
	}
	get := func(name string) string {
		for i, c := range rel.Columns {
			if c.Name == name {
				return string(tuple.Columns[i].Data)
			}
		}
		return ""
	}
	var out []*kgo.Record
	if rel.RelationName == "outbox" {
		headers = append(headers, kgo.RecordHeader{Key: "id", Value: []byte(get("event_id"))},
			kgo.RecordHeader{Key: "type", Value: []byte(get("event_type"))})
		out = append(out, &kgo.Record{Topic: eventTopicPrefix + get("event_type"), Key: []byte(get("aggregate_id")),
			Value: []byte(get("payload")), Headers: headers})
	} else {
		topic, key := "shop.public."+rel.RelationName, []byte(`{"id":`+get("id")+`}`)
		value := fmt.Appendf(nil, `{"before":%s,"after":%s,"op":%q,"ts_ms":%d,"source":{"schema":"public","table":%q,"tx_id":%d}}`,
			image(rel, before), image(rel, after), op, d.begin.CommitTime.UnixMilli(), rel.RelationName, d.begin.Xid)
		out = append(out, &kgo.Record{Topic: topic, Key: key, Value: value, Headers: headers})
		if op == "d" {
			out = append(out, &kgo.Record{Topic: topic, Key: key, Headers: headers})
		}
	}
	if d.double && d.txns == 1 {
		for _, r := range out[:len(out):len(out)] {
			twin := *r
			out = append(out, &twin)
		}
	}
	return out
}

func image(rel *pglogrepl.RelationMessage, t *pglogrepl.TupleData) string {
	if t == nil {
		return "null"
	}
	parts := make([]string, 0, len(rel.Columns))
	for i, c := range rel.Columns {
		if t.Columns[i].DataType == 'n' {
			continue
		}
		v, _ := json.Marshal(string(t.Columns[i].Data))
		parts = append(parts, fmt.Sprintf("%q:%s", c.Name, v))
	}
	return "{" + strings.Join(parts, ",") + "}"
}
