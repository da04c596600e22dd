package config

import (
	"testing"
	"time"
)

func TestSizes(t *testing.T) {
	for in, want := range map[string]Size{
		"0": 0, "64MiB": 64 << 20, "8MB": 8e6, "8388608": 8 << 20, "1 GiB": 1 << 30, "10kib": 10 << 10, "5B": 5, "-1": -1, "2TiB": 2 << 40,
	} {
		if got, err := ParseSize(in); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "MiB", "8M", "1.5GiB", "x8", "8MiB8", "99999999999999999999", "9999999999TiB"} {
		if got, err := ParseSize(in); err == nil {
			t.Errorf("%q is taken as %d", in, got)
		}
	}
	for in, want := range map[Size]string{8 << 20: "8MiB", 1536: "1536", 1 << 30: "1GiB", 0: "0", 8e6: "8000000", -1: "-1"} {
		if got := in.String(); got != want {
			t.Errorf("%d prints as %s, want %s", int64(in), got, want)
		}
		if back, err := ParseSize(in.String()); err != nil || back != in {
			t.Errorf("%s does not read back: %d, %v", in, back, err)
		}
	}
}

func TestDurations(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"10s": 10 * time.Second, "500ms": 500 * time.Millisecond, "7d": 168 * time.Hour, "1d12h": 36 * time.Hour, "0": 0, "0s": 0, "1h30m": 90 * time.Minute, "-5s": -5 * time.Second,
	} {
		if got, err := ParseDuration(in); err != nil || got.Std() != want {
			t.Errorf("%q is %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "10", "-1", "1.5", "d", "7d24h", "1d-1h", "7 d", "999999999d", "10 s", "s"} {
		if got, err := ParseDuration(in); err == nil {
			t.Errorf("%q is taken as %v", in, got)
		}
	}
	for in, want := range map[time.Duration]string{time.Minute: "1m", time.Hour: "1h", 10 * time.Second: "10s", 90 * time.Minute: "1h30m", 36 * time.Hour: "1d12h", 168 * time.Hour: "7d", 5 * time.Millisecond: "5ms", 0: "0s", 3601 * time.Second: "1h0m1s"} {
		if got := Duration(in).String(); got != want {
			t.Errorf("%v prints as %s, want %s", in, got, want)
		}
		if back, err := ParseDuration(want); err != nil || back.Std() != in {
			t.Errorf("%s does not read back: %v, %v", want, back, err)
		}
	}
}

func TestGlobs(t *testing.T) {
	for _, c := range []struct {
		globs         Globs
		schema, table string
		want          bool
	}{
		{Globs{"*.*"}, "public", "orders", true},
		{Globs{"*.*"}, "My Schema", "Order*Items", true},
		{Globs{"My Schema.Order*Items"}, "My Schema", "Order*Items", true},
		{Globs{`My Schema.Order\*Items`}, "My Schema", "Order*Items", true},
		{Globs{`My Schema.Order\*Items`}, "My Schema", "OrderXItems", false},
		{Globs{"My Schema.OrderItems"}, "My Schema", "Order*Items", false},
		{Globs{"public.orders"}, "public", "orders", true},
		{Globs{"public.orders"}, "public", "Orders", false},
		{Globs{"public.orders"}, "public", "orders2", false},
		{Globs{"public.orders"}, "xpublic", "orders", false},
		{Globs{"public.*"}, "public.x", "t", false},
		{Globs{"pub*"}, "public", "t", false}, // not schema.table; Validate refuses it
		{Globs{"public.a.b"}, "public", "a.b", true},
		{Globs{"public.a?c"}, "public", "aßc", true},
		{Globs{"public.a?c"}, "public", "ac", false},
		{Globs{"public.*a*b*"}, "public", "xxaxxaxb", true},
		{Globs{"public.*ab"}, "public", "aab", true},
		{Globs{"public.*ab"}, "public", "aba", false},
		{Globs{"public.*"}, "public", "", true},
		{Globs{"public.*", "!public.audit_*"}, "public", "audit_log", false},
		{Globs{"!public.audit_*", "public.*"}, "public", "audit_log", false},
		{Globs{"public.*", "!public.audit_*"}, "public", "orders", true},
		{Globs{"!public.audit_*"}, "public", "orders", false},
		{Globs{`\!x.t`}, "!x", "t", true},
		{nil, "public", "orders", false},
	} {
		if got := c.globs.Match(c.schema, c.table); got != c.want {
			t.Errorf("%q on %q.%q: %v", c.globs, c.schema, c.table, got)
		}
	}
	if err := (Globs{"*.*", "!a.b"}).Validate(); err != nil {
		t.Error(err)
	}
	if (Globs{"*.*", "x"}).Validate() == nil || (PrefixGlobs{`\`}).Validate() == nil {
		t.Error("bad patterns are taken")
	}
}

func TestPrefixGlobs(t *testing.T) {
	g := PrefixGlobs{"audit*", "x.?", "!audit.secret"}
	for prefix, want := range map[string]bool{"audit": true, "audit.log": true, "audit.secret": false, "x.1": true, "x.12": false, "": false} {
		if got := g.Match(prefix); got != want {
			t.Errorf("%q: %v", prefix, got)
		}
	}
}

func TestMatchingAllocatesNothing(t *testing.T) {
	g := Globs{"public.*a*b", "!public.audit_*"}
	if n := testing.AllocsPerRun(100, func() { g.Match("public", "xxaxxbxxb") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A pattern of many stars must not take exponential time.
func FuzzGlobAgreesWithRecursion(f *testing.F) {
	f.Add("*a*b?", "xaybz")
	f.Add(`\*?`, "*ä")
	f.Fuzz(func(t *testing.T, pattern, s string) {
		if len(pattern) > 8 || len(s) > 12 {
			return
		}
		if got, want := globMatch(pattern, s), slowMatch(pattern, s); got != want {
			t.Errorf("%q on %q: %v, want %v", pattern, s, got, want)
		}
	})
}

// slowMatch is the definition, written down.
func slowMatch(pattern, s string) bool {
	if pattern == "" {
		return s == ""
	}
	if pattern[0] == '*' {
		for i := range s {
			if slowMatch(pattern[1:], s[i:]) {
				return true
			}
		}
		return slowMatch(pattern[1:], "")
	}
	if s == "" {
		return false
	}
	n, width := globStep(pattern, s)
	return n > 0 && slowMatch(pattern[n:], s[width:])
}
