package config

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// problemsOf parses text and returns its problems, one per line.
func problemsOf(t *testing.T, text string) []string {
	t.Helper()
	_, err := Parse([]byte(text), lookup(map[string]string{"EMPTY": "", "ZERO": "0"}), noFile)
	if err == nil {
		return nil
	}
	var p *Problems
	if !errors.As(err, &p) {
		t.Fatalf("error is a %T", err)
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(p.List()) {
		t.Fatalf("%d problems on %d lines:\n%v", len(p.List()), len(lines), err)
	}
	for _, q := range p.List() {
		if q.Reason == "" || q.Remedy == "" {
			t.Errorf("problem without reason or remedy: %+v", q)
		}
	}
	return lines
}

// wantLines compares problems with prefixes of what they should be, in order.
func wantLines(t *testing.T, text string, got []string, want ...string) {
	t.Helper()
	ok := len(got) == len(want)
	for i := 0; ok && i < len(want); i++ {
		ok = strings.HasPrefix(got[i], want[i])
	}
	if !ok {
		t.Errorf("file:\n%s\nproblems:\n  %s\nwant:\n  %s", text, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// Seven mistakes of seven kinds are seven problems, whatever form the
// credentials have.
func TestEveryConfigurationErrorAtOnce(t *testing.T) {
	for _, sasl := range []string{
		"sasl: {mechanism: plain, username: u, password: \"${NOT_SET}\"}",
		"sasl: {password: \"${NOT_SET}\"}",
		"sasl:\n    mechanism: scram-sha-512\n    password: ${NOT_SET}",
	} {
		text := `name: shop
batch: {max-dely: 5ms, max-bytes: -1}
topics: {partitions: 0}
format: {value: xml}
kafka:
  brokers: []
  ` + sasl + "\n"
		wantLines(t, text, problemsOf(t, text),
			"batch.max-dely: unknown key; did you mean max-delay? (line 2, value 5ms)",
			"kafka.sasl.password: the environment variable NOT_SET is not set; set it, or write ${NOT_SET:-default} (line ",
			"source.dsn: is missing; write postgres://",
			"topics.partitions: is below 1; write a value from 1 to 100000 (line 3, value 0)",
			"format.value: is not one of the choices; write json (line 4, value xml)",
			"kafka.brokers: is missing; write at least one, such as [127.0.0.1:9092] (line 6)",
			"batch.max-bytes: is below 1KiB; write a value from 1KiB to 1GiB (line 2, value -1)",
		)
	}
}

func TestWhatIsWrongWithASingleKey(t *testing.T) {
	for _, c := range []struct{ with, want string }{
		// Keys.
		{"log: {levle: info}", "log.levle: unknown key; did you mean level? (line 6, value info)"},
		{"log: {max_delay: 1s}", "log.max_delay: unknown key; keys here: level, format (line 6)"},
		{"batch: {max_delay: 1s}", "batch.max_delay: unknown key; did you mean max-delay? (line 6, value 1s)"},
		{"max-delay: 1s", "max-delay: unknown key; it belongs at batch.max-delay (line 6)"},
		{"verify: {sample: 1GiB}", "verify: unknown key; keys here: name, source, "},
		{"log: {level: info, level: debug}", "log.level: the key is there already, in line 6; keep one"},
		{"name: again", "name: the key is there already, in line 1"},
		{"log: {<<: {level: info}}", "log: a key that is not plain text"},
		// Types.
		{"log: info", "log: must be a mapping; write keys and values: level, format (line 6, value info)"},
		{"batch: [1]", "batch: must be a mapping"},
		{"outbox: {table: public.o}", "outbox: must be a list"},
		{"outbox: [public.o]", "outbox[0]: must be a mapping; write keys and values: table, message-prefix, topic"},
		{"  sasl: s3cr3t-k", "kafka.sasl: must be a mapping; write keys and values: mechanism, username, password, token, access-key, secret-key, session-token (line 6, value ***)"},
		{"topics: {partitions: six}", "topics.partitions: is not a whole number that fits 32 bits; write a number such as 6 (line 6, value six)"},
		{"topics: {partitions: 99999999999}", "topics.partitions: is not a whole number that fits 32 bits"},
		{"topics: {create: yes}", "topics.create: is neither true nor false; write true or false (line 6, value yes)"},
		{"topics: {prefix: [a]}", "topics.prefix: must be a single value"},
		{"stop-timeout: 10", "stop-timeout: is a duration without a unit; write a duration such as 500ms, 10s or 7d (line 6, value 10)"},
		{"batch: {max-bytes: 8Mib/s}", "batch.max-bytes: is not a size"},
		{"batch: {max-bytes: 9999999999TiB}", "batch.max-bytes: is too large a size"},
		{"on-fenced:", "on-fenced: the key has no value"},
		{"outbox: [{table: public.o, null-payload: }]", "outbox[0].null-payload: the key has no value"},
		{"outbox: [{table: public.o, headers: [a, [b]]}]", "outbox[0].headers[1]: must be a single value"},
		{"topics: {partitions: \"${ZERO}\"}", "topics.partitions: is below 1; write a value from 1 to 100000 (line 6, value ${ZERO})"},
		{"replay: {retain-wal: -1}", "replay.retain-wal: is below 0; write a value from 0 to 1000TiB (line 6, value -1)"},
		// Choices and bounds.
		{"on-fenced: standbye", "on-fenced: is not one of the choices; did you mean standby? The choices are standby or exit (line 6, value standbye)"},
		{"snapshot: {mode: initially}", "snapshot.mode: is not one of the choices; did you mean initial? The choices are initial, never or only (line 6, value initially)"},
		{"snapshot: {chunk-rows: 0}", "snapshot.chunk-rows: is below 1; write a value from 1 to 10000000 (line 6, value 0)"},
		{"snapshot: {chunk-bytes: 63KiB}", "snapshot.chunk-bytes: is below 64KiB; write a value from 64KiB to 1GiB (line 6, value 63KiB)"},
		{"snapshot: {readers: 65}", "snapshot.readers: is above 64; write a value from 1 to 64 (line 6, value 65)"},
		{"snapshot: {chunk-size: 5}", "snapshot.chunk-size: unknown key; keys here: mode, exclude, chunk-rows, chunk-bytes, readers (line 6)"},
		{"snapshot: {exclude: [big]}", "snapshot.exclude[0]: the pattern is not of the form schema.table; write for example public.big or *.big (line 6, value big)"},
		{"snapshot: {exclude: [\"!public.big\"]}", "snapshot.exclude: has only excluding patterns, so that nothing is left out; add what they exclude from, such as \"*.*\" (line 6, value [!public.big])"},
		{"outbox: [{table: public.o, snapshot: marked}]", "outbox[0].snapshot: is not one of the choices; write pending, all or none (line 6, value marked)"},
		{"format: {value: avro}", "format.value: is not there in this version; write json, which works"},
		{"format: {types: debesium}", "format.types: is not one of the choices; did you mean debezium? The choices are plain or debezium (line 6, value debesium)"},
		{"format: {envelope: false, tombstones: false}", "format.tombstones: leaves nothing of a delete where envelope is false and deletes is tombstone; write tombstones: true, or deletes: field (line 6, value false)"},
		{"format: {deletes: field}", "format.deletes: goes with envelope: false; in an envelope op says that a row was deleted; remove it, or write envelope: false (line 6, value field)"},
		{"format: {types: debezium, toast: marker}", "format.toast: does not go with types debezium, which has a placeholder for each type"},
		{"format: {debezium: {decimal-handling: exact}}", "format.debezium.decimal-handling: is not one of the choices"},
		{"format: {debezium: {unavailable-value-placeholder: \"\"}}", "format.debezium.unavailable-value-placeholder: is empty"},
		{"outbox: [{message-prefix: o, table: public.o}]", "outbox[0].message-prefix: stands beside a table"},
		{"outbox: [{topic: x}]", "outbox[0].table: is missing; write for example table: public.outbox, or message-prefix: outbox"},
		{"outbox: [{message-prefix: o, after: mark}]", "outbox[0].after: goes with a table; a message leaves no row behind"},
		{"outbox: [{message-prefix: o, snapshot: all}]", "outbox[0].snapshot: goes with a table"},
		{"topics: {message: \"{prefix}.dead-letter\"}", "topics.message: is the topic of the dead letters, and of nothing else"},
		{"dead-letter: {topic: \"{prefix}.message\"}", "topics.message: is the topic of the dead letters, and of nothing else"},
		{"outbox: [{message-prefix: o}, {message-prefix: o}]", "outbox[1].message-prefix: is in outbox[0] already"},
		{"outbox: [{table: public.o, after: deleted}]", "outbox[0].after: is not one of the choices; did you mean delete?"},
		{"dead-letter: {on: [encode, oversized]}", "dead-letter.on[1]: is not one of the choices; did you mean oversize?"},
		{"dead-letter: {on: [encode, encode]}", "dead-letter.on[1]: is in the list already"},
		{"batch: {max-bytes: 2GiB}", "batch.max-bytes: is above 1GiB"},
		{"batch: {max-records: 0}", "batch.max-records: is below 1"},
		{"batch: {max-delay: 31s}", "batch.max-delay: is more than half of kafka.transaction-timeout (1m), so that"},
		{"  transaction-timeout: 10ms", "kafka.transaction-timeout: is below 1s"},
		{"stop-timeout: 0s", "stop-timeout: is below 1ms"},
		// Tables.
		{"outbox: [{table: outbox}]", "outbox[0].table: is not of the form schema.table; write for example public.outbox (line 6, value outbox)"},
		{"outbox: [{table: \"public.*\"}]", "outbox[0].table: names one table, without patterns"},
		{"outbox: [{topic: x}]", "outbox[0].table: is missing; write for example table: public.outbox"},
		{"outbox: [{table: public.o}, {table: public.o}]", "outbox[1].table: is in outbox[0] already; keep one"},
		{"outbox: [{table: public.o, topic: \"a{b|upper}\"}]", "outbox[0].topic: the function \"upper\" is not known"},
		{"outbox: [{table: public.o, topic: \"a/{b}\"}]", "outbox[0].topic: Kafka takes only letters, digits, . _ and - in a topic's name, not '/'"},
		{"outbox: [{table: public.o, key: \"{b\"}]", "outbox[0].key: has a { without its }"},
		{"outbox: [{table: public.o, topic: 'a\\{{b}'}]", "outbox[0].topic: Kafka takes only letters, digits, . _ and - in a topic's name, not '%'"},
		{"outbox: [{table: public.o, key: 'a\\b'}]", "outbox[0].key: has a backslash before none of { } | : \\"},
		{"outbox: [{table: public.o, format: avro}]", "outbox[0].format: is not one of the choices; write payload, envelope or cloudevents (line 6, value avro)"},
		{"outbox: [{table: public.o, topic: x, route: {by: type}}]", "outbox[0].route: is there beside topic, and each chooses the topic; keep one of them"},
		{"outbox: [{table: public.o, route: {regex: \"(\"}}]", "outbox[0].route.regex: is not a regular expression (RE2)"},
		{"outbox: [{table: public.o, route: {replacement: \"a$\"}}]", "outbox[0].route.replacement: has a $ that names no group"},
		{"outbox: [{table: public.o, route: {replacement: \"a/$1\"}}]", "outbox[0].route.replacement: Kafka takes only letters, digits, . _ and - in a topic's name, not '/'"},
		{"outbox: [{table: public.o, format: cloudevents, envelope: [a]}]", "outbox[0].envelope: does not go with format cloudevents"},
		{"outbox: [{table: public.o, columns: {kind: x}}]", "outbox[0].columns.kind: is not a role of an outbox column"},
		{"outbox: [{table: public.o, columns: {id: \"\"}}]", "outbox[0].columns.id: names no column"},
		{"outbox: [{table: public.o, topic: \"{a|default:}\"}]", "outbox[0].topic: the function \"default:\" is not known"},
		{"outbox: [{table: public.o, topic: \"{a|default:b c}\"}]", "outbox[0].topic: Kafka takes only letters, digits, . _ and - in a topic's name, not ' '"},
		{"outbox: [{table: public.o, topic: " + strings.Repeat("x", 300) + "}]", "outbox[0].topic: a topic's name has at most 249"},
		{"outbox: [{table: public.o, topic: \"" + strings.Repeat("x", 300) + "{a}\"}]", "outbox[0].topic: a topic's name has at most 249"},
		{"outbox: [{table: public.o, topic: .}]", "outbox[0].topic: Kafka takes no topic of the name . or .."},
		{"outbox: [{table: public.o, topic: ..}]", "outbox[0].topic: Kafka takes no topic of the name . or .."},
		{"outbox: [{table: public.o, topic: _walrelay.shop}]", "outbox[0].topic: is the checkpoint topic"},
		{"outbox: [{table: public.o, topic: _walrelay.other}]", "outbox[0].topic: a topic whose name begins with _walrelay."},
		{"outbox: [{table: public.o, topic: \"_walrelay.{a}\"}]", "outbox[0].topic: a topic whose name begins with _walrelay."},
		{"outbox: [{table: public.o, topic: __consumer_offsets}]", "outbox[0].topic: is one of Kafka's own topics"},
		{"outbox: [{table: public.o, topic: shop.dead-letter}]", "outbox[0].topic: is the topic of the dead letters"},
		{"outbox: [{table: public.o, topic: \"{prefix}.dead-letter\"}]", "outbox[0].topic: is the topic of the dead letters"},
		{"outbox: [{table: public.o, route: {replacement: shop.dead-letter}}]", "outbox[0].route.replacement: is the topic of the dead letters"},
		{"outbox: [{table: public.o, route: {replacement: $2}}]", "outbox[0].route.replacement: has $2, and the regex (.*) has 1 groups"},
		{"outbox: [{table: public.o, route: {regex: \"(?P<a>.)\", replacement: \"$${b}\"}}]", "outbox[0].route.replacement: has ${b}, and the regex"},
		{"outbox: [{table: public.o, cloudevents: binary}]", "outbox[0].cloudevents: goes with format cloudevents, and the format is payload"},
		{"outbox: [{table: public.o, headers: [\"a:id\"]}]", "outbox[0].headers[0]: would be a second header id"},
		{"outbox: [{table: public.o, headers: [b, \"a:position\"]}]", "outbox[0].headers[1]: would be a second header position"},
		{"outbox: [{table: public.o, headers: [replay]}]", "outbox[0].headers[0]: would be a second header replay"},
		{"outbox: [{table: public.o, headers: [\"a:x\", \"b:x\"]}]", "outbox[0].headers[1]: makes the header x, and so does another column; write b:NAME"},
		{"outbox: [{table: public.o, headers: [\":x\"]}]", "outbox[0].headers[0]: names no column, or no header"},
		{"outbox: [{table: public.o, headers: [\"a:\"]}]", "outbox[0].headers[0]: names no column, or no header"},
		{"outbox: [{table: public.o, envelope: [\"a:payload\"]}]", "outbox[0].envelope[0]: would be a second member payload"},
		{"outbox: [{table: public.o, format: envelope, envelope: [\"a:type\"]}]", "outbox[0].envelope[0]: would be a second member type"},
		// Topics.
		{"topics: {prefix: \"a b\"}", "topics.prefix: Kafka takes only letters, digits, . _ and - in a topic's name, not ' '"},
		{"topics: {table: \"{prefix}.{tabel}\"}", "topics.table: {tabel} is not known here; write a template"},
		{"topics: {message: \"\"}", "topics.message: a topic's name cannot be empty"},
		{"topics: {replication-factor: 0}", "topics.replication-factor: a topic has at least one replica"},
		{"topics: {replication-factor: 2, config: {min.insync.replicas: 3}}", "topics.config.min.insync.replicas: is above topics.replication-factor (2)"},
		{"  checkpoint-topic: \"..\"", "kafka.checkpoint-topic: Kafka takes no topic of the name . or .."},
		{"  checkpoint-topic: " + strings.Repeat("x", 250), "kafka.checkpoint-topic: a topic's name has at most 249"},
		// Kafka and admin.
		{"  tls: {cert: /c.pem}", "kafka.tls.key: is missing beside kafka.tls.cert"},
		{"  tls: {ca: \"-----BEGIN CERTIFICATE-----\"}", "kafka.tls.ca: is a PEM text; write the path of the PEM file (line 6, value ***)"},
		{"  sasl: {username: u}", "kafka.sasl.mechanism: is missing beside credentials"},
		{"  sasl: {mechanism: oauthbearer, token: t, password: p}", "kafka.sasl.password: is not used by oauthbearer"},
		{"  sasl: {mechanism: aws-msk-iam, access-key: a, session-token: t}", "kafka.sasl.secret-key: is missing; aws-msk-iam needs it"},
		{"  sasl: {mechanism: plain, username: u, pasword: s3cr3t-k}", "kafka.sasl.pasword: unknown key; did you mean password? (line 6)"},
		{"admin: {listen: 8642}", "admin.listen: is not of the form host:port"},
		{"admin: {listen: \"x:99999\"}", "admin.listen: its port is not a number from 0 to 65535"},
		// References.
		{"topics: {prefix: \"${NOT_SET}\"}", "topics.prefix: the environment variable NOT_SET is not set; set it, or write ${NOT_SET:-default} (line 6, value ${NOT_SET})"},
		{"topics: {prefix: \"${file:/none}\"}", "topics.prefix: the file cannot be read: file does not exist; give the path of a readable file (line 6, value ${file:/none})"},
		{"topics: {prefix: \"${A\"}", "topics.prefix: has a ${ without its }"},
		{"topics: {prefix: \"${a b:-s3cr3t-x}\"}", "topics.prefix: has a ${…} that names no variable"},
		{"topics: {prefix: \"${EMPTY}x y\"}", "topics.prefix: Kafka takes only"},
	} {
		t.Run(c.with, func(t *testing.T) {
			text := minimal(c.with)
			got := problemsOf(t, text)
			wantLines(t, text, got, c.want)
			if s := strings.Join(got, "\n"); strings.Contains(s, "s3cr3t") {
				t.Errorf("a secret is in the problems:\n%s", s)
			}
		})
	}
}

func TestAMessageOutboxHasAllOfItsProblemsAtOnce(t *testing.T) {
	text := "name: shop\nsource:\n  dsn: postgres://db/shop\nkafka:\n  brokers: [k:9092]\noutbox: [{message-prefix: o, snapshot: all, after: mark}]\n"
	wantLines(t, text, problemsOf(t, text), "outbox[0].after: goes with a table", "outbox[0].snapshot: goes with a table")
}

func TestOutboxesThatAreRight(t *testing.T) {
	for _, with := range []string{
		"topic: \"{prefix}.{a|default:b c|replace: :_}\"", "topic: \"_walrelay_{a}\"", "topic: orders", "topic: \"{a|default:x}\"", "key: \"{a|default:b c}\"",
		"headers: [\"event_id:id\", type]", "headers: [\"id:id\", id]", "headers: [a, \"a:a\", \"a:b\"]", "columns: {id: uid}, headers: [\"uid:id\"]",
		"envelope: [type, \"a:b\"]", "format: cloudevents, cloudevents: binary, headers: [\"tenant:ce_tenant\"]",
		"route: {regex: \"(a)(.)\", replacement: \"$1.$2.$12\"}", "route: {regex: \"(?P<a>.)\", replacement: \"$${a}$${1}$0\"}", "route: {replacement: \"x\\\\.$1\"}",
	} {
		if got := problemsOf(t, minimal("outbox: [{table: public.o, "+with+"}]")); len(got) > 0 {
			t.Errorf("%s: %q", with, got)
		}
	}
}

func TestWhatIsWrongWithTheSource(t *testing.T) {
	for _, c := range []struct{ source, want string }{
		{"slot: Shop-1", "source.slot: a slot's name has 1 to 63 lower-case letters, digits and _; write for example shop_1 (line 4, value Shop-1)"},
		{"publication: " + strings.Repeat("p", 57), "source.publication: is longer than 56 bytes"},
		{"tables: []", "source.tables: nothing is captured"},
		{"tables: [orders]", "source.tables[0]: the pattern is not of the form schema.table; write for example public.orders or *.orders (line 4, value orders)"},
		{"tables: [public.*, '!']", "source.tables[1]: the pattern is empty"},
		{"tables: ['!public.x']", "source.tables: has only excluding patterns, so that nothing is captured; add what they exclude from, such as \"*.*\""},
		{"messages: ['!x']", "source.messages: has only excluding patterns, so that nothing is captured; add what they exclude from, such as \"*\""},
		{"primary-dsn: \"postgres://u:s3cr3t@h:port/d\"", "source.primary-dsn: the port is not a number from 1 to 65535; write it as host:5432; where the password has one of @ : / ? #, percent-encode it (@ is %40) (line 4, value ***)"},
		{"primary_dsn: \"postgres://u:s3cr3t@h/d\"", "source.primary_dsn: unknown key; did you mean primary-dsn? (line 4)"},
		{"primary-dsn: [s3cr3t]", "source.primary-dsn: must be a single value"},
		{"tables: ['\"S\".t']", "source.tables[0]: the pattern has SQL quotes"},
		{"tables: ['a.b\\d']", "source.tables[0]: the pattern has a \\ that escapes nothing"},
		{"tables:\n    - public.*\n    - !public.x", "source.tables[1]: a value that begins with ! is a tag to YAML; write the value in quotes"},
		{"tables: [*.*]", "YAML syntax error: did not find expected alphabetic or numeric character; write values that begin with * or ! in quotes: \"*.*\" (line 4)"},
		{"slot: *s3cr3t", "YAML syntax error: a value that begins with * or & is an alias"},
		{"slot: &s3cr3t x", "source.slot: a value that begins with & is an anchor"},
		{"tables: public.*", "source.tables: must be a list"},
		{"messages: ['']", "source.messages[0]: the pattern is empty"},
		{"keys: {events: [id]}", "source.keys.events: is not of the form schema.table"},
		{"keys: {public.events: []}", "source.keys.public.events: has no columns"},
		{"keys: {public.events: id}", "source.keys.public.events: must be a list"},
		{"keys: {public.events: [a, a]}", "source.keys.public.events[1]: is in the list already"},
		{"publication-mode: none", "source.publication-mode: is not one of the choices; write managed or existing"},
		{"cursor: wal", "source.cursor: unknown key; keys here: dsn, slot"},
	} {
		text := "name: shop\nsource:\n  dsn: postgres://u:s3cr3t-pg@db/shop\n  " + c.source + "\nkafka:\n  brokers: [k:9092]\n"
		wantLines(t, text, problemsOf(t, text), c.want)
	}
}

func TestWhatIsWrongWithTheBrokers(t *testing.T) {
	for broker, want := range map[string]string{
		"localhost":           "kafka.brokers[0]: is not of the form host:port; write host:port, such as 127.0.0.1:9092 (line 4, value localhost)",
		":9092":               "kafka.brokers[0]: its host is not",
		"h:0":                 "kafka.brokers[0]: its port is not a number from 1 to 65535",
		"u:s3cr3t-k@h:9092":   "kafka.brokers[0]: is not of the form host:port; write host:port, such as 127.0.0.1:9092 (line 4, value ***)",
		"http://broker:9092":  "kafka.brokers[0]: is not of the form host:port",
		"kafka/broker-1:9092": "kafka.brokers[0]: its host is not",
	} {
		text := "name: shop\nsource: {dsn: host=db}\nkafka:\n  brokers: ['" + broker + "']\n"
		wantLines(t, text, problemsOf(t, text), want)
	}
}

func TestWhatIsWrongWithTheName(t *testing.T) {
	for name, want := range map[string]string{
		"Shop EU":               "name: must be lower-case letters, digits, - and _, beginning with a letter or digit, because slot and topics are named after it; write for example shop-eu (line 1, value Shop EU)",
		"-x":                    "name: must be lower-case",
		"ä":                     "name: must be lower-case letters, digits, - and _, beginning with a letter or digit, because slot and topics are named after it; write for example shop",
		strings.Repeat("n", 48): "name: is longer than 47 characters",
		"''":                    "name: is missing",
	} {
		text := strings.Replace(minimal(""), "name: shop", "name: "+name, 1)
		wantLines(t, text, problemsOf(t, text), want)
	}
	if got := problemsOf(t, strings.Replace(minimal(""), "name: shop", "name: "+strings.Repeat("n", 47), 1)); got != nil {
		t.Errorf("a name of 47 characters: %v", got)
	}
}

func TestSyntaxErrorsHaveTheirLineAndNoText(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"name: shop\nsource:\n  dsn: postgres://u:s3cr3t-pg@h\n bad: s3cr3t\n", "YAML syntax error: did not find expected key; look at this line and the one before it (line 4)"},
		{"kafka:\n  sasl: {password: ${PW}, username: s3cr3t}\n", "YAML syntax error: did not find expected ',' or '}'; inside [ ] and { } write references in quotes: \"${VAR}\" (line 2)"},
		{"source:\n  password: 's3cr3t\n", "YAML syntax error"},
		{"source:\n\tdsn: s3cr3t\n", "YAML syntax error"},
		{"name: a\n---\nname: b\n", "the file has more than one YAML document"},
		{"s3cr3t", "must be a mapping; write keys and values: name, source"},
		{"- a", "must be a mapping"},
	} {
		got := problemsOf(t, c.text)
		if len(got) == 0 || !strings.HasPrefix(got[0], c.want) {
			t.Errorf("%q: %q, want %q", c.text, got, c.want)
		}
		if strings.Contains(strings.Join(got, ""), "s3cr3t") {
			t.Errorf("%q: a secret is in %q", c.text, got)
		}
	}
}

func TestAnEmptyFileLacksWhatIsMandatory(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n", "{}"} {
		wantLines(t, text, problemsOf(t, text), "name: is missing", "source.dsn: is missing", "kafka.brokers: is missing")
	}
}

func TestAMisplacedMandatoryKeyIsOneProblem(t *testing.T) {
	for _, text := range []string{
		"name: shop\ndsn: postgres://u:s3cr3t@h/d\nkafka: {brokers: [k:9092]}\n",
		"name: shop\nsource: {dns: 'postgres://u:s3cr3t@h/d'}\nkafka: {brokers: [k:9092]}\n",
		"name: shop\nsource: postgres://u:s3cr3t@h/d\nkafka: {brokers: [k:9092]}\n",
		"name: shop\nsorce: {dsn: 'postgres://u:s3cr3t@h/d'}\nkafka: {brokers: [k:9092]}\n",
	} {
		got := problemsOf(t, text)
		if len(got) != 1 || strings.Contains(fmt.Sprint(got), "s3cr3t") {
			t.Errorf("%s: %q", text, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(minimal("outbox: [{table: public.o}]\n"))
	f.Add("a: &x [*x, !t {? b : c}]\n<<: *x\n")
	f.Add("name: ${A:-b} $${ ${file:x}\n")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := Parse([]byte(text), lookup(nil), noFile)
		if err == nil && c.Validate() != nil {
			t.Errorf("parsed, but is not valid: %v", c.Validate())
		}
	})
}

// The checkpoint topic holds the position and nothing else, by whatever name it goes.
func TestNoRecordsIntoTheCheckpointTopic(t *testing.T) {
	const base = "name: shop\nsource: {dsn: postgres://u@h/shop}\nkafka: {brokers: [\"h:9092\"], checkpoint-topic: shop.position}\n"
	for section, path := range map[string]string{
		"topics: {table: \"{prefix}.position\"}":           "topics.table",
		"topics: {message: shop.position}":                 "topics.message",
		"dead-letter: {topic: \"{prefix}.position\"}":      "dead-letter.topic",
		"topics: {table: \"{prefix}.position.{table}\"}\n": "",
	} {
		text := base + section
		if path == "" {
			wantLines(t, text, problemsOf(t, text))
			continue
		}
		wantLines(t, text, problemsOf(t, text), path+": is the checkpoint topic")
	}
}
