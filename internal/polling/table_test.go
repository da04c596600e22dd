package polling

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/router"
)

// Only a primary key is another value in each row. Whatever else rows are ordered by leaves
// some equal, which then need what tells them apart.
func TestRowsAreNeverLeftEqual(t *testing.T) {
	const traces = "t.cmin::text::int8, t.ctid"
	for name, tt := range map[string]struct {
		backlog router.Backlog
		seq     string
		want    string
	}{
		"a number as key":       {router.Backlog{Order: []string{"id"}, Primary: []string{"id"}, Ordered: true}, "version", `t."id"`},
		"a time without a key":  {router.Backlog{Order: []string{"created_at"}, Ordered: true}, "", `t."created_at", ` + traces},
		"and a sequence number": {router.Backlog{Order: []string{"created_at"}, Ordered: true}, "version", `t."created_at", t."version", ` + traces},
		"a time and a key":      {router.Backlog{Order: []string{"created_at", "id"}, Primary: []string{"id"}, Ordered: true}, "version", `t."created_at", t."version", ` + traces},
		"a key that says none":  {router.Backlog{Order: []string{"id"}, Primary: []string{"id"}}, "version", "pg_catalog.age(t.xmin) DESC, " + traces},
		"nothing":               {router.Backlog{}, "", "pg_catalog.age(t.xmin) DESC, " + traces},
	} {
		if got := strings.Join(orderSQL(tt.backlog, router.OutboxColumns{Seq: tt.seq}), ", "); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}
