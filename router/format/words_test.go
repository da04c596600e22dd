package format

import (
	"encoding/json"
	"errors"
	"testing"
	"unicode/utf8"
)

// Whatever stands beside whatever within a word: the standard library reads the same
// text back, and bytes that are not UTF-8 leave nothing behind.
func FuzzString(f *testing.F) {
	for _, s := range []string{`{"a": "b\\c", "d": [1, "e"]}`, "\"\"\"\"\"\"\"\"\"\"", "a\"\x01b\\é\"", "\xff\"aaaaaaaa", `\\\\\\\\\\\\\\\\`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, s []byte) {
		got, err := AppendString([]byte("x"), s)
		if !utf8.Valid(s) {
			if !errors.Is(err, ErrInvalidUTF8) || string(got) != "x" {
				t.Fatalf("%q: %q, %v", s, got, err)
			}
			return
		}
		var back string
		if err != nil || json.Unmarshal(got[1:], &back) != nil || back != string(s) {
			t.Fatalf("%q: %q, %v", s, got, err)
		}
	})
}

// A byte in the place of another in a timestamp is seen wherever it stands, and the words
// give the numbers that the digits give.
func TestTimestampsAreCheckedByteByByte(t *testing.T) {
	const good = "2026-12-01 05:54:20"
	isDigit := func(c byte) bool { return c >= '0' && c <= '9' }
	for at := range len(good) {
		for c := range 256 {
			s := []byte(good)
			s[at] = byte(c)
			want := isDigit(good[at]) && isDigit(byte(c)) || good[at] == byte(c)
			_, end := scanTimestamp(s)
			if got := end == len(good); got != want {
				t.Errorf("scanTimestamp(%q) = %d", s, end)
			}
			if n := scanDate(s); (n == len("YYYY-MM-DD")) != (want || at >= len("YYYY-MM-DD")) {
				t.Errorf("scanDate(%q) = %d", s, n)
			}
			clock, n := parseClock(s[len("YYYY-MM-DD "):])
			if (n == len("HH:MM:SS")) != (want || at < len("YYYY-MM-DD ")) {
				t.Errorf("parseClock(%q) = %d", s, n)
			}
			number := func(i int) int64 { return int64(s[i]-'0')*10 + int64(s[i+1]-'0') }
			if n > 0 && clock != (number(11)*3600+number(14)*60+number(17))*microsPerSecond {
				t.Errorf("parseClock(%q) = %d", s, clock)
			}
		}
	}
}
