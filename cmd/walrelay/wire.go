package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/internal/polling"
	"github.com/walrelay/walrelay/internal/relay"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router"
	"github.com/walrelay/walrelay/router/format"
)

// relayOptions turns the configuration into the options of each package. This is the
// only place that knows everybody.
func relayOptions(c config.Config, log zerolog.Logger, reg prometheus.Registerer) (relay.Options, error) {
	client, err := kafkaOptions(c.Kafka, log)
	if err != nil {
		return relay.Options{}, err
	}
	tableTopic, err := router.TableTopics(c.Topics.Table, c.Topics.Prefix)
	if err != nil {
		return relay.Options{}, fmt.Errorf("topics.table: %w", err)
	}
	prefix := func(t string) string { return strings.ReplaceAll(t, "{prefix}", c.Topics.Prefix) }
	ro := router.Options{
		Name:            c.Name,
		Tables:          c.Source.Tables.Match,
		Messages:        c.Source.Messages.Match,
		Keys:            c.Source.Keys,
		Columns:         columnOptions(c.Source.Columns),
		TableTopic:      tableTopic,
		MessageTopic:    prefix(c.Topics.Message),
		Prefix:          c.Topics.Prefix,
		Tombstones:      c.Format.Tombstones,
		Unwrapped:       !c.Format.Envelope,
		DeletedField:    c.Format.Deletes == config.DeletesField,
		DeadLetterTopic: prefix(c.DeadLetter.Topic),
		CheckpointTopic: c.Kafka.CheckpointTopic,
	}
	if c.DeadLetter.OnError != config.OnErrorStop {
		ro.DeadLetterOn = c.DeadLetter.On
		ro.Aside = newAsideLog(log).note
	}
	if c.Format.TOAST == config.TOASTMarker {
		ro.ToastMarker = &c.Format.TOASTMarker
	}
	if d := c.Format.Debezium; c.Format.Types == config.TypesDebezium {
		ro.Debezium = &router.DebeziumOptions{
			Debezium: format.Debezium{
				Decimal: d.DecimalHandling, Time: d.TimePrecision, Interval: d.IntervalHandling, Binary: d.BinaryHandling,
				Hstore: d.HstoreHandling, Unavailable: d.Placeholder,
			},
			Schemas: d.SchemasEnable,
		}
	}
	publications := replication.PlanOptions{
		Publication:    c.Source.Publication,
		Match:          c.Source.Tables.Match,
		KeylessInserts: c.Source.Keyless == config.KeylessInserts,
	}
	backlogs, after := map[string]string{}, map[string]string{}
	for _, o := range c.Outbox {
		schema, table, _ := strings.Cut(o.Table, ".")
		ro.Outbox = append(ro.Outbox, router.OutboxOptions{
			Schema: schema, Table: table, Prefix: o.Prefix, Topic: o.Topic, Key: o.Key,
			Columns: o.Columns, Headers: o.Headers, HeadersFrom: o.HeadersFrom, NullPayload: o.NullPayload,
			Partition: o.Partition, Format: o.Format, CloudEvents: o.CloudEvents, Envelope: o.Envelope,
			JSONStrings: o.JSONStrings, Route: router.RouteOptions(o.Route),
		})
		if o.Table == "" {
			continue
		}
		backlogs[o.Table] = o.Backlog()
		if o.After != config.AfterKeep {
			after[o.Table] = o.After
		}
		publications.Outbox = append(publications.Outbox, o.Table)
	}
	return relay.Options{
		DSN:          c.Source.DSN.Reveal(),
		AppName:      "walrelay_" + c.Name,
		Slot:         c.Source.Slot,
		Publications: publications,
		Existing:     c.Source.PublicationMode == config.PublicationExisting,
		Kafka:        client,
		Producer: router.ProducerOptions{
			Client:             client,
			TransactionalID:    c.Kafka.TransactionalID,
			TransactionTimeout: c.Kafka.TransactionTimeout.Std(),
			Compression:        router.Compression(c.Kafka.Compression),
			CheckpointTopic:    c.Kafka.CheckpointTopic,
			MaxRecords:         c.Batch.MaxRecords,
			Logger:             log.With().Str("component", "producer").Logger(),
		},
		Topics: router.TopicSpec{
			Create:            c.Topics.Create,
			Partitions:        int32(c.Topics.Partitions),
			ReplicationFactor: int16(c.Topics.ReplicationFactor),
			Config:            c.Topics.Config,
		},
		Checkpoint: ckafka.Options{
			Topic:             c.Kafka.CheckpointTopic,
			ReplicationFactor: int16(c.Topics.ReplicationFactor),
			MinInsyncReplicas: minInsync(c.Topics.Config),
		},
		Router: ro,
		Snapshot: relay.SnapshotOptions{
			Never:      c.Snapshot.Mode == config.SnapshotNever,
			Only:       c.Snapshot.Mode == config.SnapshotOnly,
			Exclude:    c.Snapshot.Exclude.Match,
			Rows:       c.Snapshot.ChunkRows,
			Bytes:      int64(c.Snapshot.ChunkBytes),
			Readers:    c.Snapshot.Readers,
			PrimaryDSN: c.Source.PrimaryDSN.Reveal(),
			Outbox:     backlogs,
		},
		After: after,
		Anchor: relay.AnchorOptions{
			WAL: int64(c.Replay.RetainWAL), Time: c.Replay.RetainTime.Std(), MaxRetained: int64(c.Source.MaxRetainedWAL),
		},
		MessagePrefixes: c.Source.Messages,
		Limits:          batchLimits(c.Batch),
		Buffer:          readAhead(c.Batch),
		MaxDelay:        c.Batch.MaxDelay.Std(),
		StopTimeout:     c.StopTimeout.Std(),
		ExitOnFenced:    c.OnFenced == config.OnFencedExit,
		Logger:          log.With().Str("component", "relay").Logger(),
		Registerer:      reg,
	}, nil
}

// columnOptions is the only place where a salt is revealed.
func columnOptions(tables map[string]config.Columns) map[string]router.ColumnOptions {
	kinds := map[string]format.MaskKind{
		config.MaskSHA256: format.MaskSHA256, config.MaskHMAC: format.MaskHMAC, config.MaskTruncate: format.MaskTruncate,
		config.MaskFixed: format.MaskFixed, config.MaskNull: format.MaskNull,
	}
	all := map[string]router.ColumnOptions{}
	for table, c := range tables {
		o := router.ColumnOptions{Exclude: c.Exclude, Gone: c.Gone, Masks: map[string]format.Mask{}}
		for column, m := range c.Mask {
			o.Masks[column] = format.Mask{Kind: kinds[m.Kind], Text: m.Text, Length: m.Length, Salt: []byte(m.Salt.Reveal())}
		}
		all[table] = o
	}
	return all
}

// pollingOptions takes what polling shares with the relay.
func pollingOptions(c config.Config, f runFlags, o relay.Options, log zerolog.Logger) polling.Options {
	p := polling.Options{
		DSN:         o.DSN,
		AppName:     o.AppName,
		Slot:        o.Slot,
		Interval:    c.Source.PollInterval.Std(),
		StopTimeout: o.StopTimeout,
		Kafka:       o.Kafka,
		Publisher: router.PublisherOptions{
			Client: o.Kafka, Compression: o.Producer.Compression, MaxRecords: c.Batch.MaxRecords, Logger: o.Producer.Logger,
		},
		Topics:        o.Topics,
		Router:        o.Router,
		Limits:        o.Limits,
		UntilCaughtUp: f.untilCaughtUp,
		Logger:        log.With().Str("component", "polling").Logger(),
		Registerer:    o.Registerer,
	}
	for i, outbox := range o.Router.Outbox {
		p.Outbox = append(p.Outbox, polling.Outbox{
			Schema: outbox.Schema, Table: outbox.Table, Delete: c.Outbox[i].After == config.AfterDelete,
		})
	}
	return p
}

// readAhead is the part of batch.max-bytes that the stream's queue takes, so that the
// queue, the batch in hand and the batch on its way stay within twice max-bytes.
func readAhead(b config.Batch) int64 {
	return min(int64(b.MaxBytes)/8, replication.DefaultBuffer)
}

func batchLimits(b config.Batch) router.Limits {
	return router.Limits{Bytes: int(int64(b.MaxBytes) - readAhead(b)), Records: b.MaxRecords}
}

// minInsync gives the checkpoint topic the guarantee that the others have.
func minInsync(c map[string]string) int {
	n, err := strconv.Atoi(c["min.insync.replicas"])
	if err != nil {
		return 0
	}
	return n
}

func kafkaOptions(k config.Kafka, log zerolog.Logger) (router.ClientOptions, error) {
	o := router.ClientOptions{Brokers: k.Brokers, Logger: log.With().Str("component", "kafka").Logger()}
	var err error
	if k.TLS.Enabled {
		if o.TLS, err = tlsConfig(k.TLS); err != nil {
			return o, err
		}
	}
	o.SASL, err = router.SASLOptions{
		Mechanism: k.SASL.Mechanism, Username: k.SASL.Username, Password: k.SASL.Password.Reveal(), Token: k.SASL.Token.Reveal(),
		AccessKey: k.SASL.AccessKey, SecretKey: k.SASL.SecretKey.Reveal(), SessionToken: k.SASL.SessionToken.Reveal(),
	}.Mechanisms()
	return o, err
}

func tlsConfig(t config.TLS) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("kafka.tls.ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("kafka.tls.ca: %s holds no PEM certificate; name a file that does", t.CA)
		}
	}
	if t.Cert != "" {
		pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("kafka.tls.cert and key: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}
