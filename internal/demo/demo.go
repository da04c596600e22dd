package demo

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kfake"
)

const (
	// shopName is the connector's name, and so the prefix of topics and slot.
	shopName = "shop"
	// slotName follows from shopName, as the configuration's default does.
	slotName = "walrelay_shop"
	// topicPartitions is the default of topics.partitions.
	topicPartitions = 6

	// DefaultSettleBudget suffices for a connector that was killed a moment before
	// the end and has to start again.
	DefaultSettleBudget = 15 * time.Second

	// startBudget bounds the connector's start, drainBudget the reading of the
	// topics' ends.
	startBudget = 60 * time.Second
	drainBudget = 10 * time.Second
	// closeBudget bounds what is left, once the parts have ended.
	closeBudget = 5 * time.Second

	footerEvery = 500 * time.Millisecond
)

// Database is a running PostgreSQL with wal_level logical.
type Database interface {
	// DSN gives a superuser's connection string as a URL, with its password.
	DSN() string
	// Close stops the server and removes its files.
	Close() error
}

// Options says what the demo is made of. StartDatabase and Screen are required,
// and Connector or Run.
type Options struct {
	// StartDatabase starts a PostgreSQL that keeps its files in dir, which does not
	// exist yet. Say prints a line, for what takes long.
	StartDatabase func(ctx context.Context, dir string, say func(string)) (Database, error)
	// Connector is the program and its first arguments; the demo adds -c FILE. It
	// runs as a child process, so that it can be killed.
	Connector []string
	// Run, where set, is the connector in this process, in Connector's place. It
	// returns nil soon after ctx has ended. Nothing kills it.
	Run func(ctx context.Context, dsn string, brokers []string, listen string) error

	Screen    *Screen
	Rate      float64         // the shop's transactions per second
	Seed      uint64          // of what the shop does
	Events    int             // end after so many records; 0: no limit
	Duration  time.Duration   // end after so long; 0: no limit
	KillEvery time.Duration   // SIGKILL to the connector so often; 0: never
	Kill      <-chan struct{} // and whenever this receives; nil: never
	Listen    string          // the status page's address; if taken, a free one
	KafkaPort int             // 0: a free one

	// SettleBudget is how long, at the end, to wait for what was committed and has
	// not arrived. 0: DefaultSettleBudget.
	SettleBudget time.Duration
}

// Run runs the demo until ctx ends, a limit is reached or a part fails, and then
// takes everything down again, whatever has happened. It returns an error if a
// part failed or if what arrived was not, exactly once and in order, what the
// shop had committed. That ctx ended is no error.
func Run(ctx context.Context, o Options) error {
	if o.SettleBudget == 0 {
		o.SettleBudget = DefaultSettleBudget
	}
	d := &demo{Options: o, ledger: NewLedger()}
	err := d.start(ctx)
	if err == nil {
		err = d.watch(ctx)
		// Not under ctx, whose end is what usually brought us here; each step of the
		// way down has a budget of its own.
		err = errors.Join(err, d.finish(context.WithoutCancel(ctx), err == nil))
	} else if ctx.Err() != nil {
		err = nil // Ctrl-C during the start
	}
	d.Screen.EndFooter()
	return errors.Join(err, d.close())
}

// demo is one run.
type demo struct {
	Options
	ledger  *Ledger
	dir     workDir
	kafka   *kfake.Cluster
	client  *consumer
	process *connector // nil where Options.Run is the connector

	shop, connector, consumer *part

	closers []func() error // run in reverse by close
}

// part is a goroutine with its end. Its context outlives a signal: parts are
// ended one after the other by finish.
type part struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when err is set
	err    error
}

func startPart(ctx context.Context, f func(context.Context) error) *part {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &part{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.err = f(ctx)
	}()
	return p
}

// stop ends the part and gives its error; of nil it does nothing.
func (p *part) stop() error {
	if p == nil {
		return nil
	}
	p.cancel()
	<-p.done
	return p.err
}

// onClose registers what close is to do, after everything registered later.
func (d *demo) onClose(f func() error) { d.closers = append(d.closers, f) }

// close takes down what start has put up, in reverse. Parts that run, after a
// start that failed half-way, end first.
func (d *demo) close() error {
	err := errors.Join(d.shop.stop(), d.connector.stop(), d.consumer.stop())
	for i := len(d.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, d.closers[i]())
	}
	return err
}

// start brings everything up, in the order that the package's comment gives.
func (d *demo) start(ctx context.Context) (err error) {
	d.Screen.Footer(" starting PostgreSQL, Kafka and the connector …")
	if d.dir, err = makeWorkDir(); err != nil {
		return err
	}
	d.onClose(d.dir.remove)
	db, err := d.StartDatabase(ctx, d.dir.path("postgres"), d.Screen.Note)
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	d.onClose(db.Close)
	dsn, version, err := createDatabase(ctx, db.DSN())
	if err != nil {
		return err
	}
	shop, err := OpenShop(ctx, dsn, d.Seed, d.ledger, d.Screen.Note)
	if err != nil {
		return err
	}
	d.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeBudget)
		defer cancel()
		return shop.Close(ctx)
	})
	if err := d.startKafka(ctx); err != nil {
		return err
	}
	if err := d.startConnector(ctx, dsn, version); err != nil {
		return err
	}
	d.shop = startPart(ctx, func(ctx context.Context) error { return shop.Run(ctx, d.Rate) })
	return nil
}

// createDatabase creates the shop's database and gives its DSN and the server's
// version.
func createDatabase(ctx context.Context, admin string) (dsn, version string, err error) {
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return "", "", fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if err := conn.QueryRow(ctx, "SELECT split_part(current_setting('server_version'), ' ', 1)").Scan(&version); err != nil {
		return "", "", fmt.Errorf("ask PostgreSQL's version: %w", err)
	}
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+shopName); err != nil {
		return "", "", fmt.Errorf("create the shop's database: %w", err)
	}
	u, err := url.Parse(admin)
	if err != nil {
		// The parser's error quotes the URL, and the URL holds the password.
		return "", "", errors.New("read the database's DSN: want a URL")
	}
	u.Path = "/" + shopName
	return u.String(), version, nil
}

// startKafka starts the embedded Kafka, makes the topics that are known to come,
// and puts the consumer before them. The connector would make them as well; but
// then the first latencies would be the consumer's finding a new topic.
func (d *demo) startKafka(ctx context.Context) error {
	kafka, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.Ports(d.KafkaPort))
	if err != nil {
		return fmt.Errorf("start the embedded Kafka: %w", err)
	}
	d.kafka = kafka
	d.onClose(func() error { kafka.Close(); return nil })
	topics := []string{"shop.public.customers", "shop.public.orders", "shop.public.order_items"}
	for _, t := range eventTypes {
		topics = append(topics, eventTopicPrefix+t)
	}
	for _, t := range topics {
		if err := kafka.CreateTopic(t, topicPartitions, nil); err != nil {
			return fmt.Errorf("create topic %s: %w", t, err)
		}
	}
	c, err := newConsumer(kafka.ListenAddrs(), shopName, d.ledger, d.Screen)
	if err != nil {
		return err
	}
	d.client = c
	d.onClose(func() error { c.client.Close(); return nil })
	d.consumer = startPart(ctx, c.run)
	return nil
}

// startConnector starts the connector, waits until it cannot miss anything any
// more, and prints the header.
func (d *demo) startConnector(ctx context.Context, dsn, version string) error {
	brokers := d.kafka.ListenAddrs()
	listen, err := freeAddress(ctx, d.Listen)
	if err != nil {
		return err
	}
	public, reference, err := d.dir.writeConnection(dsn)
	if err != nil {
		return err
	}
	config, err := d.dir.writeConfig(reference, brokers, listen)
	if err != nil {
		return err
	}
	h := header{version: version, dsn: public, brokers: brokers, config: config, status: "http://" + listen + "/",
		pgpass: d.dir.path("pgpass"), killable: d.Run == nil && d.Kill != nil}
	d.connector, err = d.connectorPart(ctx, dsn, brokers, listen, config)
	if err != nil {
		return err
	}
	if err := d.awaitSlot(ctx, dsn); err != nil {
		return err
	}
	h.print(d.Screen)
	return nil
}

func (d *demo) connectorPart(ctx context.Context, dsn string, brokers []string, listen, config string) (*part, error) {
	if d.Run != nil {
		return startPart(ctx, func(ctx context.Context) error {
			if err := d.Run(ctx, dsn, brokers, listen); err != nil {
				return fmt.Errorf("run the connector: %w", err)
			}
			return nil
		}), nil
	}
	command := append(append([]string{}, d.Connector...), "-c", config)
	process, err := newConnector(command, string(d.dir))
	if err != nil {
		return nil, err
	}
	d.process = process
	d.onClose(process.close)
	return startPart(ctx, process.run), nil
}

// awaitSlot waits until the connector's slot is there and complete: what commits
// from then on is delivered. A slot whose creation is under way has no confirmed
// position yet.
func (d *demo) awaitSlot(ctx context.Context, dsn string) error {
	ctx, cancel := context.WithTimeout(ctx, startBudget)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		var ready bool
		err := conn.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_replication_slots
			WHERE slot_name = $1 AND confirmed_flush_lsn IS NOT NULL`, slotName).Scan(&ready)
		if err != nil {
			return fmt.Errorf("wait for the connector's slot: %w%s", err, d.connectorLog())
		}
		if ready {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the connector's slot %s: %w%s", slotName, context.Cause(ctx), d.connectorLog())
		case <-d.connector.done:
			if d.connector.err == nil {
				return errors.New("run the connector: it ended before it had made its slot")
			}
			return nil // close gives the part's error
		case <-tick.C:
		}
	}
}

func (d *demo) connectorLog() string {
	if d.process == nil {
		return ""
	}
	return d.process.lastLines()
}
