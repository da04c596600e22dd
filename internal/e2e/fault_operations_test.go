package e2e

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/walrelay/walrelay/internal/harness"
)

func TestEveryConfigurationErrorIsSaidAtOnce(t *testing.T) {
	t.Parallel()
	const file = `name: shop
batch: {max-dely: 5ms, max-bytes: -1}
topics: {partitions: 0}
format: {value: xml}
kafka:
  brokers: []
  sasl: {mechanism: plain, username: u, password: "${NOT_SET}"}
`
	for _, command := range [][]string{{"run"}, {"config", "print"}} {
		t.Run(strings.Join(command, " "), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "shop.yaml")
			if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
				t.Fatal(err)
			}
			b := &faultBed{t: t}
			p := harness.StartProgram(t, harness.Binary(t), nil, append(command, "-c", path)...)
			b.ends(p, 2, "has 7 problems", "batch.max-dely", "max-delay", "batch.max-bytes", "-1", "topics.partitions", "0",
				"format.value", "xml", "json", "source.dsn", "kafka.brokers", "kafka.sasl.password", "NOT_SET")
			if strings.Contains(p.Stderr(), "walrelay starts") {
				t.Error("it started all the same")
			}
		})
	}
}

func TestNoSecretIsEverSaid(t *testing.T) {
	t.Parallel()
	const inPG, inKafka = "s3cr3t-pg@/x", "s3cr3t-k"
	b := newPlainBed(t, faultTable)
	host := b.pg.Server.Addr()
	user := "secret_" + b.name
	b.pg.Exec(`CREATE ROLE ` + user + ` LOGIN SUPERUSER PASSWORD '` + inPG + `'`)
	t.Cleanup(func() { b.pg.Exec(`REASSIGN OWNED BY ` + user + ` TO CURRENT_USER; DROP ROLE ` + user) })
	dsn := func(password, address, parameters string) string {
		u := url.URL{Scheme: "postgres", User: url.UserPassword(user, password), Host: address, Path: "/" + b.pg.Name, RawQuery: parameters}
		return u.String()
	}
	var said strings.Builder
	check := func(what, text string) {
		t.Helper()
		said.WriteString(text)
		for _, secret := range []string{inPG, inKafka} {
			for form, hidden := range map[string]string{"itself": secret, "URL-encoded": url.QueryEscape(secret), "in a path": url.PathEscape(secret),
				"in base64": base64.StdEncoding.EncodeToString([]byte(secret)), "in URL's base64": base64.RawURLEncoding.EncodeToString([]byte(secret))} {
				if strings.Contains(text, hidden) {
					t.Errorf("%s has a secret, %s", what, form)
				}
			}
		}
	}
	b.set("log.level", "trace")
	sasl := func(on bool) {
		b.set("kafka.sasl", map[string]any{})
		if on {
			b.set("kafka.sasl", map[string]any{"mechanism": "plain", "username": "u", "password": inKafka})
		}
	}
	for what, fault := range map[string]string{
		"a wrong host":     dsn(inPG, "nowhere.invalid:5432", "sslmode=disable"),
		"a wrong password": dsn(inPG+"x", host, "sslmode=disable"),
		"broken TLS":       dsn(inPG, host, "sslmode=verify-full"),
		"a broken DSN":     "postgres://" + user + ":" + inPG + "@" + host + "/x?connect_timeout=soon",
	} {
		sasl(true)
		b.set("source.dsn", fault)
		p := b.start()
		code := p.Wait(faultLong)
		if code != 1 && code != 2 {
			t.Errorf("%s: exit code %d", what, code)
		}
		check(what, p.Stdout()+p.Stderr())
	}
	b.set("source.dsn", dsn(inPG, host, "sslmode=disable"))
	p := harness.Start(t, b.yaml, "run")
	p.WaitLog(faultLong, faultMessage("starting over from the checkpoint"))
	p.Signal(syscall.SIGABRT)
	p.Wait(faultLong)
	if !strings.Contains(p.Stderr(), "SIGABRT") {
		t.Errorf("no dump of goroutines: %s", p.Stderr())
	}
	check("a panic with SASL", p.Stdout()+p.Stderr())

	printed := harness.StartProgram(t, harness.Binary(t), nil, "config", "print", "-c", p.ConfigFile)
	if code := printed.Wait(faultLong); code != 0 || !strings.Contains(printed.Stdout(), "***") {
		t.Errorf("config print: exit code %d, %s%s", code, printed.Stdout(), printed.Stderr())
	}
	check("config print", printed.Stdout()+printed.Stderr())

	sasl(false)
	p = b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1)`)
	b.wantIDs("t", []int{1})
	for _, path := range []string{"/", "/status", "/metrics", "/readyz", "/healthz"} {
		_, body := b.get(p, path)
		check(path, body)
	}
	p.Signal(syscall.SIGABRT)
	p.Wait(faultLong)
	check("a panic while streaming", p.Stdout()+p.Stderr())
	if !strings.Contains(said.String(), user) {
		t.Error("not even the user's name was said: the test looks in the wrong place")
	}
}

func TestUntilCaughtUpEndsAlthoughWritesGoOn(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable+`; CREATE TABLE w (id serial PRIMARY KEY)`)
	p := b.stream()
	b.pg.Exec(`INSERT INTO t SELECT generate_series(1, 500)`)
	b.wantIDs("t", faultRange(1, 500))
	b.stop(p)
	open := b.session()
	b.must(open, `BEGIN; INSERT INTO t VALUES (2000)`)
	b.pg.Exec(`INSERT INTO t SELECT generate_series(501, 1000)`)
	writer := faultConnect(t, b.pg.DSN())
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				ended <- nil
				return
			case <-tick.C:
			}
			if _, err := writer.Exec(t.Context(), `INSERT INTO w DEFAULT VALUES`); err != nil {
				ended <- err
				return
			}
		}
	}()
	p = b.start("--until-caught-up")
	if code := p.Wait(faultLong); code != 0 {
		t.Errorf("exit code %d", code)
	}
	before := b.pg.Value(`SELECT count(*) FROM w`)
	b.pg.WaitValue("t", `SELECT count(*) > $1 FROM w`, before) // writes went on all the while
	b.wantIDs("t", faultRange(1, 1000))
	if active := b.pg.Value(`SELECT active FROM pg_replication_slots WHERE slot_name = $1`, b.slot()); active != "f" {
		t.Error("the slot is still held")
	}
	b.must(open, `COMMIT`)
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	p = b.start("--until-caught-up")
	if code := p.Wait(faultLong); code != 0 {
		t.Errorf("exit code %d", code)
	}
	b.wantIDs("t", append(faultRange(1, 1000), 2000))
	last := 0
	if _, err := fmt.Sscan(b.pg.Value(`SELECT count(*) FROM w`), &last); err != nil {
		t.Fatal(err)
	}
	b.wantIDs("w", faultRange(1, last))
}

func TestManyTablesCostNoQueryEach(t *testing.T) {
	t.Parallel()
	const tables = 2000
	b, w := newWireBed(t, fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP EXECUTE format('CREATE TABLE m%%s (id int PRIMARY KEY, v text)', i); END LOOP; END $$`, tables),
		harness.Setting("log_statement", "all"), harness.Setting("log_line_prefix", "app=%a "), harness.Setting("max_locks_per_transaction", "256"), harness.Setting("log_parameter_max_length", "0"))
	b.set("topics.partitions", 1)
	queries := func() int {
		n := 0
		for line := range strings.Lines(b.pg.Server.Log()) {
			if strings.HasPrefix(line, "app=walrelay_"+b.name+" ") && (strings.Contains(line, "execute") || strings.Contains(line, "statement: ")) {
				n++
			}
		}
		return n
	}
	began := time.Now()
	p := b.stream()
	t.Logf("first start: %s, %d queries, %d CreateTopics, %d Metadata", time.Since(began), queries(), w.count(faultKeyTopics), w.count(faultKeyMetadata))
	if n := w.count(faultKeyTopics); n > 20 {
		t.Errorf("%d CreateTopics requests for %d topics", n, tables)
	}
	b.stop(p)
	before, topics := queries(), w.count(faultKeyMetadata)
	if before == 0 {
		t.Fatal("no query of ours is in the server's log")
	}
	began = time.Now()
	p = b.stream()
	took, n := time.Since(began), queries()-before
	t.Logf("restart: %s, %d queries, %d Metadata", took, n, w.count(faultKeyMetadata)-topics)
	if n > 100 {
		t.Errorf("%d queries at a restart", n)
	}
	if took > 20*time.Second {
		t.Errorf("the restart took %s", took)
	}
	b.pg.Exec(fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP EXECUTE format('INSERT INTO m%%s VALUES (1)', i); END LOOP; END $$`, tables))
	var seqs []int
	commits := map[string]bool{}
	for _, r := range faultAll(t, b, `public\.m\d+`, tables) {
		v := faultDecode(t, r)
		seqs = append(seqs, v.Source.Seq)
		commits[v.Source.CommitLSN] = true
	}
	slices.Sort(seqs)
	if !slices.Equal(seqs, faultRange(0, tables-1)) || len(commits) != 1 {
		t.Errorf("seqs %s in %d transactions", faultShort(seqs), len(commits))
	}
	b.stop(p)
	if n := queries() - before; n > 400 {
		t.Errorf("%d queries since the restart: one per table or topic", n)
	}
}

func TestTheBooksBalance(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, `CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE x (id int PRIMARY KEY); CREATE PUBLICATION ours FOR TABLE t, x`)
	b.set("source.publication-mode", "existing")
	b.set("source.publication", "ours")
	b.set("source.tables", []string{"public.*", "!public.x"})
	b.set("kafka.compression", "none")
	b.set("topics.config", map[string]string{"max.message.bytes": "1048588"})
	p := b.stream()
	b.pg.Exec(`INSERT INTO t SELECT g, 'v' FROM generate_series(1, 100) g`)
	b.pg.Exec(`INSERT INTO x SELECT generate_series(1, 10)`)
	b.pg.Exec(`INSERT INTO t VALUES (101, (SELECT string_agg(md5(g::text),'') FROM generate_series(1,65536) g))`)
	b.pg.Exec(`DELETE FROM t WHERE id = 1`)
	b.pg.Exec(`TRUNCATE x`)
	ends := func() {
		t.Helper()
		if n := len(b.kafka.WaitCommitted(t, b.topic("t"), 102)); n != 102 {
			t.Errorf("%d records of t, want 102", n)
		}
		if n := len(b.kafka.WaitCommitted(t, b.name+".dead-letter", 1)); n != 1 {
			t.Errorf("%d dead letters, want 1", n)
		}
	}
	ends()
	var m map[string]float64
	counted := func(outcome string) float64 {
		return faultSum(m, "walrelay_records_total", `outcome="`+outcome+`"`)
	}
	harness.WaitFor(t, "the counts to arrive", faultLong, func() (bool, error) {
		m = b.metrics(p)
		return counted("excluded") == 11, nil
	})
	if counted("delivered") != 102 || counted("dead_lettered") != 1 {
		t.Errorf("delivered %v, dead-lettered %v", counted("delivered"), counted("dead_lettered"))
	}
	if _, status := b.get(p, "/status"); !strings.Contains(status, `"records": 103`) {
		t.Errorf("status: %s", status)
	}
	p.Kill()
	p = b.stream()
	ends()
	b.pg.Exec(`INSERT INTO t VALUES (200, 'v')`)
	if n := len(b.kafka.WaitCommitted(t, b.topic("t"), 103)); n != 103 {
		t.Errorf("%d records of t after a kill, want 103", n)
	}
	harness.WaitFor(t, "the counters to begin at 0 again", faultLong, func() (bool, error) {
		m = b.metrics(p)
		return counted("delivered") == 1, nil
	})
	b.stop(p)
}

func TestTheSignalToStopFinishesTheBatch(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	p := b.stream()
	b.holdCommit(w, 1, 10)
	p.Term()
	b.phase(p, "stopping")
	if !p.Running() {
		t.Fatal("it ended with a batch in hand")
	}
	w.release()
	if code := p.Wait(10 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	b.wantIDs("t", faultRange(1, 10))
	if at, position := b.confirmed(), b.checkpoint().Position; at < position.LSN {
		t.Errorf("confirmed %s, the checkpoint is at %s", at, position)
	}
}

func TestStopTimeoutBoundsTheEnd(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	b.set("stop-timeout", "2s")
	p := b.stream()
	b.holdCommit(w, 1, 10)
	p.Term()
	began := time.Now()
	b.ends(p, 1, "stop-timeout")
	if took := time.Since(began); took < time.Second || took > 4*time.Second {
		t.Errorf("ended after %s, with a stop-timeout of 2 s", took)
	}
	w.discard()
	p = b.stream()
	b.wantIDs("t", faultRange(1, 10))
	b.stop(p)
}

func TestASecondSignalAborts(t *testing.T) {
	t.Parallel()
	b, w := newWireBed(t, faultTable)
	b.set("stop-timeout", "60s")
	p := b.stream()
	b.holdCommit(w, 1, 10)
	p.Term()
	b.phase(p, "stopping")
	p.Signal(syscall.SIGINT)
	if code := p.Wait(5 * time.Second); code != 1 || !strings.Contains(p.Stderr(), "aborted by a second signal") {
		t.Errorf("exit code %d: %s", code, p.Stderr())
	}
	w.discard()
	p = b.stream()
	b.wantIDs("t", faultRange(1, 10))
	b.stop(p)
}

func TestAMistakeInTheConfigurationEndsTheStart(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	good := b.pg.DSN()
	parsed, err := url.Parse(good)
	if err != nil {
		t.Fatal(err)
	}
	dsn := func(change func(u *url.URL)) string {
		u := *parsed
		change(&u)
		return u.String()
	}
	for _, c := range []struct {
		name, dsn string
		brokers   []string
		says      []string
	}{
		{"a wrong password", dsn(func(u *url.URL) { u.User = url.UserPassword(u.User.Username(), "wrong") }), nil, []string{"does not let this role in", "check user and password"}},
		{"a missing database", dsn(func(u *url.URL) { u.Path = "/nowhere" }), nil, []string{"nowhere", "does not exist"}},
		{"an unknown database host", dsn(func(u *url.URL) { u.Host = "nowhere.invalid:5432" }), nil, []string{"nowhere.invalid", "correct the host"}},
		{"an unknown Kafka host", good, []string{"nowhere.invalid:9092"}, []string{"nowhere.invalid", "kafka.brokers"}},
	} {
		b.set("source.dsn", c.dsn)
		b.set("kafka.brokers", b.kafka.Brokers())
		if c.brokers != nil {
			b.set("kafka.brokers", c.brokers)
		}
		began := time.Now()
		p := b.start()
		b.ends(p, 1, c.says...)
		if took := time.Since(began); took > 12*time.Second {
			t.Errorf("%s: ended after %s", c.name, took)
		}
		lines := 0
		for _, line := range p.Lines() {
			if line.Fields == nil {
				lines++
			}
		}
		if lines != 1 {
			t.Errorf("%s: %d lines of error: %s", c.name, lines, p.Stderr())
		}
	}
}

// faultOnce counts the lines that say that a connection was lost, and that it is back.
func faultOnce(t *testing.T, p *harness.Proc, from int, what string) {
	t.Helper()
	lost, back := 0, 0
	for _, line := range p.Lines()[from:] {
		switch line.Message() {
		case "starting over from the checkpoint":
			lost++
		case "recovered":
			back++
		}
	}
	if lost != 1 || back != 1 {
		t.Errorf("%s: %d lines say that it was lost and %d that it is back, want one each", what, lost, back)
	}
}

func TestLostConnectionsAreRetriedForAsLongAsItTakes(t *testing.T) {
	t.Parallel()
	k := harness.Kafka(t, harness.OwnKafka())
	b := newFaultBed(t, harness.Postgres(t), k)
	b.pg.Exec(faultTable)
	proxy := harness.StartProxy(t, b.pg.Server.Addr())
	b.set("source.dsn", b.pg.ProxyDSN(proxy.Addr()))
	p := b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (1)`)
	b.wantIDs("t", []int{1})

	from := len(p.Lines())
	proxy.Refuse()
	if proxy.Cut() == 0 {
		t.Fatal("there was no connection to PostgreSQL")
	}
	b.pg.Exec(`INSERT INTO t VALUES (2)`)
	p.WaitLogAfter(from, faultLong, faultMessage("starting over from the checkpoint"), harness.Field("level", "warn"))
	harness.WaitFor(t, "several attempts", faultLong, func() (bool, error) {
		return faultSum(b.metrics(p), "walrelay_restarts_total", "") >= 4, nil
	})
	proxy.Accept()
	line := p.WaitLogAfter(from, faultLong, faultMessage("recovered"))
	if line.Field("attempts") == "1" {
		t.Errorf("recovered: %s", line.Raw)
	}
	b.wantIDs("t", []int{1, 2})
	faultOnce(t, p, from, "PostgreSQL")

	from = len(p.Lines())
	k.Kill(0)
	b.pg.Exec(`INSERT INTO t VALUES (3)`)
	// Within a delivery the client waits; between two, or at a commit, the session starts over.
	waits := p.WaitLogAfter(from, faultLong, func(l harness.Line) bool {
		return l.Message() == "waiting for Kafka to take a batch" || l.Message() == "starting over from the checkpoint"
	})
	back := "recovered"
	if waits.Message() == "waiting for Kafka to take a batch" {
		back = "Kafka takes batches again"
	}
	if code, body := b.get(p, "/readyz"); code != 503 {
		t.Errorf("/readyz without Kafka: %d %s", code, body)
	}
	k.Restart(0)
	b.wantIDs("t", []int{1, 2, 3})
	b.pg.Exec(`INSERT INTO t VALUES (4)`)
	b.wantIDs("t", []int{1, 2, 3, 4})
	p.WaitLogAfter(from, faultLong, faultMessage(back))
	said := 0
	for _, line := range p.Lines()[from:] {
		if line.Message() == waits.Message() && line.Field("reason") == waits.Field("reason") {
			said++
		}
	}
	if said != 1 {
		t.Errorf("%q is said %d times", waits.Message(), said)
	}
	b.stop(p)
}

func TestCreatingTheSlotSaysWhomItWaitsForAndCanBeStopped(t *testing.T) {
	t.Parallel()
	b := newPlainBed(t, faultTable)
	open := b.session()
	b.must(open, `BEGIN; INSERT INTO t VALUES (1)`)
	var xid string
	if err := open.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text`).Scan(&xid); err != nil {
		t.Fatal(err)
	}
	p := b.start()
	line := p.WaitLog(faultLong, harness.Message("creating the slot waits"), harness.Text("xid "+xid))
	if !strings.Contains(line.Raw, fmt.Sprintf("pid %d", open.PgConn().PID())) || !strings.Contains(line.Raw, "since ") {
		t.Errorf("whom it waits for: %s", line.Raw)
	}
	b.phase(p, "creating-slot")
	p.Term()
	if code := p.Wait(15 * time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if n := b.pg.Value(`SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1`, b.slot()); n != "0" {
		t.Error("an unfinished slot is left behind")
	}
	b.must(open, `COMMIT`)
	p = b.stream()
	b.pg.Exec(`INSERT INTO t VALUES (2)`)
	b.wantIDs("t", []int{2})
	b.stop(p)
}

// faultAll reads n committed records of the topics of this connector whose name, behind the prefix, matches a pattern.
func faultAll(t *testing.T, b *faultBed, pattern string, n int) []*kgo.Record {
	t.Helper()
	var records []*kgo.Record
	client := b.kafka.Client(t, kgo.ConsumeRegex(), kgo.ConsumeTopics(`^`+b.name+`\.`+pattern+`$`), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx, cancel := context.WithTimeout(t.Context(), faultLong)
	defer cancel()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d records", len(records), n)
		}
		records = append(records, fetches.Records()...)
	}
	return records
}
