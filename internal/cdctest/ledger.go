package cdctest

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/checkpoint"
)

// Ledger is a slot of the test's own, from before the first row: from it PostgreSQL tells
// which transactions were committed, and where. A commit that returned may be lost in a
// crash (synchronous_commit off), one that did not may be there.
type Ledger struct {
	dsn string
}

const (
	ledgerSlot        = "ledger"
	ledgerPublication = "ledger"
)

// OpenLedger makes the slot and its publication, in a database that has all its tables.
// Both go with the database.
func OpenLedger(ctx context.Context, dsn string) (*Ledger, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("connect to open the ledger: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, sql := range []string{
		"CREATE PUBLICATION " + ledgerPublication + " FOR ALL TABLES",
		"SELECT pg_create_logical_replication_slot('" + ledgerSlot + "_' || current_database(), 'pgoutput')",
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return nil, fmt.Errorf("open the ledger: %s: %w", sql, err)
		}
	}
	return &Ledger{dsn: dsn}, nil
}

// Settle gives each transaction of the truth its commit LSN. With crashes, transactions
// that are not in the WAL become rolled back, and so do messages; without, that is an
// error. All of the WAL is flushed first, since what is not is decoded by nobody.
func (l *Ledger) Settle(ctx context.Context, truth *Truth, crashes bool) error {
	conn, err := pgx.Connect(ctx, l.dsn)
	if err != nil {
		return fmt.Errorf("connect to read the ledger: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	// A commit that is waited for takes everything before it along, if it wrote anything.
	if _, err := conn.Exec(ctx, "SET synchronous_commit = on; CREATE TEMP TABLE flush ()"); err != nil {
		return fmt.Errorf("flush the WAL: %w", err)
	}
	// The first byte is the message's type: B is 66, M is 77.
	rows, err := conn.Query(ctx, `SELECT data FROM pg_logical_slot_get_binary_changes('`+ledgerSlot+`_' || current_database(), NULL, NULL,
 'proto_version', '1', 'publication_names', '`+ledgerPublication+`', 'messages', 'true') WHERE get_byte(data, 0) IN (66, 77)`)
	if err != nil {
		return fmt.Errorf("read the ledger: %w", err)
	}
	entries, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return fmt.Errorf("read the ledger: %w", err)
	}
	commits := map[uint32]checkpoint.LSN{}
	messages := map[Message]int{}
	for _, e := range entries {
		if e[0] == 'B' { // final LSN, time, xid
			commits[binary.BigEndian.Uint32(e[17:])] = checkpoint.LSN(binary.BigEndian.Uint64(e[1:]))
		} else if m, ok := decodeLoneMessage(e); ok {
			messages[m]++
		}
	}
	if err := settleTxns(truth, commits, crashes); err != nil {
		return err
	}
	if crashes {
		settleMessages(truth, messages)
	}
	return nil
}

// decodeLoneMessage reads a message that is not transactional: flags, LSN, prefix, content.
func decodeLoneMessage(e []byte) (Message, bool) {
	end := bytes.IndexByte(e[10:], 0)
	if e[1] != 0 || end < 0 {
		return Message{}, false
	}
	return Message{string(e[10 : 10+end]), string(e[10+end+5:])}, true
}

// settleTxns gives the transactions their commit LSNs. A transaction that a crash took
// leaves its xid to another one, so that of several with one xid the last has it.
func settleTxns(truth *Truth, commits map[uint32]checkpoint.LSN, crashes bool) error {
	last := map[uint64]*Txn{}
	for _, tx := range slices.Concat(truth.Committed, truth.RolledBack) {
		if was := last[tx.XID]; was == nil || tx.Begun > was.Begun {
			last[tx.XID] = tx
		}
	}
	var committed []*Txn
	for _, tx := range truth.Committed {
		lsn, ok := commits[uint32(tx.XID)]
		if ok && last[tx.XID] == tx {
			tx.Commit = lsn
		}
		switch {
		case tx.Commit != 0 || len(tx.Changes) == 0:
			committed = append(committed, tx)
		case crashes:
			truth.RolledBack = append(truth.RolledBack, tx)
		default:
			return fmt.Errorf("the ledger does not have transaction %d, which was committed", tx.XID)
		}
	}
	truth.Committed = committed
	return nil
}

// settleMessages makes the truth's messages those of the WAL.
func settleMessages(truth *Truth, left map[Message]int) {
	keep := func(m Message) bool {
		left[m]--
		return left[m] >= 0
	}
	truth.EarlyMessages = slices.DeleteFunc(truth.EarlyMessages, func(m Message) bool { return !keep(m) })
	truth.Messages = slices.DeleteFunc(truth.Messages, func(m Message) bool { return !keep(m) })
	for m, n := range left {
		for range n { // sent, and the connection was lost before the answer
			truth.Messages = append(truth.Messages, m)
		}
	}
}
