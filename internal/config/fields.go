package config

import (
	"reflect"
	"strings"
)

// spec is what is known of one key beside its Go type. Paths write a list's
// elements as [], as in outbox[].table.
type spec struct {
	path string
	doc  string   // for the schema; the same facts as deploy/walrelay.yaml tells at length
	enum []string // the choices, where there are some
	// later holds choices that are named elsewhere in the documentation but
	// not there in this version; they deserve a better word than "unknown".
	later    []string
	min, max string // bounds, in the form that the key's type is written in
	required bool   // has no default
	whenSet  bool   // Print leaves it out where it is empty
}

// specs is the table of all keys, in the order of the file. A test holds it
// equal to the structs' tags, both ways.
func specs() []spec {
	return []spec{
		{path: "name", required: true, doc: "Identity of this connector: the defaults of slot, publication, transactional id, checkpoint topic and topic prefix follow it."},

		{path: "source", doc: "The database that is read."},
		{path: "source.dsn", required: true, doc: "Connection string, postgres://user:password@host:5432/database or key=value pairs. Printed with the password masked."},
		{path: "source.slot", doc: "Logical replication slot, created on the first start. Default walrelay_<name>."},
		{path: "source.publication", doc: "Publication that is read. Default walrelay_<name>."},
		{path: "source.publication-mode", enum: []string{PublicationManaged, PublicationExisting}, doc: "managed: created and kept equal to tables, with outbox and keyless tables in a second one, <publication>_insert, that publishes inserts only. existing: the named one, used as it is."},
		{path: "source.tables", doc: "Tables to capture: globs over schema.table with * and ?; a leading ! excludes."},
		{path: "source.columns", doc: "Columns by schema.table that are left out (exclude) or masked (mask: sha256, null, {hmac-sha256: SALT}, {truncate: N} or {fixed: TEXT}) in everything that leaves. gone: those that the table has no more."},
		{path: "source.messages", doc: "Prefixes of logical messages to capture, as globs; a leading ! excludes."},
		{path: "source.keyless", enum: []string{KeylessRefuse, KeylessInserts}, doc: "Tables without replica identity: refuse the start, or publish their inserts only, so that the application's updates go on working."},
		{path: "source.keys", doc: "Record key columns by schema.table, where the table has no key or another one is wanted."},
		{path: "source.max-retained-wal", min: "0", max: "1000TiB", doc: "Above this much WAL that the slots keep, a warning is said and the anchor of replay lets go. 0: never."},
		{path: "source.mode", enum: []string{ModeWAL, ModePolling}, doc: "wal: logical replication, exactly once. polling: the outbox tables are read again and again, at least once, where logical replication is not to be had."},
		{path: "source.poll-interval", min: "10ms", max: "1h", doc: "With mode polling: how long to wait where nothing was found."},
		{path: "source.primary-dsn", doc: "Where dsn is a standby: connection string of the primary, at which snapshots are read. Printed with the password masked."},

		{path: "snapshot", doc: "How rows that are in the tables already are read, beside the stream."},
		{path: "snapshot.mode", enum: []string{SnapshotInitial, SnapshotNever, SnapshotOnly}, doc: "initial: every captured table is read once, beside the stream. never: the stream begins where the slot begins. only: as initial, and exit 0 when all tables are read."},
		{path: "snapshot.exclude", doc: "Tables that are streamed but not read at the start: globs as in source.tables."},
		{path: "snapshot.chunk-rows", min: "1", max: "10000000", doc: "Rows that are read at a time."},
		{path: "snapshot.chunk-bytes", min: "64KiB", max: "1GiB", doc: "Bytes that are read at a time, whichever comes first. Up to 2 × readers chunks are in memory."},
		{path: "snapshot.readers", min: "1", max: "64", doc: "Connections that read at the same time."},

		{path: "outbox", doc: "Outbox tables: their rows become events on topics of their own."},
		{path: "outbox[].table", whenSet: true, doc: "The outbox table, schema.table, as the catalog spells it. Either this or message-prefix."},
		{path: "outbox[].message-prefix", whenSet: true, doc: "Instead of a table: the prefix of logical messages (pg_logical_emit_message) whose content is a JSON object with an event's fields."},
		{path: "outbox[].topic", doc: "Topic template over the row's fields, such as orders.{event_type|lower}; functions lower, replace:a:b and default:y. Empty: outbox.event.{aggregate_type}, or outbox.event.{event_type} where there is no aggregate type."},
		{path: "outbox[].key", doc: "Key template over the row's fields. Empty: partition_key, else aggregate_id, else the event id."},
		{path: "outbox[].partition", doc: "Column that holds the number of the event's partition. Empty, or NULL in a row: murmur2 of the key."},
		{path: "outbox[].format", enum: []string{FormatPayload, FormatEnvelope, FormatCloudEvents}, doc: "payload: the payload's bytes as they stand. envelope: a JSON object with the event's fields. cloudevents: CloudEvents 1.0."},
		{path: "outbox[].cloudevents", enum: []string{CloudEventsStructured, CloudEventsBinary}, doc: "With format cloudevents: the whole event as JSON, or its attributes as headers beside the payload's bytes."},
		{path: "outbox[].null-payload", enum: []string{NullPayloadTombstone, NullPayloadNull}, doc: "What a NULL payload becomes: a tombstone, or the JSON value null."},
		{path: "outbox[].columns", doc: "Columns by role, such as {id: event_id}, only where names cannot be recognised."},
		{path: "outbox[].headers", doc: "Further columns that become headers; column:name for a header of another name."},
		{path: "outbox[].headers-from", doc: "Column with a JSON object whose members become headers."},
		{path: "outbox[].envelope", doc: "Further columns that stand in the value, beside the payload; column:name for a member of another name. With format payload the value is then {\"payload\":…, …}."},
		{path: "outbox[].json-strings", doc: "Keys and payloads as JSON values, text, json and jsonb in quotes, as Debezium's JsonConverter writes them."},
		{path: "outbox[].route", whenSet: true, doc: "Topic by a field's value, instead of topic, as Debezium's EventRouter routes."},
		{path: "outbox[].route.by", doc: "Column or field whose value routes. Empty: aggregate_type."},
		{path: "outbox[].route.regex", doc: "Pattern (RE2) that has to match the whole value. Empty: (.*)."},
		{path: "outbox[].route.replacement", doc: "The topic, with $1 or ${name} for the pattern's groups. Empty: outbox.event.$1."},
		{path: "outbox[].after", enum: []string{AfterKeep, AfterMark, AfterDelete}, doc: "What becomes of a row once its event is in Kafka. keep: it stays as it is. mark: published_at = now(), or status = 1 or 'processed', whichever column and type the table has. delete: it is deleted. Polling needs mark or delete."},
		{path: "outbox[].snapshot", whenSet: true, enum: []string{OutboxPending, OutboxAll, OutboxNone}, doc: "Rows that are there at the first start. pending (default): those not marked as published (published_at, or status) become events. all: every one does. none: no one does. To be set where rows are there and no column marks them."},

		{path: "topics", doc: "Where records go, and how a missing topic is created."},
		{path: "topics.prefix", doc: "What {prefix} stands for. Default: the name."},
		{path: "topics.table", doc: "Template of a table's topic; {prefix}, {schema}, {table}. Characters of names that Kafka does not take become _."},
		{path: "topics.message", doc: "Template of the logical messages' topic; {prefix}."},
		{path: "topics.partitions", min: "1", max: "100000", doc: "Partitions of a topic that is created."},
		{path: "topics.replication-factor", min: "-1", max: "32767", doc: "Replicas of a topic that is created; -1: the broker's default."},
		{path: "topics.config", doc: "Settings of a topic that is created, such as {min.insync.replicas: \"2\"}."},
		{path: "topics.create", doc: "Whether missing topics are created."},

		{path: "format", doc: "What a record's value looks like."},
		{path: "format.value", enum: []string{"json"}, later: []string{"avro", "protobuf", "cloudevents"}, doc: "Encoding of values."},
		{path: "format.types", enum: []string{TypesPlain, TypesDebezium}, doc: "How PostgreSQL's types appear in JSON. debezium: envelope, keys and values as Debezium's JsonConverter writes them."},
		{path: "format.envelope", doc: "true: before, after, op and source around the row. false: the row itself."},
		{path: "format.deletes", enum: []string{DeletesTombstone, DeletesField}, doc: "With envelope false, what a delete is: a tombstone, or a last value with \"__deleted\":true and then the tombstone."},
		{path: "format.tombstones", doc: "Whether a delete is followed by a tombstone, which lets compaction remove the key."},
		{path: "format.toast", enum: []string{TOASTOmit, TOASTMarker}, doc: "Unchanged TOAST values, which PostgreSQL does not send: leave the column out, or write toast-marker."},
		{path: "format.toast-marker", doc: "The text that stands for an unchanged TOAST value."},
		{path: "format.debezium", doc: "With types debezium, what differs from Debezium's defaults."},
		{path: "format.debezium.decimal-handling", enum: []string{"precise", "string", "double"}, doc: "numeric and money. precise: base64 of the unscaled value."},
		{path: "format.debezium.time-precision", enum: []string{"adaptive", "adaptive_time_microseconds", "connect", "isostring"}, doc: "Dates and times without zone. adaptive: milliseconds up to a precision of 3, else microseconds; connect: milliseconds."},
		{path: "format.debezium.interval-handling", enum: []string{"numeric", "string"}, doc: "Intervals. numeric: microseconds, a month having 30.4375 days; string: ISO 8601."},
		{path: "format.debezium.binary-handling", enum: []string{"bytes", "base64", "base64-url-safe", "hex"}, doc: "bytea. bytes: base64, as Connect's JSON has it."},
		{path: "format.debezium.hstore-handling", enum: []string{"json", "map"}, doc: "hstore. json: a string that holds a JSON object; map: the object."},
		{path: "format.debezium.unavailable-value-placeholder", doc: "What stands for an unchanged TOAST value."},
		{path: "format.debezium.schemas-enable", doc: "Whether each key and value has its Connect schema beside it."},

		{path: "kafka", doc: "How Kafka is reached, and under which identity."},
		{path: "kafka.brokers", required: true, doc: "Bootstrap brokers, host:port."},
		{path: "kafka.tls", whenSet: true, doc: "TLS to the brokers. One of the files, or enabled: true for the system's root certificates, turns it on."},
		{path: "kafka.tls.enabled", doc: "Whether TLS is used. Default: true where a file is named, else false."},
		{path: "kafka.tls.ca", whenSet: true, doc: "PEM file of the certificate authorities to trust. Empty: the system's."},
		{path: "kafka.tls.cert", whenSet: true, doc: "PEM file of the client certificate."},
		{path: "kafka.tls.key", whenSet: true, doc: "PEM file of the client certificate's key."},
		{path: "kafka.sasl", whenSet: true, doc: "Authentication at the brokers."},
		{path: "kafka.sasl.mechanism", whenSet: true, enum: []string{SASLPlain, SASLSCRAM256, SASLSCRAM512, SASLOAuthBearer, SASLAWSMSKIAM}, doc: "SASL mechanism; without one no SASL is spoken."},
		{path: "kafka.sasl.username", whenSet: true, doc: "User of plain and scram-*."},
		{path: "kafka.sasl.password", whenSet: true, doc: "Password of plain and scram-*."},
		{path: "kafka.sasl.token", whenSet: true, doc: "Bearer token of oauthbearer."},
		{path: "kafka.sasl.access-key", whenSet: true, doc: "AWS access key id of aws-msk-iam."},
		{path: "kafka.sasl.secret-key", whenSet: true, doc: "AWS secret access key of aws-msk-iam."},
		{path: "kafka.sasl.session-token", whenSet: true, doc: "AWS session token of aws-msk-iam, for temporary credentials."},
		{path: "kafka.compression", enum: []string{"none", "gzip", "snappy", "lz4", "zstd"}, doc: "Compression of record batches."},
		{path: "kafka.transactional-id", doc: "Transactional id, the identity that fences an older instance. Default walrelay-<name>."},
		{path: "kafka.transaction-timeout", min: "1s", max: "24d", doc: "When the broker gives a dead instance's open transaction up; at most the broker's transaction.max.timeout.ms (15m by default)."},
		{path: "kafka.checkpoint-topic", doc: "Compacted topic of the stored position. Default _walrelay.<name>."},

		{path: "batch", doc: "Bounds of one Kafka transaction."},
		{path: "batch.max-bytes", min: "1KiB", max: "1GiB", doc: "Bytes of records in a batch. Two batches are in memory at a time."},
		{path: "batch.max-records", min: "1", max: "10000000", doc: "Records in a batch."},
		{path: "batch.max-delay", min: "0s", max: "1m", doc: "How long a batch may wait for more while changes keep coming; on a quiet stream it leaves at once."},

		{path: "replay", doc: "How far back walrelay replay reaches: a second slot, the anchor, trails the stream by that much, whichever is reached first."},
		{path: "replay.retain-wal", min: "0", max: "1000TiB", doc: "WAL that the anchor keeps. 0: no anchor."},
		{path: "replay.retain-time", min: "0s", max: "3650d", doc: "Time that the anchor reaches back. 0: no anchor."},

		{path: "dead-letter", doc: "Where changes go that cannot become records."},
		{path: "dead-letter.topic", doc: "Template of the dead-letter topic; {prefix}."},
		{path: "dead-letter.on", enum: []string{"oversize", "route", "encode", "malformed"}, doc: "Kinds of failure that may be dead-lettered; any other one stops the connector."},
		{path: "dead-letter.on-error", enum: []string{OnErrorDeadLetter, OnErrorStop}, doc: "dead-letter: write the failed change to the topic and go on. stop: stop at it."},

		{path: "on-fenced", enum: []string{OnFencedStandby, OnFencedExit}, doc: "When another instance took over: stand by and retry, or exit 1."},
		{path: "stop-timeout", min: "1ms", max: "7d", doc: "Budget of the first signal: to finish, commit and confirm the batch in hand."},

		{path: "admin", doc: "HTTP server with /metrics, /status, /healthz and /readyz."},
		{path: "admin.listen", doc: "host:port to listen on; empty turns the server off."},
		{path: "admin.token", doc: "Bearer token that everything but /healthz and /readyz then asks for."},

		{path: "log", doc: "Logs, on stderr."},
		{path: "log.level", enum: []string{"trace", "debug", "info", "warn", "error"}, doc: "The least severe level that is logged."},
		{path: "log.format", enum: []string{LogJSON, LogConsole}, doc: "json, or console for people."},
	}
}

// table is specs by path, with what only a walk over the Go types can tell.
type table struct {
	byPath map[string]spec
	order  []string
}

func newTable() table {
	t := table{byPath: make(map[string]spec)}
	for _, s := range specs() {
		t.byPath[s.path] = s
		t.order = append(t.order, s.path)
	}
	return t
}

// at is the spec of a path as problems write it: outbox[3].table is listed as
// outbox[].table.
func (t table) at(path string) spec { return t.byPath[listed(path)] }

// listed is a path as the table writes it, without the numbers of elements.
func listed(path string) string {
	var b strings.Builder
	for path != "" {
		head, rest, ok := strings.Cut(path, "[")
		b.WriteString(head)
		if !ok {
			break
		}
		_, path, _ = strings.Cut(rest, "]")
		b.WriteString("[]")
	}
	return b.String()
}

// keys lists the keys of the mapping at prefix ("" is the file itself).
func (t table) keys(prefix string) []string {
	var keys []string
	for _, p := range t.order {
		rest := p
		if prefix != "" {
			var ok bool
			if rest, ok = strings.CutPrefix(p, prefix+"."); !ok {
				continue
			}
		}
		if !strings.ContainsAny(rest, ".[") {
			keys = append(keys, rest)
		}
	}
	return keys
}

// field is one struct field with its key.
type field struct {
	key   string
	value reflect.Value
}

// fieldsOf lists the fields of a struct value in the order of the file.
func fieldsOf(v reflect.Value) []field {
	t := v.Type()
	fields := make([]field, 0, t.NumField())
	for i := range t.NumField() {
		fields = append(fields, field{key: t.Field(i).Tag.Get("yaml"), value: v.Field(i)})
	}
	return fields
}

// isGroup tells whether t is a mapping with keys of its own; Secret and DSN
// are structs too, but scalars in the file, and Mask has a form of its own.
func isGroup(t reflect.Type) bool {
	return t.Kind() == reflect.Struct && t != reflect.TypeFor[Secret]() && t != reflect.TypeFor[DSN]() && t != reflect.TypeFor[Mask]()
}

// holdsSecret tells whether a value of type t is or contains a secret. Values
// of such types are never quoted in a problem.
func holdsSecret(t reflect.Type) bool {
	switch {
	case t == reflect.TypeFor[Secret](), t == reflect.TypeFor[DSN]():
		return true
	case t.Kind() == reflect.Slice, t.Kind() == reflect.Map:
		return holdsSecret(t.Elem())
	case t.Kind() == reflect.Struct:
		for i := range t.NumField() {
			if holdsSecret(t.Field(i).Type) {
				return true
			}
		}
	}
	return false
}

// join appends a key to a path.
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
