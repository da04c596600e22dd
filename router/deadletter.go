package router

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"unicode/utf8"

	"github.com/walrelay/walrelay/replication"
)

// deadLetter is what the dead-letter topic is told about a change that could not be
// delivered.
type deadLetter struct {
	Reason string // one of the Reason constants; header "reason" has it too
	Error  string // what went wrong, for people
	// Table is schema.table, "" for a logical message.
	Table string
	// Position is the value of the header "position" (checkpoint.AppendHeader).
	Position []byte
	// Change is the change itself. It is only read.
	Change *replication.Change
	// Text shows a message's content as text, which an event's is meant to be.
	Text bool
	// Columns are the plans of its columns, for what is masked and left out; nil for
	// nothing.
	Columns []columnPlan
}

// minDeadLetterLimit is the smallest limit that appendDeadLetter keeps to. No topic
// that takes records at all has a smaller max.message.bytes in practice, and below
// it there would be no room to say which change it was.
const minDeadLetterLimit = 1024

// appendDeadLetter appends the dead letter's value to dst: one JSON object of at
// most limit bytes, whatever the row holds (limits below minDeadLetterLimit count as
// that).
//
//	{"reason":"oversize","error":"…","table":"public.t","position":"…","op":"c",
//	 "row":{"id":"2","v":"c4ca4238…"},
//	 "truncated":true,"cut":[{"in":"row","name":"v","size":2097152,"sha256":"…"}]}
//
// row holds each column's text as PostgreSQL sent it, or null; of a delete, the old
// row. An update has also old, where PostgreSQL sent it. An unchanged TOAST value is
// not in the WAL and so not here. Columns that are excluded are not here either, and
// masked ones have what stands for their values. A logical message has table null and, in
// place of row, message {prefix, transactional, content}, the content in base64, or text
// where it was to be an event.
//
// What does not fit:
//
//  1. Values are cut to their beginning, the longest first, at a character's end.
//     Each cut one is named in cut with its whole size in bytes and their SHA-256,
//     and truncated is true.
//  2. When even that does not fit (1,600 columns), the last columns are left out
//     and their number is omitted_columns.
//
// What is not UTF-8: each such byte stands as \xHH, in the error too. A value with
// such bytes has its backslashes doubled and is named in escaped, so that it can be
// restored and cannot be mistaken for a value that holds the text \xHH.
//
// whole tells that nothing of the row is missing.
func appendDeadLetter(dst []byte, d *deadLetter, limit int) (out []byte, whole bool) {
	limit = max(limit, minDeadLetterLimit)
	head, headCut := d.appendHead(nil, max(minDeadError, min(limit/4, maxDeadError)))
	l := deadLetterLayout{head: head, items: d.items(), headCut: headCut}
	l.kept = len(l.items)
	l.fit(limit)
	whole = l.kept == len(l.items)
	for i := range l.items {
		whole = whole && !l.items[i].isCut(l.most)
	}
	return l.appendTo(dst), whole
}

// The largest encoded sizes of what stands before the row. Together with the JSON
// around them they stay below minDeadLetterLimit, so that a letter without any
// column always fits.
const (
	maxDeadReason   = 32
	minDeadError    = 400
	maxDeadError    = 4096 // where a quarter of the limit is as much
	maxDeadTable    = 200
	maxDeadPosition = 48
)

// appendHead appends everything before the row, the opening brace included, and
// tells whether something of it was cut. The error takes at most mostError bytes.
func (d *deadLetter) appendHead(dst []byte, mostError int) (out []byte, cut bool) {
	field := func(name, text string, most int) {
		dst = append(dst, name...)
		var c bool
		dst, c = appendDeadString(dst, []byte(text), false, most)
		cut = cut || c
	}
	field(`{"reason":`, d.Reason, maxDeadReason)
	field(`,"error":`, d.Error, mostError)
	if d.Table == "" {
		dst = append(dst, `,"table":null`...)
	} else {
		field(`,"table":`, d.Table, maxDeadTable)
	}
	if len(d.Position) == 0 {
		dst = append(dst, `,"position":null`...)
	} else {
		field(`,"position":`, string(d.Position), maxDeadPosition)
	}
	dst = append(dst, `,"op":"`...)
	dst = append(dst, byte(d.Change.Op), '"')
	return dst, cut
}

// deadItem is one value of the row, of the old row or of the message.
type deadItem struct {
	section string // "row", "old" or "message"
	name    []byte // encoded, with its quotes and the colon
	null    bool
	plain   bool // value is JSON already (transactional)
	base64  bool
	escape  bool // holds bytes that are not UTF-8
	value   []byte
	size    int // of value as JSON, uncut and without quotes
}

// items lists the values in the order in which they are written.
func (d *deadLetter) items() []deadItem {
	c := d.Change
	if c.Op == replication.OpMessage {
		transactional := "false"
		if c.Message.Transactional {
			transactional = "true"
		}
		prefix := newDeadItem("message", "prefix", []byte(c.Message.Prefix))
		kind := deadItem{section: "message", name: []byte(`"transactional":`), plain: true, value: []byte(transactional), size: len(transactional)}
		if d.Text {
			return []deadItem{prefix, kind, newDeadItem("message", "text", c.Message.Content)}
		}
		return []deadItem{
			prefix,
			kind,
			{section: "message", name: []byte(`"content":`), base64: true, value: c.Message.Content, size: base64.StdEncoding.EncodedLen(len(c.Message.Content))},
		}
	}
	var items []deadItem
	add := func(section string, row replication.Tuple, keyOnly bool) {
		for i, v := range row {
			// A row that does not match its relation may be why this is a dead letter.
			name := "column " + strconv.Itoa(i+1)
			if c.Relation != nil && i < len(c.Relation.Columns) {
				name = c.Relation.Columns[i].Name
				if keyOnly && !c.Relation.Columns[i].Identity {
					continue
				}
			}
			text, null := v.Text, v.Kind == replication.ValueNull
			if i < len(d.Columns) {
				if d.Columns[i].excluded {
					continue
				}
				if mask := d.Columns[i].mask; mask != nil && v.Kind == replication.ValueText {
					text, null = mask.AppendText(nil, v.Text)
				}
			}
			switch {
			case v.Kind == replication.ValueUnchanged:
			case !null:
				items = append(items, newDeadItem(section, name, text))
			default:
				it := newDeadItem(section, name, nil)
				it.null, it.size = true, len("null")
				items = append(items, it)
			}
		}
	}
	if len(c.New) > 0 {
		add("row", c.New, false)
		add("old", c.Old, c.OldIsKey)
	} else {
		add("row", c.Old, c.OldIsKey)
	}
	return items
}

// newDeadItem measures a text value without encoding it.
func newDeadItem(section, name string, value []byte) deadItem {
	key, _ := appendDeadString(nil, []byte(name), false, -1)
	it := deadItem{section: section, name: append(key, ':'), value: value, escape: !utf8.Valid(value)}
	it.size = deadStringSize(value, it.escape)
	return it
}

// isCut tells whether the item is cut where most bytes are allowed for a value.
func (it *deadItem) isCut(most int) bool {
	return !it.null && !it.plain && it.size > most
}

// deadLetterLayout is how much of the row a dead letter takes: kept items, each
// value of at most most bytes.
type deadLetterLayout struct {
	head    []byte
	headCut bool
	items   []deadItem
	kept    int
	most    int
}

// fit chooses kept and most so that the letter has at most limit bytes.
//
// The size does not fall steadily with most, since each cut value is also named in
// cut. So every choice is measured, and only one that fits is taken: halving finds
// one, and a binary search above it makes use of the room.
func (l *deadLetterLayout) fit(limit int) {
	l.most = 0
	for i := range l.items {
		l.most = max(l.most, l.items[i].size)
	}
	if l.size() <= limit {
		return
	}
	tooMuch := min(l.most, limit) + 1
	for l.most = tooMuch / 2; l.size() > limit; l.most /= 2 {
		if l.most == 0 {
			l.dropColumns(limit)
			return
		}
		tooMuch = l.most
	}
	fits := l.most
	for fits+1 < tooMuch {
		l.most = (fits + tooMuch) / 2
		if l.size() <= limit {
			fits = l.most
		} else {
			tooMuch = l.most
		}
	}
	l.most = fits
}

// dropColumns keeps as many leading columns as fit with their values cut short.
func (l *deadLetterLayout) dropColumns(limit int) {
	const short = 32 // enough to recognise a key by
	l.most = short
	fits, tooMany := 0, l.kept
	for fits+1 < tooMany {
		l.kept = (fits + tooMany) / 2
		if l.size() <= limit {
			fits = l.kept
		} else {
			tooMany = l.kept
		}
	}
	l.kept = fits
}

// size bounds the letter's size from above, without building it.
func (l *deadLetterLayout) size() int {
	const (
		sections = len(`,"message":null,"row":{},"old":{}`)
		tail     = len(`,"truncated":true,"cut":[],"escaped":[],"omitted_columns":1234567890}`)
		value    = len(`"",`)
		cut      = len(`{"in":"message","name":,"size":1234567890123456789,"sha256":""},`) + 2*sha256.Size
		escaped  = len(`{"in":"message","name":},`)
	)
	n := len(l.head) + sections + tail
	for i := range l.items[:l.kept] {
		it := &l.items[i]
		n += len(it.name) + value
		if it.isCut(l.most) {
			n += l.most + len(it.name) + cut
		} else {
			n += it.size
		}
		if it.escape {
			n += len(it.name) + escaped
		}
	}
	return n
}

// appendTo appends the letter as laid out.
func (l *deadLetterLayout) appendTo(dst []byte) []byte {
	dst = append(dst, l.head...)
	items := l.items[:l.kept]
	section := ""
	for i := range items {
		it := &items[i]
		if it.section != section {
			if section != "" {
				dst = append(dst, '}')
			}
			section = it.section
			dst = append(dst, `,"`...)
			dst = append(append(dst, section...), `":{`...)
		} else {
			dst = append(dst, ',')
		}
		dst = append(dst, it.name...)
		dst = it.appendValue(dst, l.most)
	}
	if section == "" {
		dst = append(dst, `,"row":null`...)
	} else {
		dst = append(dst, '}')
	}
	dst = l.appendCut(dst, items)
	dst = l.appendEscaped(dst, items)
	if n := len(l.items) - l.kept; n > 0 {
		dst = append(dst, `,"omitted_columns":`...)
		dst = strconv.AppendInt(dst, int64(n), 10)
	}
	return append(dst, '}')
}

// appendCut names the values that are cut.
func (l *deadLetterLayout) appendCut(dst []byte, items []deadItem) []byte {
	var list []byte
	for i := range items {
		it := &items[i]
		if !it.isCut(l.most) {
			continue
		}
		list = it.appendReference(list)
		list = append(list, `,"size":`...)
		list = strconv.AppendInt(list, int64(len(it.value)), 10)
		list = append(list, `,"sha256":"`...)
		sum := sha256.Sum256(it.value)
		list = hex.AppendEncode(list, sum[:])
		list = append(list, `"}`...)
	}
	if list == nil && !l.headCut && l.kept == len(l.items) {
		return dst
	}
	dst = append(dst, `,"truncated":true,"cut":[`...)
	return append(append(dst, list...), ']')
}

// appendEscaped names the values that hold bytes that are not UTF-8.
func (l *deadLetterLayout) appendEscaped(dst []byte, items []deadItem) []byte {
	var list []byte
	for i := range items {
		if items[i].escape {
			list = append(items[i].appendReference(list), '}')
		}
	}
	if list == nil {
		return dst
	}
	dst = append(dst, `,"escaped":[`...)
	return append(append(dst, list...), ']')
}

// appendReference appends the beginning of a list's object that names the item.
func (it *deadItem) appendReference(list []byte) []byte {
	if len(list) > 0 {
		list = append(list, ',')
	}
	list = append(list, `{"in":"`...)
	list = append(list, it.section...)
	list = append(list, `","name":`...)
	return append(list, it.name[:len(it.name)-1]...)
}

// appendValue appends the value as JSON, its text cut to at most most bytes.
func (it *deadItem) appendValue(dst []byte, most int) []byte {
	switch {
	case it.null:
		return append(dst, "null"...)
	case it.plain:
		return append(dst, it.value...)
	case it.base64:
		value := it.value
		if it.isCut(most) {
			value = value[:most/4*3] // whole groups, so that it decodes
		}
		dst = append(dst, '"')
		dst = base64.StdEncoding.AppendEncode(dst, value)
		return append(dst, '"')
	}
	if !it.isCut(most) {
		most = -1
	}
	dst, _ = appendDeadString(dst, it.value, it.escape, most)
	return dst
}

// appendDeadString appends text as a JSON string whose inside has at most most
// bytes (most < 0: any number), and tells whether it was cut. Bytes that are not
// UTF-8 become \xHH; escape doubles the backslashes of the text.
func appendDeadString(dst, text []byte, escape bool, most int) (out []byte, cut bool) {
	dst = append(dst, '"')
	start := len(dst)
	for len(text) > 0 {
		before := len(dst)
		var n int
		dst, n = appendDeadRune(dst, text, escape)
		if most >= 0 && len(dst)-start > most {
			return append(dst[:before], '"'), true
		}
		text = text[n:]
	}
	return append(dst, '"'), false
}

// deadStringSize gives the bytes that appendDeadString writes between the quotes.
func deadStringSize(text []byte, escape bool) int {
	var buf [16]byte
	size := 0
	for len(text) > 0 {
		if c := text[0]; c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\' {
			size++
			text = text[1:]
			continue
		}
		out, n := appendDeadRune(buf[:0], text, escape)
		size += len(out)
		text = text[n:]
	}
	return size
}

// appendDeadRune appends the first character of text as it stands inside a JSON
// string, and gives its length in text.
func appendDeadRune(dst, text []byte, escape bool) (out []byte, n int) {
	const digits = "0123456789abcdef"
	switch c := text[0]; {
	case c == '\\' && escape:
		return append(dst, `\\\\`...), 1
	case c == '"', c == '\\':
		return append(dst, '\\', c), 1
	case c == '\n':
		return append(dst, '\\', 'n'), 1
	case c < ' ':
		return append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15]), 1
	case c < utf8.RuneSelf:
		return append(dst, c), 1
	}
	if r, n := utf8.DecodeRune(text); r != utf8.RuneError || n > 1 {
		return append(dst, text[:n]...), n
	}
	return append(dst, '\\', '\\', 'x', digits[text[0]>>4], digits[text[0]&15]), 1
}
