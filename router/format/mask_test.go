package format

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

// The digests were made with sha256sum and openssl dgst -sha256 -hmac.
func TestMasks(t *testing.T) {
	for _, c := range []struct {
		name       string
		mask       Mask
		text, want string // want is the text, of NULL ""
	}{
		{"sha256", Mask{Kind: MaskSHA256}, "a@b.c", "d648b243a3e817eaa3309e00e183483f2867baadf522099f0c2121770536b25a"},
		{"sha256 of nothing", Mask{Kind: MaskSHA256}, "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
		{"hmac", Mask{Kind: MaskHMAC, Salt: []byte("pepper")}, "+49 30 123", opensslHMAC},
		{"fixed", Mask{Kind: MaskFixed, Text: "-\"\n"}, "Ada", "-\"\n"},
		{"fixed and empty", Mask{Kind: MaskFixed}, "Ada", ""},
		{"null", Mask{Kind: MaskNull}, "Berlin", ""},
		{"truncate", Mask{Kind: MaskTruncate, Length: 8}, "0123456789", "01234567"},
		{"truncate what is shorter", Mask{Kind: MaskTruncate, Length: 8}, "0123", "0123"},
		{"truncate counts characters", Mask{Kind: MaskTruncate, Length: 3}, "äß😀x", "äß😀"},
		{"truncate json", Mask{Kind: MaskTruncate, Length: 5}, `{"a": 1}`, `{"a":`},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := NewMasker(c.mask)
			for range 2 { // the hash is used again
				got, null := k.AppendText([]byte("kept"), []byte(c.text))
				text, ok := strings.CutPrefix(string(got), "kept")
				if !ok || text != c.want || null != (c.mask.Kind == MaskNull) {
					t.Errorf("text %q, null %v; want %q", got, null, c.want)
				}
				out, err := k.AppendJSON([]byte("kept"), []byte(c.text))
				if err != nil {
					t.Fatal(err)
				}
				var decoded *string
				if err := json.Unmarshal(out[len("kept"):], &decoded); err != nil {
					t.Fatalf("%s: %v", out, err)
				}
				if (decoded == nil) != null || decoded != nil && *decoded != c.want {
					t.Errorf("JSON %s, want %q", out, c.want)
				}
				if constant := k.Constant(); constant != nil && string(constant) != string(out[len("kept"):]) {
					t.Errorf("the constant is %s, the value %s", constant, out)
				}
			}
		})
	}
}

// opensslHMAC is what printf '+49 30 123' | openssl dgst -sha256 -hmac pepper prints.
const opensslHMAC = "bf2463a173879eb61ef094491720fdce93166d7438f2a497ec08c1948d4dffa9"

func TestATruncatedValueMustBeUTF8(t *testing.T) {
	out, err := NewMasker(Mask{Kind: MaskTruncate, Length: 2}).AppendJSON([]byte("kept"), []byte("a\xff"))
	if !errors.Is(err, ErrInvalidUTF8) || string(out) != "kept" {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := NewMasker(Mask{Kind: MaskTruncate, Length: 1}).AppendJSON(nil, []byte("a\xff")); err != nil || string(out) != `"a"` {
		t.Errorf("what is cut off counts: %q, %v", out, err)
	}
}

func TestAMaskPrintsWithoutItsSalt(t *testing.T) {
	m := Mask{Kind: MaskHMAC, Salt: []byte("pepper")}
	for _, s := range []string{fmt.Sprint(m), fmt.Sprintf("%+v", m), fmt.Sprintf("%#v", m), fmt.Sprintf("%v", map[string]Mask{"x": m})} {
		if strings.Contains(s, "pepper") || strings.Contains(s, "112 101") || !strings.Contains(s, "hmac-sha256") {
			t.Errorf("prints as %s", s)
		}
	}
}

func TestMaskingAllocatesNothing(t *testing.T) {
	text, dst := []byte(strings.Repeat("ä", 500)), make([]byte, 0, 4096)
	for _, m := range []Mask{{Kind: MaskNull}, {Kind: MaskFixed, Text: "-"}, {Kind: MaskTruncate, Length: 8}, {Kind: MaskSHA256}, {Kind: MaskHMAC, Salt: []byte("s")}} {
		k := NewMasker(m)
		run := func() { dst, _ = k.AppendJSON(dst[:0], text) }
		run() // HMAC saves the state of its key once
		if n := testing.AllocsPerRun(50, run); n != 0 {
			t.Errorf("%v: %v allocations", m, n)
		}
	}
}

// Whatever the value: JSON, never more characters than asked for, and nothing of a
// value that a hash or a constant stands for.
func FuzzMask(f *testing.F) {
	f.Add("äß😀x", 3, "pepper", "-")
	f.Add("a\xffb", 2, "", "\x00")
	f.Fuzz(func(t *testing.T, text string, length int, salt, fixed string) {
		for _, m := range []Mask{{Kind: MaskNull}, {Kind: MaskFixed, Text: fixed}, {Kind: MaskTruncate, Length: length}, {Kind: MaskSHA256}, {Kind: MaskHMAC, Salt: []byte(salt)}} {
			out, err := NewMasker(m).AppendJSON(nil, []byte(text))
			if err != nil {
				if utf8.ValidString(text) || m.Kind != MaskTruncate {
					t.Fatalf("%v: %v", m, err)
				}
				continue
			}
			var s *string
			if err := json.Unmarshal(out, &s); err != nil {
				t.Fatalf("%v: %q: %v", m, out, err)
			}
			switch {
			case (s == nil) != (m.Kind == MaskNull):
				t.Fatalf("%v: %q", m, out)
			case m.Kind == MaskTruncate && (!strings.HasPrefix(text, *s) || utf8.RuneCountInString(*s) > max(length, 0)):
				t.Fatalf("%v of %q: %q", m, text, *s)
			case m.KeepsApart() && len(*s) != 64:
				t.Fatalf("%v: %q", m, out)
			}
		}
	})
}
