package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func withColumns(columns string) string {
	return "name: shop\nsource:\n  dsn: postgres://u:s3cr3t-pg@db/shop\n  tables: ['public.*']\n  keys: {public.events: [event_id]}\n  columns: " + columns +
		"\noutbox: [{table: public.outbox}]\nkafka:\n  brokers: [k:9092]\n"
}

func TestMasksInEachForm(t *testing.T) {
	text := withColumns("\n" + `    public.users:
      exclude: [password_hash]
      mask:
        email: sha256
        phone: {hmac-sha256: "${file:/run/salt}"}
        note: {truncate: 8}
        city: null
        town: "null"
        name: {fixed: "-"}
        size: {fixed: 8}
        none: {fixed: ""}
        old: ~
      gone: [old]`)
	c, err := Parse([]byte(text), lookup(nil), func(path string) ([]byte, error) { return []byte("salt of " + path + "\n"), nil })
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Columns{"public.users": {
		Exclude: []string{"password_hash"},
		Mask: map[string]Mask{
			"email": {Kind: MaskSHA256}, "phone": {Kind: MaskHMAC, Salt: NewSecret("salt of /run/salt")}, "note": {Kind: MaskTruncate, Length: 8},
			"city": {Kind: MaskNull}, "town": {Kind: MaskNull}, "name": {Kind: MaskFixed, Text: "-"}, "size": {Kind: MaskFixed, Text: "8"},
			"none": {Kind: MaskFixed}, "old": {Kind: MaskNull},
		},
		Gone: []string{"old"},
	}}
	if diff := cmp.Diff(want, c.Source.Columns); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWhatIsWrongWithColumns(t *testing.T) {
	const remedy = `; write sha256, null, {hmac-sha256: "${file:/path}"}, {truncate: 8} or {fixed: "-"} (line 6)`
	users := "source.columns.public.users"
	for _, c := range []struct{ columns, want string }{
		{"[public.users]", "source.columns: must be a mapping"},
		{"{users: {exclude: [a]}}", "source.columns.users: is not of the form schema.table; write for example public.users (line 6, value users)"},
		{"{'public.*': {exclude: [a]}}", "source.columns.public.*: names one table, without patterns and SQL quotes"},
		{"{audit.users: {exclude: [a]}}", "source.columns.audit.users: is not captured, so that a misspelt name would hide nothing of the table that is meant; correct the name, or add the table to source.tables (line 6)"},
		{"{public.outbox: {exclude: [a]}}", "source.columns.public.outbox: is an outbox table, whose rows leave as events and not by their columns"},
		{"{public.users: {}}", users + ": names no column"},
		{"{public.users: [a]}", users + ": must be a mapping"},
		{"{public.users: {gone: [a]}}", users + ": names no column"},
		{"{public.users: {excludes: [a]}}", users + ".excludes: unknown key; did you mean exclude? (line 6)"},
		{"{public.users: {exclude: [a, a]}}", users + ".exclude[1]: is in the list already"},
		{"{public.users: {exclude: ['']}}", users + ".exclude[0]: is empty"},
		{"{public.users: {exclude: [a], gone: [b]}}", users + ".gone[0]: is neither excluded nor masked"},
		{"{public.users: {exclude: [a], mask: {a: sha256}}}", users + ".mask.a: is excluded as well; keep one of the two"},
		{"{public.users: {mask: {'': sha256}}}", users + ".mask.: names no column"},
		{"{public.users: {mask: {a: }}}", users + ".mask.a: the key has no value" + remedy},
		{"{public.users: {mask: {a: sha265}}}", users + ".mask.a: is not a mask; did you mean sha256?" + remedy},
		{"{public.users: {mask: {a: s3cr3t-salt}}}", users + ".mask.a: is not a mask" + remedy},
		{"{public.users: {mask: {a: [s3cr3t-salt]}}}", users + ".mask.a: is not a mask" + remedy},
		{"{public.users: {mask: {a: {}}}}", users + ".mask.a: is not a mask" + remedy},
		{"{public.users: {mask: {a: {hash: s3cr3t-salt}}}}", users + ".mask.a: is not a mask" + remedy},
		{"{public.users: {mask: {a: {truncate: 8, fixed: x}}}}", users + ".mask.a: is not a mask" + remedy},
		{"{public.users: {mask: {a: hmac-sha256}}}", users + ".mask.a: hmac-sha256 needs a value" + remedy},
		{"{public.users: {mask: {a: {sha256: s3cr3t-salt}}}}", users + ".mask.a: sha256 takes nothing more" + remedy},
		{"{public.users: {mask: {a: {hmac-sha256: }}}}", users + ".mask.a.hmac-sha256: the key has no value"},
		{"{public.users: {mask: {a: {hmac-sha256: [s3cr3t-salt]}}}}", users + ".mask.a.hmac-sha256: must be a single value"},
		{"{public.users: {mask: {a: {hmac-sha256: ''}}}}", users + ".mask.a.hmac-sha256: the salt is empty, so that everybody could make the same hashes"},
		{"{public.users: {mask: {a: {hmac-sha256: '${EMPTY}'}}}}", users + ".mask.a.hmac-sha256: the salt is empty"},
		{"{public.users: {mask: {a: {hmac-sha256: '${file:/run/salt}'}}}}", users + ".mask.a.hmac-sha256: the file cannot be read"},
		{"{public.users: {mask: {a: {truncate: eight}}}}", users + ".mask.a.truncate: is not a whole number"},
		{"{public.users: {mask: {a: {truncate: 0}}}}", users + ".mask.a.truncate: is not a number of characters that can stay; write a value from 1 to 10485760"},
		{"{public.users: {mask: {a: {truncate: -1}}}}", users + ".mask.a.truncate: is not a number"},
		{"{public.events: {exclude: [event_id]}}", "source.columns.public.events.exclude[0]: is a column of source.keys: different rows would have one key"},
		{"{public.events: {mask: {event_id: null}}}", "source.columns.public.events.mask.event_id: is a column of source.keys"},
		{"{public.events: {mask: {event_id: {fixed: x}}}}", "source.columns.public.events.mask.event_id: is a column of source.keys"},
		{"{public.events: {mask: {event_id: {truncate: 3}}}}", "source.columns.public.events.mask.event_id: is a column of source.keys"},
	} {
		text := withColumns(c.columns)
		got := problemsOf(t, text)
		wantLines(t, text, got, c.want)
		if strings.Contains(strings.Join(got, ""), "s3cr3t") {
			t.Errorf("what may be a salt is quoted: %q", got)
		}
	}
	for _, right := range []string{"{public.events: {mask: {event_id: sha256}}}", "{public.events: {mask: {event_id: {hmac-sha256: salt}}}}", "{}", ""} {
		if got := problemsOf(t, withColumns(right)); got != nil {
			t.Errorf("%s: %q", right, got)
		}
	}
}
