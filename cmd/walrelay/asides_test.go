package main

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rs/zerolog"
)

func TestDeadLettersAreSaidOnceAMinuteOfEachKind(t *testing.T) {
	var out bytes.Buffer
	l := newAsideLog(zerolog.New(&out))
	now := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	l.now = func() time.Time { return now }
	l.note("public.a", "route", "p1")
	l.note("public.a", "route", "p2")
	l.note("public.a", "oversize", "p3")
	l.note("public.b", "route", "")
	now = now.Add(asideInterval - time.Second)
	l.note("public.a", "route", "p4")
	now = now.Add(time.Second)
	l.note("public.a", "route", "p5")
	l.note("public.a", "route", "p6")
	type line struct {
		Level, Table, Reason, Position string
		Count                          int
	}
	var got []line
	for d := json.NewDecoder(&out); d.More(); {
		var x line
		if err := d.Decode(&x); err != nil {
			t.Fatal(err)
		}
		got = append(got, x)
	}
	want := []line{
		{"warn", "public.a", "route", "p1", 1}, {"warn", "public.a", "oversize", "p3", 1}, {"warn", "public.b", "route", "", 1},
		{"warn", "public.a", "route", "p5", 3},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}
