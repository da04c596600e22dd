package checkpoint

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// KeyRequest begins the key of a request record; the request's ID follows.
const KeyRequest = "request/"

// RequestKey gives the key of the record of the request id.
func RequestKey(id string) string { return KeyRequest + id }

// RequestID takes the ID out of a record's key; false for records of another kind.
func RequestID(key []byte) (id string, ok bool) {
	return strings.CutPrefix(string(key), KeyRequest)
}

// NewRequestID makes an ID for a request of that moment: sorted as text IDs are in the
// order of time, to the millisecond, and 30 random bits tell apart those of the same.
func NewRequestID(now time.Time) string {
	return now.UTC().Format("20060102-150405.000-") + strings.ToLower(rand.Text()[:6])
}

// EncodeRequest appends the value of the request's record to dst; its ID is in the key.
//
//	| field   | JSON            | meaning                                      |
//	| ------- | --------------- | -------------------------------------------- |
//	| version | "major.minor"   | of the format                                |
//	| tables  | [text]          | Request.Tables, at least one                 |
//	| where   | text, absent    | Request.Where                                |
//	| replace | true, absent    | Request.Replace                              |
//	| at_us   | integer, absent | Request.At, microseconds since 1970, UTC     |
func EncodeRequest(dst []byte, r *Request) []byte {
	dst = append(dst, `{"version":"`+formatVersion+`",`...)
	dst = appendRequest(dst, r)
	return append(dst, '}')
}

// appendRequest appends the fields of r without its ID and without braces.
func appendRequest(dst []byte, r *Request) []byte {
	dst = append(dst, `"tables":`...)
	dst = appendKey(dst, r.Tables)
	if r.Where != "" {
		dst = append(dst, `,"where":`...)
		dst = appendText(dst, r.Where)
	}
	if r.Replace {
		dst = append(dst, `,"replace":true`...)
	}
	if !r.At.IsZero() {
		dst = append(dst, `,"at_us":`...)
		dst = strconv.AppendInt(dst, r.At.UnixMicro(), 10)
	}
	return dst
}

type requestRecord struct {
	ID      *jsonText `json:"id"` // only within a table's progress
	Tables  jsonKey   `json:"tables"`
	Where   jsonText  `json:"where"`
	Replace bool      `json:"replace"`
	AtUS    *int64    `json:"at_us"`
}

// DecodeRequest reads what EncodeRequest wrote for the request id. A record of a newer
// major version is a *VersionError.
func DecodeRequest(id string, data []byte) (Request, error) {
	var r requestRecord
	kind := RequestKey(id)
	if err := decode(kind, data, &r); err != nil {
		return Request{}, err
	}
	req, err := r.request(id)
	if err != nil {
		return Request{}, damaged(kind, err)
	}
	return *req, nil
}

func (r *requestRecord) request(id string) (*Request, error) {
	req := &Request{ID: id, Tables: r.Tables.key(), Where: string(r.Where), Replace: r.Replace, At: timeOf(r.AtUS)}
	return req, req.Check()
}

// Check tells whether r can be written: it has an ID and names tables.
func (r *Request) Check() error {
	if r.ID == "" {
		return errors.New("request has no ID")
	}
	if len(r.Tables) == 0 {
		return fmt.Errorf("request %s names no table", r.ID)
	}
	return nil
}
