package outbox

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/snapshot"
)

func key(columns ...string) (key []byte) {
	for _, c := range columns {
		key = AppendColumn(key, []byte(c))
	}
	return key
}

func TestKeysBecomeArraysOfText(t *testing.T) {
	target := &Target{Key: []string{"a", "b"}}
	var j Job
	for range 2 { // it is reused
		j.Reset(target)
		j.Add(0, key("1", `e"u\`))
		j.Add(7, key("2", "not seen"))
		j.Add(5, key("", "{,}\nNULL é"))
		if !j.wantsLook() || !j.look(snapshot.MVCC{Xmin: 7, Xmax: 7}) {
			t.Fatal("there is nothing to be done")
		}
		got := j.parameters()
		want := []string{`{"1",""}`, `{"e\"u\\","{,}` + "\n" + `NULL é"}`}
		for i := range want {
			if string(got[i]) != want[i] {
				t.Errorf("parameter %d: %s, want %s", i, got[i], want[i])
			}
		}
		if !j.Settled(0) || j.Settled(1) || !j.Settled(2) || j.Len() != 3 || !slices.Equal(j.Key(1), []string{"2", "not seen"}) {
			t.Errorf("job %+v", j)
		}
		if j.failed(io.EOF); j.Settled(0) || !errors.Is(j.Err, io.EOF) {
			t.Error("a job that failed has done something")
		}
	}
	j.Reset(target)
	if j.Add(0, key("1", "x")); j.wantsLook() {
		t.Error("it has to be known which transactions are visible, of a row that was seen")
	}
	if j.Reset(target); j.look(snapshot.MVCC{}) || j.Err != nil {
		t.Error("no rows are something to be done")
	}
}

func TestStatementsThatMarkAndDelete(t *testing.T) {
	for name, tt := range map[string]struct {
		target Target
		types  []string
		want   string
	}{
		"mark": {
			Target{Table: Table{OID: 7, Schema: "public", Name: "outbox", After: Mark, EventID: "event_id", Mark: "published_at", Pending: `"published_at" IS NULL`, Published: "pg_catalog.now()"}, Key: []string{"id", "event_id"}},
			[]string{"bigint", "uuid"},
			`WITH work AS (UPDATE "public"."outbox" AS t SET "published_at" = pg_catalog.now() FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[])) AS k(k0, k1)` +
				` WHERE pg_catalog.to_regclass('"public"."outbox"')::pg_catalog.oid = 7 AND t."id" = k.k0::bigint AND t."event_id" = k.k1::uuid AND ("published_at" IS NULL))` +
				` SELECT pg_catalog.to_regclass('"public"."outbox"')::pg_catalog.oid = 7`,
		},
		"delete, names that want quotes": {
			Target{Table: Table{OID: 8, Schema: `S "x's"`, Name: "out box", After: Delete, EventID: "Id"}, Key: []string{"Id"}},
			[]string{`"S ""x""".kind`},
			`WITH work AS (DELETE FROM "S ""x's"""."out box" AS t USING ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[])) AS k(k0)` +
				` WHERE pg_catalog.to_regclass('"S ""x''s"""."out box"')::pg_catalog.oid = 8 AND t."Id" = k.k0::"S ""x""".kind)` +
				` SELECT pg_catalog.to_regclass('"S ""x''s"""."out box"')::pg_catalog.oid = 8`,
		},
		"without a key": {
			Target{Table: Table{OID: 9, Schema: "public", Name: "o", After: Delete, EventID: "id"}, Key: []string{"id"}, Loose: true},
			[]string{"text"},
			`WITH work AS (DELETE FROM "public"."o" AS t USING ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[])) AS k(k0) WHERE pg_catalog.to_regclass('"public"."o"')::pg_catalog.oid = 9 AND t."id" = k.k0::text` +
				` AND NOT EXISTS (SELECT FROM "public"."o" o WHERE o."id" = t."id" AND (o.tableoid, o.ctid) <> (t.tableoid, t.ctid))) SELECT pg_catalog.to_regclass('"public"."o"')::pg_catalog.oid = 9`,
		},
	} {
		if got := tt.target.statement(tt.types); got != tt.want {
			t.Errorf("%s:\n%s, want\n%s", name, got, tt.want)
		}
	}
}

func TestWhomAnErrorConcerns(t *testing.T) {
	for code, want := range map[string]string{
		"55P03": "row locked", "40P01": "row locked", "40001": "row", "P0001": "row", "23514": "row", "57014": "row slow", "22P02": "row",
		"42501": "table", "42P01": "table redefined", "42703": "table redefined", "42804": "table redefined", "3F000": "table redefined", "55000": "table", "0A000": "table", "54001": "table",
		"53100": "", "58030": "", "25006": "", "57P01": "lost", "57P03": "lost", "08006": "lost", "28000": "", "3D000": "", "": "lost",
	} {
		err := io.ErrUnexpectedEOF
		if code != "" {
			err = fmt.Errorf("mark: %w", &pgconn.PgError{Code: code})
		}
		var got []string
		for _, is := range []struct {
			what string
			is   func(error) bool
		}{{"row", IsRow}, {"table", IsTable}, {"locked", IsLocked}, {"slow", IsSlow}, {"redefined", IsRedefined}, {"lost", IsLost}} {
			if is.is(err) {
				got = append(got, is.what)
			}
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%s: %q, want %q", code, s, want)
		}
	}
}

func FuzzKeysAreSplitAsTheyWereJoined(f *testing.F) {
	f.Add("1", "a", "")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		if got, want := SplitKey(key(a, b, c), 3), []string{a, b, c}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	})
}
