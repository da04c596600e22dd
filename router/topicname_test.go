package router

import (
	"errors"
	"strings"
	"testing"
)

func TestValidTopicName(t *testing.T) {
	for _, s := range []string{"a", "shop.public.orders", "A-z_0.9", "...", strings.Repeat("x", 249)} {
		if err := ValidTopicName(s); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []string{"", ".", "..", "a b", "a/b", "é", "a\x00", "a\xff", "order:created", "__transaction_state", "__consumer_offsets", strings.Repeat("x", 250)} {
		var tn *TopicNameError
		if err := ValidTopicName(s); !errors.As(err, &tn) || tn.Name != s || len(err.Error()) > 500 {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestSanitizeTopic(t *testing.T) {
	for s, want := range map[string]string{
		"shop.public.orders": "shop.public.orders",
		"shop.public.Ordér$": "shop.public.Ord_r_",
		"a b\xffc":           "a_b_c",
		"":                   "",
	} {
		if got := SanitizeTopic(s); got != want {
			t.Errorf("%q becomes %q, want %q", s, got, want)
		}
	}
}

func TestTemplate(t *testing.T) {
	fields := map[string]string{"prefix": "shop", "schema": "public", "table": "{table}"}
	value := func(f string) string { return fields[f] }
	for text, want := range map[string]string{
		"{prefix}.{schema}.{table}": "shop.public.{table}",
		"fixed":                     "fixed",
		"":                          "",
		"x{schema}{schema}y":        "xpublicpublicy",
	} {
		tpl, err := ParseTemplate(text, "prefix", "schema", "table")
		if err != nil || tpl.Expand(value) != want {
			t.Errorf("%q: %v, want %q", text, err, want)
			continue
		}
		if tpl.Has("schema") != strings.Contains(text, "{schema}") || tpl.Has("") {
			t.Errorf("%q: Has is wrong", text)
		}
	}
	for _, text := range []string{"{", "}", "a}b{prefix}", "{prefix", "{}", "{Prefix}", "{ prefix}", "{{prefix}}", "{table"} {
		if _, err := ParseTemplate(text, "prefix", "schema"); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzSanitizeTopic(f *testing.F) {
	f.Add("shop.public.é")
	f.Fuzz(func(t *testing.T, s string) {
		got := SanitizeTopic(s)
		if got == "" || got == "." || got == ".." || len(got) > maxTopicName {
			return
		}
		if err := ValidTopicName(got); err != nil {
			t.Fatal(err)
		}
		if ValidTopicName(s) == nil && s != got {
			t.Fatalf("%q is valid and becomes %q", s, got)
		}
	})
}
