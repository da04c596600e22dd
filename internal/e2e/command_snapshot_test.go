package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/checkpoint"
	ckafka "github.com/walrelay/walrelay/checkpoint/kafka"
	"github.com/walrelay/walrelay/internal/harness"
)

// walrelay snapshot is given its answer by everything that it asks: the flags and the
// file (2), the database and Kafka (4). Beside the connector and without it, what it has
// asked for is in the checkpoint topic, and what was refused is not.
func TestTheCommandSnapshotAsksAndRefuses(t *testing.T) {
	c := caseNew(t)
	c.pg.Exec(`CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE outbox (id int PRIMARY KEY, event_type text, payload json)`)
	c.set(caseMap{"source": caseMap{"tables": []string{"public.*"}}, "outbox": []caseMap{{"table": "public.outbox"}}})
	command := func(code int, want string, args ...string) string {
		t.Helper()
		p := harness.Start(t, c.config, append([]string{"snapshot"}, args...)...)
		if got := p.Wait(harness.DefaultTimeout); got != code {
			t.Fatalf("%q: exit code %d, want %d:\n%s", args, got, code, p.Stderr())
		}
		if said := p.Stdout() + p.Stderr(); !strings.Contains(said, want) {
			t.Errorf("%q is not in:\n%s", want, said)
		}
		return p.Stdout()
	}
	command(4, "the connector has not run yet", "--table", "t")
	proc := c.start()
	running := command(0, "asked for a snapshot of public.t\nrequest ", "--table", "public.t")
	command(2, "is no condition on public.t: syntax error", "--table", "t", "--where", "id <")
	command(2, "--replace with --where", "--table", "t", "--where", "id < 5", "--replace")
	command(2, "source.tables does not capture it", "--table", "x.t")
	command(4, "public.outbox is an outbox table", "--table", "outbox")
	command(4, "table public.u does not exist", "--table", "t", "--table", "u")
	proc.Term()
	if code := proc.Wait(harness.DefaultTimeout); code != 0 {
		t.Fatalf("the connector ended with exit code %d", code)
	}
	stopped := command(0, "", "--table", "t", "--where", "id <= 1000", "-o", "json")

	var answer struct {
		Request, Topic, Where string
		Tables                []string
		Replace               bool
		Offset                int64
		Status                *string
	}
	if err := json.Unmarshal([]byte(stopped), &answer); err != nil {
		t.Fatalf("%v:\n%s", err, stopped)
	}
	if answer.Topic != "_walrelay."+c.name || answer.Where != "id <= 1000" || !slices.Equal(answer.Tables, []string{"public.t"}) ||
		answer.Replace || answer.Status != nil {
		t.Errorf("the answer is %s", stopped)
	}
	requests, next, err := ckafka.NewStore(c.kafka.Client(t), ckafka.Options{Topic: answer.Topic}).Requests(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	// Those that the connector has taken over are not removed before the next ones come.
	ids := map[string]checkpoint.Request{}
	for _, r := range requests {
		ids[r.ID] = r
	}
	if r := ids[answer.Request]; r.Where != "id <= 1000" || answer.Offset >= next {
		t.Errorf("the request %s is not in the topic, which holds %+v up to offset %d", answer.Request, requests, next)
	}
	for id := range ids {
		if id != answer.Request && !strings.Contains(running, id) {
			t.Errorf("request %s was asked for by nobody", id)
		}
	}
}
