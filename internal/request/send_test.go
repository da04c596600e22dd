package request

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/harness"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
)

// connector stands for one that has run once: publications in a database, and a
// checkpoint of it in Kafka.
type connector struct {
	t     *testing.T
	pg    *harness.PG
	kafka *harness.Cluster
	o     Options
	cl    *kgo.Client
}

func newConnector(t *testing.T) *connector {
	pg, kafka := harness.Postgres(t), harness.Kafka(t)
	pg.Exec(testShop)
	c := &connector{t: t, pg: pg, kafka: kafka, o: testRequestOptions(pg.DSN()), cl: kafka.Client(t)}
	c.o.Kafka = router.ClientOptions{Brokers: kafka.Brokers(), Logger: zerolog.Nop()}
	c.o.Checkpoint = ckafka.Options{Topic: "_walrelay." + kafka.Unique()}
	return c
}

// deliver writes a first checkpoint, as the connector does.
func (c *connector) deliver(source checkpoint.Source) {
	c.t.Helper()
	ctx := c.t.Context()
	if err := ckafka.NewStore(c.cl, c.o.Checkpoint).EnsureTopic(ctx); err != nil {
		c.t.Fatal(err)
	}
	p, err := router.NewProducer(router.ProducerOptions{
		Client: c.o.Kafka, TransactionalID: c.kafka.Unique(), TransactionTimeout: time.Minute, Compression: kgo.Lz4Compression(),
		CheckpointTopic: c.o.Checkpoint.Topic, MaxRecords: 100, Logger: zerolog.Nop(),
	}, router.NewCatalog(c.cl), router.NewMetrics(prometheus.NewRegistry()))
	if err != nil {
		c.t.Fatal(err)
	}
	defer p.Close()
	if err := p.Fence(ctx); err != nil {
		c.t.Fatal(err)
	}
	cp := checkpoint.Checkpoint{Position: checkpoint.Position{LSN: 0x100}, Source: source}
	p.Resume(cp)
	b := router.NewBatch(router.Limits{Bytes: 1 << 10, Records: 10})
	b.Advance(cp.Position, false)
	if err := p.Deliver(ctx, b, &cp); err != nil {
		c.t.Fatal(err)
	}
	if err := p.Settle(ctx); err != nil {
		c.t.Fatal(err)
	}
}

func (c *connector) source() checkpoint.Source {
	c.t.Helper()
	conn, err := c.o.Connect(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(c.t.Context()))
	db, err := replication.ReadDatabase(c.t.Context(), conn)
	if err != nil {
		c.t.Fatal(err)
	}
	return db.Source()
}

// ask sends a request for orders.
func (c *connector) ask() (checkpoint.Request, int64, error) {
	c.t.Helper()
	r, err := New([]string{"orders", "My Schema.Order*\"Items"}, "true", false, time.Now())
	if err != nil {
		c.t.Fatal(err)
	}
	offset, err := Send(c.t.Context(), c.o, r)
	return r, offset, err
}

func (c *connector) refuses(want string) {
	c.t.Helper()
	if _, _, err := c.ask(); !checkpoint.IsRefusal(err) || !strings.Contains(err.Error(), want) {
		c.t.Errorf("%v, want a refusal with %q", err, want)
	}
}

// A checkpoint topic that holds a request and no checkpoint would keep the connector
// from its first start.
func TestNothingIsAskedOfAConnectorThatNeverRan(t *testing.T) {
	c := newConnector(t)
	c.refuses("the checkpoint topic " + c.o.Checkpoint.Topic + " does not exist: the connector has not run yet")
	store := ckafka.NewStore(c.cl, c.o.Checkpoint)
	if err := store.EnsureTopic(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.refuses("holds no checkpoint: the connector has not run yet")
	if virgin, reason, err := store.Virgin(t.Context()); err != nil || !virgin {
		t.Errorf("something was written to the topic: %s (%v)", reason, err)
	}
}

func TestNothingIsAskedOfAConnectorOfAnotherDatabase(t *testing.T) {
	c := newConnector(t)
	other := c.source()
	other.SystemID += "1"
	c.deliver(other)
	c.refuses("source.dsn leads to database " + c.pg.Name)
}

func TestTheRequestIsInTheCheckpointTopic(t *testing.T) {
	c := newConnector(t)
	c.deliver(c.source())
	first, at, err := c.ask()
	if err != nil {
		t.Fatal(err)
	}
	second, next, err := c.ask()
	if err != nil || next <= at {
		t.Fatalf("offset %d after %d: %v", next, at, err)
	}
	for offset, want := range map[int64]checkpoint.Request{at: first, next: second} {
		cl := c.kafka.Client(t, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{c.o.Checkpoint.Topic: {0: kgo.NewOffset().At(offset)}}))
		fetches := cl.PollRecords(t.Context(), 1)
		if err := fetches.Err(); err != nil {
			t.Fatal(err)
		}
		rec := fetches.Records()[0]
		id, ok := checkpoint.RequestID(rec.Key)
		got, err := checkpoint.DecodeRequest(id, rec.Value)
		if err != nil || !ok || rec.Offset != offset {
			t.Fatalf("offset %d: %s, %v", rec.Offset, rec.Key, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	// What is wrong with one table keeps all of them from being asked for.
	r, err := New([]string{"orders", "nosuch"}, "", false, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Send(t.Context(), c.o, r); !checkpoint.IsRefusal(err) {
		t.Errorf("%v, want a refusal", err)
	}
	_, end, err := c.ask()
	if err != nil || end != next+1 {
		t.Errorf("the next request is at offset %d, want %d: %v", end, next+1, err)
	}
}
