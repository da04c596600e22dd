package cdctest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
)

// Envelope is the value of a table's or message's record.
type Envelope struct {
	Op            string
	Before, After Object // nil where the record says null
	Message       *MessageBody
	TsMs          *int64
	Source        Source
}

// Source is the envelope's block "source".
type Source struct {
	Connector string
	Name      string
	DB        string
	Schema    string
	Table     string
	TxID      *uint64 // null for snapshot rows and messages that are not transactional
	CommitLSN checkpoint.LSN
	LSN       *checkpoint.LSN
	Seq       *uint64
	Snapshot  bool
}

// MessageBody is the envelope's "message", its content decoded.
type MessageBody struct {
	Prefix        string `json:"prefix"`
	Transactional bool   `json:"transactional"`
	Content       []byte `json:"content"`
}

// Object is a JSON object with its members in order and their bytes as they stand.
type Object []Member

// Member is one member of an Object.
type Member struct {
	Name string
	Raw  json.RawMessage
}

// Get gives a member's bytes.
func (o Object) Get(name string) (json.RawMessage, bool) {
	for _, m := range o {
		if m.Name == name {
			return m.Raw, true
		}
	}
	return nil, false
}

// ParseObject reads a JSON object; null gives nil. A member that is there twice is
// an error: consumers would disagree on which one holds.
func ParseObject(raw []byte) (Object, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	tok, err := dec.Token()
	if err != nil {
		return nil, fmt.Errorf("read JSON object: %w", err)
	}
	if tok == nil {
		return nil, nil
	}
	if tok != json.Delim('{') {
		return nil, fmt.Errorf("read JSON object: found %v", tok)
	}
	o := Object{}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("read member: %w", err)
		}
		var m Member
		m.Name, _ = name.(string)
		if err := dec.Decode(&m.Raw); err != nil {
			return nil, fmt.Errorf("read member %q: %w", m.Name, err)
		}
		if _, twice := o.Get(m.Name); twice {
			return nil, fmt.Errorf("member %q is there twice", m.Name)
		}
		o = append(o, m)
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("read end of JSON object: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("text behind the JSON object")
	}
	return o, nil
}

// ParseEnvelope reads a record's value in the format json with the envelope.
func ParseEnvelope(value []byte) (*Envelope, error) {
	o, err := ParseObject(value)
	if err != nil {
		return nil, err
	}
	var wire struct {
		Op      string       `json:"op"`
		TsMs    *int64       `json:"ts_ms"`
		Message *MessageBody `json:"message"`
		Source  *struct {
			Connector string  `json:"connector"`
			Name      string  `json:"name"`
			DB        string  `json:"db"`
			Schema    string  `json:"schema"`
			Table     string  `json:"table"`
			TxID      *uint64 `json:"tx_id"`
			CommitLSN string  `json:"commit_lsn"`
			LSN       *string `json:"lsn"`
			Seq       *uint64 `json:"seq"`
			Snapshot  bool    `json:"snapshot"`
		} `json:"source"`
	}
	if err := json.Unmarshal(value, &wire); err != nil {
		return nil, fmt.Errorf("read envelope: %w", err)
	}
	if len(wire.Op) != 1 || !strings.Contains("cudrtm", wire.Op) {
		return nil, fmt.Errorf("op %q is none of c u d r t m", wire.Op)
	}
	if wire.Source == nil {
		return nil, errors.New("no source block")
	}
	s := wire.Source
	e := &Envelope{Op: wire.Op, TsMs: wire.TsMs, Message: wire.Message, Source: Source{
		Connector: s.Connector, Name: s.Name, DB: s.DB, Schema: s.Schema, Table: s.Table,
		TxID: s.TxID, Seq: s.Seq, Snapshot: s.Snapshot}}
	if e.Source.CommitLSN, err = checkpoint.ParseLSN(s.CommitLSN); err != nil {
		return nil, fmt.Errorf("source.commit_lsn: %w", err)
	}
	if s.LSN != nil {
		lsn, err := checkpoint.ParseLSN(*s.LSN)
		if err != nil {
			return nil, fmt.Errorf("source.lsn: %w", err)
		}
		e.Source.LSN = &lsn
	}
	if (wire.Op == "m") != (wire.Message != nil) {
		return nil, fmt.Errorf("op %q with message %v", wire.Op, wire.Message)
	}
	if e.Before, err = o.row("before"); err != nil {
		return nil, err
	}
	e.After, err = o.row("after")
	return e, err
}

func (o Object) row(name string) (Object, error) {
	raw, ok := o.Get(name)
	if !ok {
		return nil, nil
	}
	row, err := ParseObject(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return row, nil
}

// position is the position that the source block states.
func (s Source) position() Position {
	p := Position{Commit: s.CommitLSN, Snapshot: s.Snapshot}
	if s.Seq != nil {
		p.Seq = *s.Seq
	}
	return p
}
