package config

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

const pollingFile = `name: shop
source: {dsn: "postgres://db/shop", mode: polling}
outbox: [{table: public.outbox, after: mark}]
kafka: {brokers: ["127.0.0.1:9092"]}
`

func TestPollingNeedsAnOutboxAndAWayToTellPublishedRows(t *testing.T) {
	c := mustParse(t, pollingFile)
	if c.Source.Mode != ModePolling || c.Outbox[0].After != AfterMark || c.Source.PollInterval.String() != "500ms" {
		t.Fatalf("got %+v", c.Source)
	}
	for _, test := range []struct{ name, old, new, path string }{
		{"no outbox", "outbox: [{table: public.outbox, after: mark}]\n", "", "outbox"},
		{"keep, which is the default", ", after: mark", "", "outbox[0].after"},
		{"keep", "after: mark", "after: keep", "outbox[0].after"},
		{"a snapshot of the outbox", "after: mark", "after: mark, snapshot: pending", "outbox[0].snapshot"},
		{"an interval of nothing", "mode: polling", "mode: polling, poll-interval: 1ms", "source.poll-interval"},
	} {
		t.Run(test.name, func(t *testing.T) {
			paths := problemPaths(t, strings.Replace(pollingFile, test.old, test.new, 1))
			if !slices.Equal(paths, []string{test.path}) {
				t.Errorf("problems at %v, want %s alone", paths, test.path)
			}
		})
	}
}

func TestPollingRefusesEveryKeyThatNobodyWouldObey(t *testing.T) {
	text := strings.Replace(pollingFile, "mode: polling", `mode: polling, slot: s, publication: p, publication-mode: managed, tables: ["*.*"], messages: [], keyless: refuse, keys: {}, columns: {}, max-retained-wal: 0, primary-dsn: ""`, 1)
	text = strings.Replace(text, `brokers: ["127.0.0.1:9092"]`, `brokers: ["127.0.0.1:9092"], transactional-id: t, transaction-timeout: 60s, checkpoint-topic: c`, 1)
	text += "snapshot: {mode: initial}\ntopics: {table: \"{prefix}.{schema}.{table}\", message: m}\non-fenced: standby\nreplay: {retain-wal: 0}\nformat: {value: json}\nbatch: {max-delay: 5ms}\n"
	got := problemPaths(t, text)
	var want []string
	for _, k := range walOnly() {
		want = append(want, k.path)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("problems at %v\nwant       %v", got, want)
	}
	// The same keys are fine without polling.
	text = strings.Replace(strings.Replace(text, "mode: polling", "mode: wal", 1), "after: mark", "after: keep", 1)
	mustParse(t, text)
}

func problemPaths(t *testing.T, text string) []string {
	t.Helper()
	_, err := Parse([]byte(text), func(string) (string, bool) { return "", false }, nil)
	var p *Problems
	if !errors.As(err, &p) {
		t.Fatalf("error %v, want problems", err)
	}
	var paths []string
	for _, problem := range p.list {
		paths = append(paths, problem.Path)
	}
	return paths
}
