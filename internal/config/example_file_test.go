package config

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

const exampleFile = "../../deploy/walrelay.yaml"

func mustRead(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestExampleFileDecodesToTheDefaults(t *testing.T) {
	got, err := Parse([]byte(mustRead(t, exampleFile)), lookup(map[string]string{"PGPASSWORD": "pw"}), noFile)
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Name = "shop"
	want.Source.DSN = NewDSN("postgres://walrelay:pw@db:5432/shop")
	want.Kafka.Brokers = []string{"127.0.0.1:9092"}
	want.FillNames()
	if diff := cmp.Diff(want, got, cmpEmpty()); diff != "" {
		t.Errorf("the example file is not the defaults (-want +got):\n%s", diff)
	}
}

// enableAll takes the # from every key that the example leaves unset. A
// comment has a blank after its #, a key has none.
func enableAll(text string) string {
	return regexp.MustCompile(`(?m)^( *)#([a-z-])`).ReplaceAllString(text, "$1$2")
}

func TestExampleFileNamesEveryKey(t *testing.T) {
	var tree any
	if err := yaml.Unmarshal([]byte(enableAll(mustRead(t, exampleFile))), &tree); err != nil {
		t.Fatal(err)
	}
	there := make(map[string]bool)
	collectKeys("", tree, there)
	for _, s := range specs() {
		if !there[s.path] {
			t.Errorf("%s does not name %s", exampleFile, s.path)
		}
	}
}

func collectKeys(path string, v any, into map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			into[join(path, k)] = true
			collectKeys(join(path, k), e, into)
		}
	case []any:
		for _, e := range v {
			collectKeys(path+"[]", e, into)
		}
	}
}

// The values of keys that are not set must be right too, where they are said
// to be defaults.
func TestExampleFileUnsetKeysAreRight(t *testing.T) {
	text := enableAll(mustRead(t, exampleFile))
	// One file cannot have the credentials of three mechanisms.
	text = regexp.MustCompile(`(?m)^ *(token: \$|access-key|secret-key|session-token).*\n`).ReplaceAllString(text, "")
	got, err := Parse([]byte(text), lookup(map[string]string{"PGPASSWORD": "pw", "KAFKA_PASSWORD": "kpw"}), noFile)
	if err != nil {
		t.Fatal(err)
	}
	named := Default()
	named.Name = "shop"
	named.FillNames()
	for _, c := range []struct{ got, want any }{
		{got.Source.Slot, named.Source.Slot},
		{got.Source.Publication, named.Source.Publication},
		{got.Topics.Prefix, named.Topics.Prefix},
		{got.Kafka.TransactionalID, named.Kafka.TransactionalID},
		{got.Kafka.CheckpointTopic, named.Kafka.CheckpointTopic},
	} {
		if c.got != c.want {
			t.Errorf("the example says %v, the default is %v", c.got, c.want)
		}
	}
	outbox := DefaultOutbox()
	outbox.Table = "public.outbox"
	outbox.Snapshot = outbox.Backlog() // unset it means what the example says
	if diff := cmp.Diff([]Outbox{outbox}, got.Outbox, cmpEmpty()); diff != "" {
		t.Errorf("the example's outbox is not the defaults (-want +got):\n%s", diff)
	}
	if !got.Kafka.TLS.Enabled {
		t.Error("the example's TLS section does not turn TLS on")
	}
}

func TestFieldTableIsTheStructs(t *testing.T) {
	inStructs := make(map[string]bool)
	var walk func(path string, typ reflect.Type)
	walk = func(path string, typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			at := join(path, f.Tag.Get("yaml"))
			inStructs[at] = true
			switch {
			case isGroup(f.Type):
				walk(at, f.Type)
			case f.Type == reflect.TypeFor[[]Outbox]():
				walk(at+"[]", reflect.TypeFor[Outbox]())
			}
		}
	}
	walk("", reflect.TypeFor[Config]())
	seen := make(map[string]bool)
	for _, s := range specs() {
		if !inStructs[s.path] {
			t.Errorf("%s is in the table, but in no struct", s.path)
		}
		if seen[s.path] {
			t.Errorf("%s is in the table twice", s.path)
		}
		seen[s.path] = true
		if strings.TrimSpace(s.doc) == "" {
			t.Errorf("%s has no description", s.path)
		}
	}
	for p := range inStructs {
		if !seen[p] {
			t.Errorf("%s is in a struct, but not in the table", p)
		}
	}
}
