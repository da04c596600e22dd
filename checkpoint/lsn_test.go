package checkpoint

import (
	"math"
	"testing"
)

func TestParseLSNReadsWhatStringWrites(t *testing.T) {
	for s, want := range map[string]LSN{
		"0/0":               0,
		"0/1A2B3C8":         0x1A2B3C8,
		"16/B374D848":       0x16B374D848,
		"FFFFFFFF/FFFFFFFF": math.MaxUint64,
		"1/0":               1 << 32,
	} {
		got, err := ParseLSN(s)
		if err != nil || got != want {
			t.Errorf("ParseLSN(%q) = %v, %v, want %v", s, got, err, want)
		}
		if want.String() != s {
			t.Errorf("%d prints as %q, want %q", want, want.String(), s)
		}
	}
	if got, err := ParseLSN("a/0000b"); err != nil || got != 0xa_0000_000b {
		t.Errorf("lower case and leading zeros: %v, %v", got, err)
	}
}

func TestParseLSNRefusesWhatIsNone(t *testing.T) {
	for _, s := range []string{"", "/", "1", "1/", "/1", "1/2/3", "0x1/2", "+1/2", "1/-2", " 1/2", "1/2 ", "1/G", "100000000/0", "0/100000000", "1_0/0"} {
		if got, err := ParseLSN(s); err == nil {
			t.Errorf("ParseLSN(%q) = %v, want an error", s, got)
		}
	}
}

func TestLSNOrder(t *testing.T) {
	if LSN(1).Compare(2) != -1 || LSN(2).Compare(2) != 0 || LSN(math.MaxUint64).Compare(2) != 1 {
		t.Error("LSNs are not compared as unsigned numbers")
	}
	if !LSN(0).IsZero() || LSN(1).IsZero() || !XID(0).IsZero() || XID(1).IsZero() {
		t.Error("IsZero is wrong")
	}
	if XID(1<<32|5).String() != "4294967301" {
		t.Error("an XID prints in decimal")
	}
}

func FuzzParseLSN(f *testing.F) {
	for _, s := range []string{"0/0", "16/B374D848", "g/1", "FFFFFFFF/FFFFFFFF", "1/2/3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		l, err := ParseLSN(s)
		if err != nil {
			return
		}
		again, err := ParseLSN(l.String())
		if err != nil || again != l {
			t.Fatalf("%q reads as %v, which reads as %v, %v", s, l, again, err)
		}
	})
}
