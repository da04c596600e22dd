package router

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/killpoint"
)

// ErrFenced says that the transactional id was initialised by somebody else (or that
// the broker ended a transaction that stood open for too long): this instance's
// epoch is over and nothing of its open transaction will be seen.
var ErrFenced = errors.New("producer is fenced")

// ErrUnknownOutcome says that it is not known whether the transaction committed.
//
// Invariant 5 (unknown outcome means start over): whoever gets it gives the stream
// up and reads the checkpoint again; nothing is guessed, no batch is sent again.
var ErrUnknownOutcome = errors.New("outcome of the Kafka transaction is not known")

// ProducerOptions configures a Producer.
type ProducerOptions struct {
	Client             ClientOptions
	TransactionalID    string
	TransactionTimeout time.Duration
	Compression        kgo.CompressionCodec
	CheckpointTopic    string
	MaxRecords         int // of a batch
	Logger             zerolog.Logger
}

// Producer delivers batches, each in one Kafka transaction with the checkpoint after
// it. It is made anew for every start over: its epoch is its right to write. One
// goroutine owns it.
type Producer struct {
	o       ProducerOptions
	client  *kgo.Client
	catalog *Catalog
	metrics *Metrics
	log     *checkpoint.Log

	records  []kgo.Record // reused from batch to batch
	headers  []kgo.RecordHeader
	topics   map[*Topic]int // of the batch in hand; counted after its commit
	names    []string
	ended    time.Time // of the last transaction
	answered answers
}

// txnPause is kept between two transactions: one that begins the moment the last
// one ended is answered CONCURRENT_TRANSACTIONS until the markers are written, and
// the client then backs off for longer than the markers take (seen on Kafka 4.3
// with transaction version 2).
const txnPause = time.Millisecond

// refreshAge is how old the partition counts of a batch's topics may be.
const refreshAge = time.Second

// NewProducer makes a producer; Fence comes first, then Resume, then Deliver.
func NewProducer(o ProducerOptions, catalog *Catalog, m *Metrics) (*Producer, error) {
	p := &Producer{o: o, catalog: catalog, metrics: m, topics: map[*Topic]int{}}
	opts := append(o.Client.Opts(),
		kgo.TransactionalID(o.TransactionalID),
		kgo.TransactionTimeout(o.TransactionTimeout),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.ProducerBatchCompression(o.Compression, kgo.NoCompression()),
		kgo.RecordPartitioner(chosenPartitioner{}),
		kgo.ProducerBatchMaxBytesFn(p.maxBatchBytes),
		// Delivery produces a whole batch and then flushes: lingering until the flush
		// makes record batches as large as they can be.
		kgo.ProducerLinger(time.Second),
		kgo.MaxBufferedRecords(2*o.MaxRecords+1<<16),
		kgo.ConcurrentTransactionsBackoff(2*time.Millisecond),
		kgo.MetadataMaxAge(30*time.Second),
		kgo.MetadataMinAge(250*time.Millisecond),
	)
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("make Kafka producer: %w", err)
	}
	p.client = client
	return p, nil
}

// Close ends the client. An open transaction is left to the next Fence.
func (p *Producer) Close() { p.client.Close() }

// maxBatchBytes is asked when a topic's first record comes; Fence has looked the
// checkpoint topic up, the others are known since they were routed to.
func (p *Producer) maxBatchBytes(topic string) int32 { return maxBatchBytes(p.catalog, topic) }

func maxBatchBytes(c *Catalog, topic string) int32 {
	if t := c.Lookup(topic); t != nil && t.MaxMessageBytes > 0 {
		return min(t.MaxMessageBytes, 1<<30) // the client's own bound
	}
	return 1000012 // the client's default
}

// Fence initialises the transactional id: an older instance's open transaction is
// aborted and that instance is shut out (KIP-98, KIP-360). It waits for as long as
// Kafka does not answer. The checkpoint topic must be there.
//
// Invariant 3: only the holder of the slot calls it.
func (p *Producer) Fence(ctx context.Context) error {
	if _, _, err := p.client.ProducerID(ctx); err != nil {
		if errors.Is(err, kerr.InvalidTransactionTimeout) {
			return &checkpoint.Refusal{
				What:   fmt.Sprintf("kafka.transaction-timeout %s is more than the brokers allow (transaction.max.timeout.ms)", p.o.TransactionTimeout),
				Risk:   "no transaction can begin",
				Remedy: "lower kafka.transaction-timeout, or raise transaction.max.timeout.ms on the brokers",
				Err:    err,
			}
		}
		return fmt.Errorf("initialise transactional id %s: %w", p.o.TransactionalID, err)
	}
	// For what it takes at once.
	if err := p.catalog.Ensure(ctx, []string{p.o.CheckpointTopic}, TopicSpec{exists: true}); err != nil {
		return fmt.Errorf("look at checkpoint topic: %w", err)
	}
	return nil
}

// Resume tells which checkpoint the deliveries go on from.
func (p *Producer) Resume(cp checkpoint.Checkpoint) { p.log = checkpoint.NewLog(cp) }

// answers collects the outcome of the records of one transaction.
type answers struct {
	mu          sync.Mutex
	err         error
	failed      atomic.Int64
	acked       atomic.Int64
	stateOffset int64
}

func (a *answers) reset() {
	a.err, a.stateOffset = nil, checkpoint.StateBeside
	a.failed.Store(0)
	a.acked.Store(0)
}

func (a *answers) promise(r *kgo.Record, err error) {
	if err == nil {
		a.acked.Add(1)
		return
	}
	a.failed.Add(1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err == nil {
		a.err = fmt.Errorf("produce to topic %s, partition %d: %w", r.Topic, r.Partition, err)
	}
}

// Deliver writes the batch's records and the checkpoint cp after them in one Kafka
// transaction. When it returns nil, both are committed and cp may be confirmed.
// After an error the producer is of no use any more: ErrFenced, ErrUnknownOutcome,
// or any other, for which the transaction was not committed.
//
// Invariant 2 (records and checkpoint commit together).
func (p *Producer) Deliver(ctx context.Context, b *Batch, cp *checkpoint.Checkpoint) error {
	if err := p.lookAtTopics(ctx, b); err != nil {
		return err
	}
	killpoint.At(killpoint.BatchFilled)
	if err := p.pause(ctx); err != nil {
		return err
	}
	id, epoch, err := p.client.ProducerID(ctx)
	if err != nil {
		return fmt.Errorf("begin Kafka transaction: %w", classifyKafka(err))
	}
	if err := p.client.BeginTransaction(); err != nil {
		return fmt.Errorf("begin Kafka transaction: %w", classifyKafka(err))
	}
	killpoint.At(killpoint.Begun)
	p.answered.reset()
	n := p.produce(ctx, b)
	if killpoint.Armed(killpoint.RecordsAcked) {
		// Only for the test that ends the process here: otherwise records and checkpoint
		// share the last requests.
		if err := p.client.Flush(ctx); err != nil {
			return p.abort(err)
		}
		killpoint.At(killpoint.RecordsAcked)
	}
	records, err := p.log.Records(cp)
	if err != nil {
		return p.abort(err)
	}
	for _, r := range records {
		n++
		p.client.Produce(ctx, &kgo.Record{Topic: p.o.CheckpointTopic, Key: r.Key, Value: r.Value}, p.checkpointPromise(r.Key))
	}
	if err := p.client.Flush(ctx); err != nil {
		return p.abort(fmt.Errorf("flush Kafka transaction: %w", err))
	}
	if err := p.complete(n); err != nil {
		return p.abort(err)
	}
	killpoint.At(killpoint.CheckpointAcked)
	if err := p.commit(ctx, id, epoch); err != nil {
		return err
	}
	killpoint.At(killpoint.Committed)
	p.log.Committed(p.answered.stateOffset)
	p.count(b)
	return nil
}

// Settle waits until what the last delivery committed is visible to read_committed
// consumers: EndTxn is answered when the commit is certain, and the markers that make it
// visible follow (KIP-98; with transaction version 2 they may take a moment). It is for
// the end of a run, whose caller may look at once; an error means only that it was not
// seen to be visible yet.
func (p *Producer) Settle(ctx context.Context) error {
	admin := kadm.NewClient(p.client)
	names := append([]string{p.o.CheckpointTopic}, p.names...)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		ends, err := admin.ListEndOffsets(ctx, names...)
		if err != nil {
			return fmt.Errorf("read end offsets: %w", err)
		}
		stable, err := admin.ListCommittedOffsets(ctx, names...)
		if err != nil {
			return fmt.Errorf("read stable offsets: %w", err)
		}
		behind := false
		ends.Each(func(end kadm.ListedOffset) {
			at, ok := stable.Lookup(end.Topic, end.Partition)
			behind = behind || !ok || at.Offset < end.Offset
		})
		if !behind {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// complete makes sure that each of the n records of the transaction was
// acknowledged, the checkpoint among them.
func (p *Producer) complete(n int) error {
	if p.answered.failed.Load() > 0 {
		return classifyKafka(p.answered.err)
	}
	if got := p.answered.acked.Load(); got != int64(n) {
		return fmt.Errorf("%d of %d records are acknowledged after a flush", got, n)
	}
	return nil
}

// commit ends the transaction. The client ends it as an abort, and says nothing,
// where no record was acknowledged; complete has excluded that. It also takes a new
// epoch by itself where it lost its own, which would abort what was written under
// the old one; that is excluded here.
func (p *Producer) commit(ctx context.Context, id int64, epoch int16) error {
	nowID, nowEpoch, err := p.client.ProducerID(ctx)
	if err != nil {
		return p.abort(fmt.Errorf("commit Kafka transaction: %w", classifyKafka(err)))
	}
	if nowID != id || nowEpoch != epoch {
		return p.abort(fmt.Errorf("commit Kafka transaction: producer id went from %d:%d to %d:%d in the middle of it", id, epoch, nowID, nowEpoch))
	}
	if err := p.client.EndTransaction(ctx, kgo.TryCommit); err != nil {
		if isFenced(err) {
			return fmt.Errorf("commit Kafka transaction: %w: %w", ErrFenced, err)
		}
		return fmt.Errorf("commit Kafka transaction: %w: %w", ErrUnknownOutcome, err)
	}
	p.ended = time.Now()
	return nil
}

// abort tries, briefly, to end the transaction, so that read_committed consumers need
// not wait for its timeout. What it returns is cause: the abort is a courtesy, the
// next Fence does it for certain.
func (p *Producer) abort(cause error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := p.client.AbortBufferedRecords(ctx); err == nil {
		err = p.client.EndTransaction(ctx, kgo.TryAbort)
		p.o.Logger.Debug().AnErr("abort", err).Err(cause).Msg("kafka transaction aborted")
	}
	return cause
}

// isFenced tells whether err says that the epoch is over.
func isFenced(err error) bool {
	return errors.Is(err, kerr.ProducerFenced) || errors.Is(err, kerr.InvalidProducerEpoch) || errors.Is(err, kerr.InvalidProducerIDMapping)
}

func classifyKafka(err error) error {
	if isFenced(err) {
		return fmt.Errorf("%w: %w", ErrFenced, err)
	}
	return err
}
