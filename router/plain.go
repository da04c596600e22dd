package router

import (
	"fmt"
	"strconv"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/router/format"
)

// plainShape is `types: plain` in its envelope.
type plainShape struct {
	toast  []byte // the marker as JSON; nil: unchanged TOAST values are left out
	origin []byte // `"connector":"walrelay","name":…,"db":…`

	txn      checkpoint.LSN // whose fragments are cached
	tsMillis []byte         // `,"ts_ms":…,"source":{`
	txnPart  []byte         // `,"tx_id":…,"commit_lsn":"…"`

	read       replication.ReadPoint // whose fragments are cached
	readMillis []byte                // as tsMillis; empty before the first
	readPart   []byte                // `,"tx_id":null,"commit_lsn":"…","lsn":null,…}}`, to the end
}

func newPlainShape(o Options) (*plainShape, error) {
	s := new(plainShape)
	var err error
	if s.origin, err = format.AppendString(append(s.origin, `"connector":"walrelay","name":`...), []byte(o.Name)); err != nil {
		return nil, fmt.Errorf("encode name: %w", err)
	}
	if s.origin, err = format.AppendString(append(s.origin, `,"db":`...), []byte(o.Database)); err != nil {
		return nil, fmt.Errorf("encode the database's name: %w", err)
	}
	if o.ToastMarker != nil {
		if s.toast, err = format.AppendString(nil, []byte(*o.ToastMarker)); err != nil {
			return nil, fmt.Errorf("encode toast-marker: %w", err)
		}
	}
	return s, nil
}

func (s *plainShape) column(c replication.Column, t *format.Type, enc *format.Encoder) columnPlan {
	return columnPlan{name: format.QuoteName(c.Name), append: enc.Plain(t), unavailable: s.toast}
}

func (s *plainShape) plan(p *tablePlan, _ []*format.Type) error {
	p.source = append(p.source, s.origin...)
	var err error
	p.source, err = appendTable(append(p.source, ','), p.rel)
	return err
}

// appendTable appends `"schema":…,"table":…`.
func appendTable(dst []byte, rel *replication.Relation) ([]byte, error) {
	dst, err := format.AppendString(append(dst, `"schema":`...), []byte(rel.Schema))
	if err != nil {
		return dst, err
	}
	return format.AppendString(append(dst, `,"table":`...), []byte(rel.Name))
}

func (s *plainShape) beginTxn(t *replication.Transaction) {
	if s.txn == t.CommitLSN {
		return
	}
	s.txn = t.CommitLSN
	s.tsMillis = append(s.tsMillis[:0], `,"ts_ms":`...)
	s.tsMillis = strconv.AppendInt(s.tsMillis, t.CommitTime.UnixMilli(), 10)
	s.tsMillis = append(s.tsMillis, `,"source":{`...)
	s.txnPart = append(s.txnPart[:0], `,"tx_id":`...)
	s.txnPart = strconv.AppendUint(s.txnPart, uint64(t.XID), 10)
	s.txnPart = append(s.txnPart, `,"commit_lsn":"`...)
	s.txnPart = t.CommitLSN.Append(s.txnPart)
	s.txnPart = append(s.txnPart, `"`...)
}

func (s *plainShape) beginRead(at *replication.ReadPoint) {
	if s.read == *at && len(s.readMillis) > 0 {
		return
	}
	s.read = *at
	s.readMillis = append(s.readMillis[:0], `,"ts_ms":`...)
	s.readMillis = strconv.AppendInt(s.readMillis, at.Time.UnixMilli(), 10)
	s.readMillis = append(s.readMillis, `,"source":{`...)
	s.readPart = append(s.readPart[:0], `,"tx_id":null,"commit_lsn":"`...)
	s.readPart = at.CommitLSN.Append(s.readPart)
	s.readPart = append(s.readPart, `","lsn":null,"seq":null,"snapshot":true}}`...)
}

func (s *plainShape) appendRow(dst []byte, p *tablePlan, c *replication.Change, w *rowRecord) ([]byte, error) {
	dst = append(dst, `{"before":`...)
	dst, err := p.appendRow(dst, w.before, nil, w.beforeIsKey)
	if err != nil {
		return dst, err
	}
	dst = append(dst, `,"after":`...)
	if dst, err = p.appendRow(dst, w.after, w.fill, false); err != nil {
		return dst, err
	}
	return s.appendSource(dst, p, c, w.op), nil
}

func (s *plainShape) appendTruncate(dst []byte, p *tablePlan, c *replication.Change) []byte {
	dst = append(dst, `{"before":null,"after":null`...)
	return s.appendSource(dst, p, c, replication.OpTruncate)
}

// appendSource appends everything behind the rows.
func (s *plainShape) appendSource(dst []byte, p *tablePlan, c *replication.Change, op replication.Op) []byte {
	dst = append(dst, `,"op":"`...)
	dst = append(dst, byte(op), '"')
	if c.Read != nil {
		dst = append(dst, s.readMillis...)
		dst = append(dst, p.source...)
		return append(dst, s.readPart...)
	}
	dst = append(dst, s.tsMillis...)
	dst = append(dst, p.source...)
	dst = append(dst, s.txnPart...)
	return appendChange(dst, c)
}

func appendChange(dst []byte, c *replication.Change) []byte {
	dst = append(dst, `,"lsn":"`...)
	dst = c.LSN.Append(dst)
	dst = append(dst, `","seq":`...)
	dst = strconv.AppendUint(dst, c.Seq, 10)
	return append(dst, `,"snapshot":false}}`...)
}

func (s *plainShape) appendMessageKey(dst []byte, c *replication.Change) ([]byte, error) {
	return appendPrefix(dst, c)
}

func (s *plainShape) appendMessage(dst []byte, c *replication.Change) ([]byte, error) {
	dst = append(dst, `{"message":`...)
	dst, err := appendPrefix(dst, c)
	if err != nil {
		return dst, err
	}
	dst = dst[:len(dst)-1] // up to the closing brace
	dst = append(dst, `,"transactional":`...)
	dst = strconv.AppendBool(dst, c.Message.Transactional)
	dst = append(dst, `,"content":`...)
	dst = format.AppendBase64(dst, c.Message.Content)
	dst = append(dst, `},"op":"m"`...)
	if c.Txn != nil {
		dst = append(dst, s.tsMillis...)
	} else {
		dst = append(dst, `,"ts_ms":null,"source":{`...)
	}
	dst = append(dst, s.origin...)
	dst = append(dst, `,"schema":null,"table":null`...)
	if c.Txn != nil {
		dst = append(dst, s.txnPart...)
	} else {
		commit := messageCommit(c)
		dst = append(dst, `,"tx_id":null,"commit_lsn":"`...)
		dst = commit.Append(dst)
		dst = append(dst, '"')
	}
	return appendChange(dst, c), nil
}
