package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// LSN is a log sequence number: a byte position in PostgreSQL's write-ahead log
// (PostgreSQL documentation, "WAL Internals"). The zero LSN is invalid and
// stands for "none".
type LSN uint64

// ParseLSN reads PostgreSQL's text form X/Y, two hexadecimal numbers of at most
// eight digits each.
func ParseLSN(s string) (LSN, error) {
	hi, lo, ok := strings.Cut(s, "/")
	if !ok {
		return 0, fmt.Errorf("parse LSN %q: want X/Y, for example 16/B374D848", s)
	}
	h, errH := strconv.ParseUint(hi, 16, 32)
	l, errL := strconv.ParseUint(lo, 16, 32)
	if err := errors.Join(errH, errL); err != nil {
		return 0, fmt.Errorf("parse LSN %q: want X/Y with two hexadecimal numbers of up to 8 digits", s)
	}
	return LSN(h<<32 | l), nil
}

// String gives PostgreSQL's text form X/Y.
func (l LSN) String() string { return string(l.Append(make([]byte, 0, 17))) }

// Append appends the text form X/Y to dst without allocating.
func (l LSN) Append(dst []byte) []byte {
	dst = appendUpperHex(dst, uint32(l>>32))
	dst = append(dst, '/')
	return appendUpperHex(dst, uint32(l))
}

// IsZero tells whether l is the invalid LSN.
func (l LSN) IsZero() bool { return l == 0 }

// Compare orders LSNs; it returns -1, 0 or 1 as cmp.Compare does.
func (l LSN) Compare(o LSN) int { return cmp.Compare(l, o) }

const upperHex = "0123456789ABCDEF"

func appendUpperHex(dst []byte, v uint32) []byte {
	if v == 0 {
		return append(dst, '0')
	}
	var buf [8]byte
	i := len(buf)
	for ; v > 0; v >>= 4 {
		i--
		buf[i] = upperHex[v&0xf]
	}
	return append(dst, buf[i:]...)
}

// XID is a transaction id widened to 64 bits with its epoch, PostgreSQL's xid8:
// unlike the 32 bits on the wire it never wraps around.
type XID uint64

// String gives the decimal form, as PostgreSQL prints an xid8.
func (x XID) String() string { return strconv.FormatUint(uint64(x), 10) }

// IsZero tells whether x is the invalid transaction id.
func (x XID) IsZero() bool { return x == 0 }
