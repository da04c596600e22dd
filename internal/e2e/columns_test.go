package e2e

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/cdctest"
	"github.com/walrelay/walrelay/internal/harness"
)

// secretText is in every value that may be nowhere but in the database.
const secretText = "clear-text-of"

func secret(what string) string { return secretText + "-" + what }

func sha(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func hmacSHA(salt, text string) string {
	mac := hmac.New(sha256.New, []byte(salt))
	mac.Write([]byte(text))
	return hex.EncodeToString(mac.Sum(nil))
}

// usersSQL makes a table with a column for every mask, one of them stored out of line.
const usersSQL = `CREATE TABLE users (id int PRIMARY KEY, password_hash text, email text, phone text, note text, city text, name text, n int);
	ALTER TABLE users ALTER email SET STORAGE EXTERNAL, ALTER city SET STORAGE EXTERNAL, ALTER password_hash SET STORAGE EXTERNAL, ALTER name SET STORAGE EXTERNAL`

// userValues are the hidden values of usersSQL, those that are long enough out of line.
func userValues() string {
	long := secretText + strings.Repeat("x", 9000)
	return fmt.Sprintf("'%s', '%s', '%s', '12345678 %s', '%s', '%s'", long, long, secret("phone"), secret("note"), long, long)
}

// hideUsers configures the masks of usersSQL, the salt in a file.
func (b *snapBed) hideUsers() (salt string) {
	b.t.Helper()
	salt = "s3cr3t-salt-of-" + b.name
	file := filepath.Join(b.t.TempDir(), "salt")
	if err := os.WriteFile(file, []byte(salt+"\n"), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.set("source.columns", caseMap{"public.users": caseMap{
		"exclude": []string{"password_hash"},
		"mask": caseMap{
			"email": "sha256", "phone": caseMap{"hmac-sha256": "${file:" + file + "}"}, "note": caseMap{"truncate": 8},
			"city": nil, "name": caseMap{"fixed": "-"},
		},
	}})
	return salt
}

// nothingLeaks looks for the texts, as they are and in the usual encodings, in all that the
// connector has written: every topic, uncommitted records too, the logs, and its pages.
// checkpoint tells whether the checkpoint topic is searched too: keys are in it.
func (b *snapBed) nothingLeaks(checkpoint bool, procs []*harness.Proc, texts ...string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), snapLong)
	defer cancel()
	log, err := cdctest.ReadUncommitted(ctx, `.*`+regexp.QuoteMeta(b.name)+`.*`, kgo.SeedBrokers(b.kafka.Brokers()...))
	if err != nil {
		b.t.Fatal(err)
	}
	places := map[string]string{}
	seenCheckpoint := false
	for _, r := range log.Records {
		if r.Topic == b.checkpointTopic() {
			seenCheckpoint = true
			if !checkpoint {
				continue
			}
		}
		places[r.Where()] = fmt.Sprint(string(r.Key), string(r.Value), r.Headers)
	}
	if len(places) == 0 || !seenCheckpoint {
		b.t.Fatalf("%d records to search, the checkpoint topic among them: %v", len(places), seenCheckpoint)
	}
	for i, p := range procs {
		places[fmt.Sprintf("output %d", i)] = p.Stdout() + p.Stderr()
		if p.Running() {
			for _, page := range []string{"/status", "/metrics"} {
				_, places[page] = b.get(p, page)
			}
		}
	}
	for _, text := range texts {
		for _, form := range []string{text, hex.EncodeToString([]byte(text)), base64.StdEncoding.EncodeToString([]byte(text[:len(text)/3*3]))} {
			for where, content := range places {
				if at := strings.Index(content, form); at >= 0 {
					b.t.Errorf("%s holds %q: …%.200s", where, form, content[max(0, at-100):])
				}
			}
		}
	}
}

// rowTexts gives a table's records as op, key, before and after, sorted.
func (b *snapBed) rowTexts(log *cdctest.Log, table string) (out []string) {
	b.t.Helper()
	for _, r := range b.records(log, table) {
		var images struct{ Before, After json.RawMessage }
		if err := json.Unmarshal(r.Value, &images); err != nil {
			b.t.Fatal(err)
		}
		out = append(out, fmt.Sprintf("%s %s %s %s", r.Op, r.Key, images.Before, images.After))
	}
	slices.Sort(out)
	return out
}

func TestHiddenColumnsFromSnapshotAndStream(t *testing.T) {
	b := newSnapBed(t, usersSQL)
	salt := b.hideUsers()
	b.set("log.level", "trace")
	b.set("topics.partitions", 1)
	b.pg.Exec("INSERT INTO users VALUES (1, " + userValues() + ", 1)")
	p := b.stream()
	b.waitTable(p, "public.users", allRows)
	for _, sql := range []string{
		"INSERT INTO users VALUES (2, " + userValues() + ", 1)",
		"INSERT INTO users VALUES (3)",
		"UPDATE users SET n = 2 WHERE id = 2",
		"UPDATE users SET id = 4 WHERE id = 3",
		"UPDATE users SET email = 'other-" + secretText + "' WHERE id = 4",
		"DELETE FROM users WHERE id = 4",
		"ALTER TABLE users REPLICA IDENTITY FULL",
		"UPDATE users SET n = 3 WHERE id = 2",
		"DELETE FROM users WHERE id = 2",
	} {
		b.pg.Exec(sql)
	}
	log := b.settled(p)
	long := secretText + strings.Repeat("x", 9000)
	row := func(id, n int) string {
		return fmt.Sprintf(`{"id":%d,"email":"%s","phone":"%s","note":"12345678","city":null,"name":"-","n":%d}`, id, sha(long), hmacSHA(salt, secret("phone")), n)
	}
	empty := func(id int) string {
		return fmt.Sprintf(`{"id":%d,"email":null,"phone":null,"note":null,"city":null,"name":null,"n":null}`, id)
	}
	want := []string{
		`r {"id":1} null ` + row(1, 1),
		`c {"id":2} null ` + row(2, 1),
		`c {"id":3} null ` + empty(3),
		// What is out of line and unchanged is absent, but for what does not depend on it.
		`u {"id":2} null ` + strings.Replace(row(2, 2), `"email":"`+sha(long)+`",`, "", 1),
		`d {"id":3} {"id":3} null`,
		`c {"id":4} null ` + empty(4),
		`u {"id":4} null ` + strings.Replace(empty(4), `"email":null`, `"email":"`+sha("other-"+secretText)+`"`, 1),
		`d {"id":4} {"id":4} null`,
		`u {"id":2} ` + row(2, 2) + " " + row(2, 3),
		`d {"id":2} ` + row(2, 3) + " null",
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, b.rowTexts(log, "users")); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	b.nothingLeaks(true, []*harness.Proc{p}, secretText, salt)
	b.stop(p)
	b.nothingLeaks(true, []*harness.Proc{p}, secretText, salt)
}

// An update that left before the row of its unchanged value was there has its key read
// again, and what is read is masked like all else.
func TestAHiddenColumnThatIsReadAgain(t *testing.T) {
	b := newSnapBed(t, usersSQL)
	salt := b.hideUsers()
	b.pg.Exec("INSERT INTO users VALUES (1, " + userValues() + ", 1)")
	b.gate.on(gateOnce(gateHoldReply, rowsOf("users")))
	p := b.start()
	b.gate.waitHeld(t)
	b.pg.WaitValue("1", `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'walrelay%' AND query LIKE '%; COMMIT'
		AND datname = current_database() AND state <> 'active'`)
	b.pg.Exec("UPDATE users SET n = 2")
	harness.WaitFor(t, "the update to be delivered", harness.DefaultTimeout, func() (bool, error) {
		return strings.Contains(b.ops(b.log(), "users")[1], "u"), nil
	})
	b.gate.release()
	b.waitTable(p, "public.users", allRows)
	folded := map[string]any{}
	for _, r := range b.records(b.settled(p), "users") {
		for column, value := range r.After {
			folded[column] = value
		}
	}
	want := map[string]any{
		"id": 1.0, "n": 2.0, "email": sha(secretText + strings.Repeat("x", 9000)), "phone": hmacSHA(salt, secret("phone")),
		"note": "12345678", "city": nil, "name": "-",
	}
	if diff := cmp.Diff(want, folded); diff != "" {
		t.Errorf("the topic folds to (-want +got):\n%s", diff)
	}
	b.nothingLeaks(true, []*harness.Proc{p}, secretText, salt)
	b.stop(p)
}

func TestMaskedKeysStayApart(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE people (email text PRIMARY KEY, n int); INSERT INTO people SELECT '`+secretText+`-' || g, 0 FROM generate_series(1, 50) g`)
	b.set("source.columns", caseMap{"public.people": caseMap{"mask": caseMap{"email": caseMap{"hmac-sha256": "s3cr3t-salt"}}}})
	b.set("snapshot.chunk-rows", 7) // so that the progress, with a key in it, is in the checkpoint
	p := b.stream()
	b.waitTable(p, "public.people", allRows)
	for _, sql := range []string{
		"UPDATE people SET n = 1 WHERE email LIKE '%1'",
		"DELETE FROM people WHERE email LIKE '%2'",
		"UPDATE people SET email = email || '-moved' WHERE email LIKE '%3'",
	} {
		b.pg.Exec(sql)
	}
	log := b.settled(p)
	want := map[string]string{}
	for _, row := range b.pg.Query("SELECT email, n::text FROM people") {
		want[fmt.Sprintf(`{"email":"%s"}`, hmacSHA("s3cr3t-salt", row[0]))] = row[1]
	}
	got, previous := map[string]string{}, 0
	for _, r := range log.Records {
		switch {
		case r.Topic != b.topic("people"):
		case r.Value == nil:
			delete(got, string(r.Key))
		default:
			var v struct{ After map[string]any }
			if err := json.Unmarshal(r.Value, &v); err != nil {
				t.Fatal(err)
			}
			delete(got, string(r.Key))
			if v.After != nil {
				got[string(r.Key)] = fmt.Sprint(v.After["n"])
			}
			if k := r.Headers["previous-key"]; k != "" {
				previous++
				if !regexp.MustCompile(`^\{"email":"[0-9a-f]{64}"\}$`).MatchString(k) {
					t.Errorf("previous-key is %s", k)
				}
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || previous != 5 {
		t.Errorf("%d keys changed; the topic folds to (-want +got):\n%s", previous, diff)
	}
	b.nothingLeaks(false, []*harness.Proc{p}, secretText, "s3cr3t-salt")
	b.stop(p)
}

// A dead letter holds the row as text, and the key.
func TestADeadLetterHidesWhatItsRecordWouldHave(t *testing.T) {
	b := newSnapBed(t, `CREATE TABLE people (email text PRIMARY KEY, password text, note text, pad text)`)
	b.set("source.columns", caseMap{"public.people": caseMap{"exclude": []string{"password"}, "mask": caseMap{"email": "sha256", "note": caseMap{"truncate": 4}}}})
	b.set("kafka.compression", "none")
	b.set("topics.config", map[string]string{"max.message.bytes": "4000"})
	p := b.stream()
	for _, note := range []string{"'abcd " + secretText + "'", "repeat('ab', 3000) || '" + secretText + "'"} {
		b.pg.Exec(fmt.Sprintf("INSERT INTO people VALUES ('%s' || md5(random()::text), repeat('%s', 500), %s, repeat('p', 6000))", secretText, secretText, note))
	}
	letters := b.kafka.WaitCommitted(t, b.name+".dead-letter", 2)
	for _, letter := range letters {
		var v struct {
			Reason string
			Row    map[string]string
			Cut    []struct {
				Name string
				Size int
			}
		}
		if err := json.Unmarshal(letter.Value, &v); err != nil {
			t.Fatal(err)
		}
		key := fmt.Sprintf(`{"email":"%s"}`, v.Row["email"])
		if v.Reason != "oversize" || string(letter.Key) != key || len(v.Row["email"]) != 64 || len(v.Row["note"]) != 4 || len(v.Row) != 3 {
			t.Errorf("key %s, letter %.300s", letter.Key, letter.Value)
		}
		if len(v.Cut) != 1 || v.Cut[0].Name != "pad" || v.Cut[0].Size != 6000 {
			t.Errorf("cut %+v", v.Cut)
		}
	}
	b.caughtUp(p)
	b.nothingLeaks(true, []*harness.Proc{p}, secretText)
	b.stop(p)

	b.set("dead-letter.on-error", "stop")
	p = b.stream()
	b.pg.Exec(fmt.Sprintf("INSERT INTO people VALUES ('%s', '%s', NULL, repeat('p', 6000))", secretText, secretText))
	b.ends(p, 1, "public.people", `{"email":"`+sha(secretText)+`"}`)
	b.nothingLeaks(true, []*harness.Proc{p}, secretText)
}

func TestAHiddenColumnThatIsRenamedStopsTheStream(t *testing.T) {
	b := newSnapBed(t, usersSQL)
	b.hideUsers()
	b.set("snapshot.mode", "never")
	p := b.stream()
	insert := func(id int) string { return fmt.Sprintf("INSERT INTO users VALUES (%d, %s, 1)", id, userValues()) }
	b.pg.Exec(insert(1))
	b.caughtUp(p)
	b.pg.Exec(insert(2) + "; ALTER TABLE users RENAME email TO mail; " + insert(3))
	b.refused(p, `column "email" of public.users, which source.columns hides`, `"mail"`, "in clear", "gone")
	procs := []*harness.Proc{p}
	// Nor does it start like that, or with the new name alone.
	p = b.start()
	b.refused(p, `source.columns names column "email" of public.users`, `"mail"`)
	procs = append(procs, p)
	columns := b.yaml["source"].(map[string]any)["columns"].(caseMap)["public.users"].(caseMap)
	mask := columns["mask"].(caseMap)
	delete(mask, "email")
	mask["mail"] = "sha256"
	p = b.start()
	b.refused(p, `source.columns`, `"email"`, "in clear")
	procs = append(procs, p)
	// With both it goes on where it stopped.
	mask["email"] = "sha256"
	columns["gone"] = []string{"email"}
	p = b.stream()
	log := b.settled(p)
	b.wantOps(log, "users", 1, 3, "c")
	for _, r := range b.records(log, "users") {
		column := "email"
		if r.After["id"] == 3.0 {
			column = "mail"
		}
		if r.After[column] != sha(secretText+strings.Repeat("x", 9000)) {
			t.Errorf("%s of %v", column, r.After)
		}
	}
	b.nothingLeaks(true, append(procs, p), secretText)
	b.stop(p)
}

func TestAHiddenColumnThatIsDroppedIsNoReasonToStop(t *testing.T) {
	b := newSnapBed(t, usersSQL)
	b.hideUsers()
	b.set("snapshot.mode", "never")
	p := b.stream()
	for _, sql := range []string{
		fmt.Sprintf("INSERT INTO users VALUES (1, %s, 1)", userValues()),
		"ALTER TABLE users DROP COLUMN email",
		"UPDATE users SET n = 2",
		"ALTER TABLE users ADD COLUMN extra text",
		"UPDATE users SET extra = 'x'",
	} {
		b.pg.Exec(sql)
	}
	b.wantOps(b.settled(p), "users", 1, 1, "cuu")
	b.stop(p)
	b.refused(b.start(), `source.columns names column "email" of public.users`, "gone")
	b.yaml["source"].(map[string]any)["columns"].(caseMap)["public.users"].(caseMap)["gone"] = []string{"email"}
	p = b.stream()
	b.pg.Exec("UPDATE users SET extra = 'y'")
	b.wantOps(b.settled(p), "users", 1, 1, "cuuu")
	b.nothingLeaks(true, []*harness.Proc{p}, secretText)
	b.stop(p)
}

// What would hide nothing, or make one row of two, is refused before anything is made.
func TestColumnsThatCannotBeHiddenAreRefusedAtTheStart(t *testing.T) {
	const sql = `CREATE TABLE users (id int PRIMARY KEY, email text); CREATE TABLE events (id text PRIMARY KEY, part int);
		CREATE TABLE parts (id int PRIMARY KEY, email text) PARTITION BY RANGE (id); CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (9);
		CREATE TABLE shop_outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text)`
	b := newSnapBed(t, sql)
	for _, c := range []struct {
		table string
		entry caseMap
		code  int
		says  []string
	}{
		{"public.users", caseMap{"mask": caseMap{"e_mail": "sha256"}}, 4, []string{`source.columns names column "e_mail" of public.users, whose columns are "id", "email"`, "in clear"}},
		{"public.user", caseMap{"mask": caseMap{"email": "sha256"}}, 4, []string{"source.columns names public.user, and there is no such table", "in clear"}},
		{"public.parts_1", caseMap{"mask": caseMap{"email": "sha256"}}, 4, []string{"public.parts_1", "partition"}},
		{"public.users", caseMap{"exclude": []string{"id"}}, 4, []string{`source.columns has exclude for column "id" of public.users, which is part of the record key`, "hmac-sha256"}},
		{"public.users", caseMap{"mask": caseMap{"id": nil}}, 4, []string{"source.columns has the mask null", "record key"}},
		{"public.users", caseMap{"mask": caseMap{"id": caseMap{"fixed": "1"}}}, 4, []string{"source.columns has the mask fixed", "record key"}},
		{"public.events", caseMap{"mask": caseMap{"id": caseMap{"truncate": 8}}}, 4, []string{"source.columns has the mask truncate: 8", "record key"}},
		{"audit.users", caseMap{"mask": caseMap{"email": "sha256"}}, 2, []string{"source.columns.audit.users: is not captured"}},
		{"public.shop_outbox", caseMap{"exclude": []string{"payload"}}, 2, []string{"source.columns.public.shop_outbox: is an outbox table"}},
	} {
		b.set("source.tables", []string{"public.*"})
		b.set("outbox", []caseMap{{"table": "public.shop_outbox"}})
		b.set("source.columns", caseMap{c.table: c.entry})
		b.ends(b.start(), c.code, c.says...)
		if n := b.pg.Value("SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1) + (SELECT count(*) FROM pg_publication)", b.slot()); n != "0" {
			t.Errorf("%s: %s slots and publications were made", c.table, n)
		}
	}
	// Rows of a partitioned table that come under the names of its partitions.
	b.set("source.columns", caseMap{"public.parts": caseMap{"mask": caseMap{"email": "sha256"}}})
	b.set("source.publication-mode", "existing")
	b.set("source.publication", "by_leaf")
	b.set("snapshot.mode", "never")
	b.set("outbox", []caseMap{})
	b.pg.Exec("CREATE PUBLICATION by_leaf FOR ALL TABLES")
	b.refused(b.start(), "source.columns names the partitioned table public.parts", "publish_via_partition_root")
	b.pg.Exec("ALTER PUBLICATION by_leaf SET (publish_via_partition_root = true)")
	p := b.stream()
	b.pg.Exec("INSERT INTO parts VALUES (1, '" + secretText + "')")
	b.wantOps(b.settled(p), "parts", 1, 1, "c")
	b.nothingLeaks(true, []*harness.Proc{p}, secretText)
	b.stop(p)
}

// Records of a table without a key have no key to be hidden in.
func TestHiddenColumnsOfATableWithoutAKey(t *testing.T) {
	for _, types := range []string{"plain", "debezium"} {
		t.Run(types, func(t *testing.T) {
			b := newSnapBed(t, "CREATE TABLE log (line text, who text)")
			b.set("source.keyless", "inserts")
			b.set("source.columns", caseMap{"public.log": caseMap{"exclude": []string{"line"}, "mask": caseMap{"who": caseMap{"truncate": 2}}}})
			b.set("format.types", types)
			b.set("format.debezium", caseMap{"schemas-enable": true})
			b.set("format.envelope", false)
			row := "INSERT INTO log VALUES ('" + secretText + "', 'ab" + secretText + "')"
			b.pg.Exec(row)
			p := b.stream()
			b.waitTable(p, "public.log", allRows)
			b.pg.Exec(row)
			b.caughtUp(p)
			records := b.kafka.WaitCommitted(t, b.topic("log"), 2)
			for _, r := range records {
				payload := string(r.Value)
				if types == "debezium" {
					var v struct{ Schema, Payload json.RawMessage }
					if err := json.Unmarshal(r.Value, &v); err != nil {
						t.Fatal(err)
					}
					payload = string(v.Payload)
					if strings.Contains(string(v.Schema), `"line"`) || !strings.Contains(string(v.Schema), `{"type":"string","optional":true,"field":"who"}`) {
						t.Errorf("schema %s", v.Schema)
					}
				}
				if r.Key != nil || payload != `{"who":"ab"}` {
					t.Errorf("key %s, row %s", r.Key, payload)
				}
			}
			b.nothingLeaks(true, []*harness.Proc{p}, secretText)
			b.stop(p)
		})
	}
}
