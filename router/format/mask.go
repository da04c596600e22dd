package format

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"unicode/utf8"
)

// MaskKind is what a Mask puts in a value's place.
type MaskKind uint8

// The kinds of masks. NULL stays NULL under all of them.
const (
	MaskNull     MaskKind = iota + 1 // NULL
	MaskFixed                        // Text
	MaskTruncate                     // the first Length characters of the value's text
	MaskSHA256                       // SHA-256 of the value's text, in lower-case hexadecimal digits
	MaskHMAC                         // HMAC-SHA-256 of the value's text under Salt, likewise
)

// Mask says what stands in the place of a column's values. It works on PostgreSQL's text
// of them, whatever their type is, and what it gives is a text.
type Mask struct {
	Kind   MaskKind
	Text   string
	Length int    // characters, not bytes
	Salt   []byte // a secret
}

// KeepsApart tells whether values that differ still do when they are masked, so that a
// key may be.
func (m Mask) KeepsApart() bool { return m.Kind == MaskSHA256 || m.Kind == MaskHMAC }

// String names the mask as the configuration does, without what is secret.
func (m Mask) String() string {
	switch m.Kind {
	case MaskNull:
		return "null"
	case MaskFixed:
		return "fixed"
	case MaskTruncate:
		return fmt.Sprintf("truncate: %d", m.Length)
	case MaskSHA256:
		return "sha256"
	case MaskHMAC:
		return "hmac-sha256"
	}
	return "unknown"
}

// GoString is String, for %#v.
func (m Mask) GoString() string { return m.String() }

// Masker is a Mask at work. It keeps its hash between values and so belongs to one
// goroutine.
type Masker struct {
	mask  Mask
	fixed []byte // JSON; nil where it depends on the value
	text  []byte // Mask.Text, as UTF-8
	mac   hash.Hash
	sum   [sha256.Size]byte
}

// NewMasker makes a Masker.
func NewMasker(m Mask) *Masker {
	k := &Masker{mask: m}
	switch m.Kind {
	case MaskNull:
		k.fixed = []byte("null")
	case MaskFixed:
		k.text = bytes.ToValidUTF8([]byte(m.Text), []byte("\uFFFD"))
		k.fixed, _ = appendEscaped(nil, k.text)
	case MaskHMAC:
		k.mac = hmac.New(sha256.New, m.Salt)
	}
	return k
}

// Constant gives the JSON that stands for every value that is not NULL, one that is not
// known among them; nil where it depends on the value.
func (k *Masker) Constant() []byte { return k.fixed }

// AppendJSON is an Append.
func (k *Masker) AppendJSON(dst, text []byte) ([]byte, error) {
	switch k.mask.Kind {
	case MaskSHA256, MaskHMAC:
		dst = append(dst, '"')
		dst = k.appendHash(dst, text)
		return append(dst, '"'), nil
	case MaskTruncate:
		out, err := AppendString(dst, firstCharacters(text, k.mask.Length))
		if err != nil {
			return dst, invalid(nil, err)
		}
		return out, nil
	}
	return append(dst, k.fixed...), nil
}

// AppendText appends the text that stands for a value's; null tells that NULL does.
func (k *Masker) AppendText(dst, text []byte) (out []byte, null bool) {
	switch k.mask.Kind {
	case MaskSHA256, MaskHMAC:
		return k.appendHash(dst, text), false
	case MaskTruncate:
		return append(dst, firstCharacters(text, k.mask.Length)...), false
	case MaskFixed:
		return append(dst, k.text...), false
	}
	return dst, true
}

func (k *Masker) appendHash(dst, text []byte) []byte {
	if k.mac == nil {
		k.sum = sha256.Sum256(text)
		return hex.AppendEncode(dst, k.sum[:])
	}
	k.mac.Reset()
	k.mac.Write(text) // a hash takes everything
	return hex.AppendEncode(dst, k.mac.Sum(k.sum[:0]))
}

// firstCharacters is the beginning of text, n characters at the most. A byte that is not
// UTF-8 counts as one.
func firstCharacters(text []byte, n int) []byte {
	at := 0
	for ; n > 0 && at < len(text); n-- {
		_, width := utf8.DecodeRune(text[at:])
		at += width
	}
	return text[:at]
}
