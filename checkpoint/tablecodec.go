package checkpoint

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"
)

// appendTable appends the progress of one table as a JSON object. again and read stand
// for p.Again, which is not looked at: in a state record all of the keys and none, in a
// position record those that came and those that went.
//
//	| field      | JSON            | meaning                                            |
//	| ---------- | --------------- | -------------------------------------------------- |
//	| table      | text            | TableProgress.Table                                |
//	| state      | string          | TableProgress.State                                |
//	| key        | [text], absent  | TableProgress.Key                                  |
//	| ranges     | array, absent   | [{"after":[text],"to":[text]}], absent for nil     |
//	| again      | array, absent   | [[text]]                                           |
//	| again_read | array, absent   | [[text]], in a position record                     |
//	| whole      | true, absent    | TableProgress.Whole                                |
//	| beside     | true, absent    | TableProgress.Beside                               |
//	| rows       | integer         | TableProgress.Rows                                 |
//	| began_us   | integer, absent | TableProgress.Began, microseconds since 1970, UTC  |
//	| request    | object, absent  | TableProgress.Request, as in its record, with "id" |
func appendTable(dst []byte, p *TableProgress, again, read [][]string) []byte {
	dst = append(dst, `{"table":`...)
	dst = appendText(dst, p.Table)
	dst = append(dst, `,"state":`...)
	dst = appendString(dst, string(p.State))
	if p.Key != nil {
		dst = append(dst, `,"key":`...)
		dst = appendKey(dst, p.Key)
	}
	if len(p.Ranges) > 0 {
		dst = append(dst, `,"ranges":[`...)
		for i := range p.Ranges {
			dst = appendRange(dst, &p.Ranges[i], i > 0)
		}
		dst = append(dst, ']')
	}
	if len(again) > 0 {
		dst = append(dst, `,"again":`...)
		dst = appendKeys(dst, again)
	}
	if len(read) > 0 {
		dst = append(dst, `,"again_read":`...)
		dst = appendKeys(dst, read)
	}
	if p.Whole {
		dst = append(dst, `,"whole":true`...)
	}
	if p.Beside {
		dst = append(dst, `,"beside":true`...)
	}
	dst = append(dst, `,"rows":`...)
	dst = strconv.AppendInt(dst, p.Rows, 10)
	if !p.Began.IsZero() {
		dst = append(dst, `,"began_us":`...)
		dst = strconv.AppendInt(dst, p.Began.UnixMicro(), 10)
	}
	if p.Request != nil {
		dst = append(dst, `,"request":{"id":`...)
		dst = appendText(dst, p.Request.ID)
		dst = append(dst, ',')
		dst = appendRequest(dst, p.Request)
		dst = append(dst, '}')
	}
	return append(dst, '}')
}

func appendRange(dst []byte, r *Range, comma bool) []byte {
	if comma {
		dst = append(dst, ',')
	}
	dst = append(dst, '{')
	if r.After != nil {
		dst = append(dst, `"after":`...)
		dst = appendKey(dst, r.After)
	}
	if r.To != nil {
		if r.After != nil {
			dst = append(dst, ',')
		}
		dst = append(dst, `"to":`...)
		dst = appendKey(dst, r.To)
	}
	return append(dst, '}')
}

func appendKeys(dst []byte, keys [][]string) []byte {
	dst = append(dst, '[')
	for i, k := range keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendKey(dst, k)
	}
	return append(dst, ']')
}

func appendKey(dst []byte, key []string) []byte {
	dst = append(dst, '[')
	for i, v := range key {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendText(dst, v)
	}
	return append(dst, ']')
}

// appendText appends text that may be of any bytes: a JSON string where it is UTF-8,
// else {"base64":"…"}. A key that came back altered would skip rows.
func appendText(dst []byte, s string) []byte {
	if utf8.ValidString(s) {
		return appendString(dst, s)
	}
	dst = append(dst, `{"base64":"`...)
	dst = base64.StdEncoding.AppendEncode(dst, []byte(s))
	return append(dst, `"}`...)
}

// jsonText reads what appendText wrote.
type jsonText string

// UnmarshalJSON takes a string or {"base64":"…"}; null is neither.
func (t *jsonText) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		return json.Unmarshal(data, (*string)(t))
	}
	var b struct {
		Base64 *string `json:"base64"`
	}
	if len(data) > 0 && data[0] == '{' {
		if err := json.Unmarshal(data, &b); err != nil {
			return err
		}
	}
	if b.Base64 == nil {
		return fmt.Errorf(`text is %.40s, want a string or {"base64":"…"}`, bytes.ToValidUTF8(data, []byte("?")))
	}
	raw, err := base64.StdEncoding.DecodeString(*b.Base64)
	if err != nil {
		return err
	}
	*t = jsonText(raw)
	return nil
}

// jsonKey is a key; nil where it is absent.
type jsonKey []jsonText

func (k jsonKey) key() []string {
	if k == nil {
		return nil
	}
	out := make([]string, len(k))
	for i, v := range k {
		out[i] = string(v)
	}
	return out
}

type tableRecord struct {
	Table     *jsonText      `json:"table"`
	State     TableState     `json:"state"`
	Key       jsonKey        `json:"key"`
	Ranges    []rangeRecord  `json:"ranges"`
	Again     []jsonKey      `json:"again"`
	AgainRead []jsonKey      `json:"again_read"`
	Whole     bool           `json:"whole"`
	Beside    bool           `json:"beside"`
	Rows      *int64         `json:"rows"`
	BeganUS   *int64         `json:"began_us"`
	Request   *requestRecord `json:"request"`
}

type rangeRecord struct {
	After jsonKey `json:"after"`
	To    jsonKey `json:"to"`
}

// table takes the progress out of its JSON form.
func (r *tableRecord) table() (*TableDelta, error) {
	var d TableDelta
	switch r.State {
	case TableWaiting, TablePending, TableReading, TableDone:
	default:
		return nil, fmt.Errorf("state is %s", quote(string(r.State)))
	}
	if r.Table == nil || r.Rows == nil || *r.Rows < 0 {
		return nil, errors.New(`"table" or "rows" is missing`)
	}
	d.TableProgress = TableProgress{
		Table: string(*r.Table), State: r.State, Key: r.Key.key(),
		Whole: r.Whole, Beside: r.Beside, Rows: *r.Rows, Began: timeOf(r.BeganUS),
	}
	for _, x := range r.Ranges {
		d.Ranges = append(d.Ranges, Range{After: x.After.key(), To: x.To.key()})
	}
	var err error
	if d.Again, err = keysOf(r.Again); err != nil {
		return nil, err
	}
	if d.AgainRead, err = keysOf(r.AgainRead); err != nil {
		return nil, err
	}
	if r.Request != nil {
		if r.Request.ID == nil {
			return nil, errors.New(`its request has no "id"`)
		}
		if d.Request, err = r.Request.request(string(*r.Request.ID)); err != nil {
			return nil, err
		}
	}
	return &d, nil
}

func keysOf(list []jsonKey) ([][]string, error) {
	var out [][]string
	for _, k := range list {
		if k == nil {
			return nil, errors.New("a key is null")
		}
		out = append(out, k.key())
	}
	return out, nil
}

// timeOf reads microseconds since 1970; absent is the zero time.
func timeOf(us *int64) time.Time {
	if us == nil {
		return time.Time{}
	}
	return time.UnixMicro(*us).UTC()
}

// tablesOf takes tables out of their JSON form; gone tells whether null, for a table
// that was taken out, may stand there.
func tablesOf(m map[string]*tableRecord, gone bool) (map[uint32]*TableDelta, error) {
	if len(m) == 0 {
		return nil, nil
	}
	out := make(map[uint32]*TableDelta, len(m))
	for name, r := range m {
		oid, err := parseOID(name)
		if err != nil {
			return nil, err
		}
		if r == nil && gone {
			out[oid] = nil
			continue
		}
		if r == nil {
			return nil, fmt.Errorf("table %s is null", quote(name))
		}
		t, err := r.table()
		if err != nil {
			return nil, fmt.Errorf("table %s: %w", quote(name), err)
		}
		out[oid] = t
	}
	return out, nil
}
