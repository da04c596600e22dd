package snapshot

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

func quote(ident string) string { return pgx.Identifier{ident}.Sanitize() }

// expr is the column as its index orders it.
func (k keyColumn) expr() string {
	if k.Collation == nil {
		return quote(k.Name)
	}
	return quote(k.Name) + " COLLATE " + pgx.Identifier(k.Collation).Sanitize()
}

// value is a key's text as a literal. It has no type of its own, so that it takes on the
// column's: any type, without its name being known or its schema being open to our role.
func (k keyColumn) value(text string) string {
	if k.Cast == nil {
		return literal(text)
	}
	return literal(text) + "::" + pgx.Identifier(k.Cast).Sanitize()
}

// The strategies of btree (PostgreSQL documentation, "B-Tree Indexes").
const (
	strategyLess         = "1"
	strategyLessEqual    = "2"
	strategyEqual        = "3"
	strategyGreaterEqual = "4"
	strategyGreater      = "5"
)

// op is an operator of the key's index, qualified; without an index the built-in one.
func (k keyColumn) op(strategy string) string {
	if op := k.Ops[strategy]; len(op) == 2 {
		return "OPERATOR(" + quote(op[0]) + "." + op[1] + ")" // its name holds nothing but operator characters
	}
	builtin := map[string]string{strategyLess: "<", strategyLessEqual: "<=", strategyEqual: "=", strategyGreaterEqual: ">=", strategyGreater: ">"}
	return "OPERATOR(pg_catalog." + builtin[strategy] + ")"
}

// beyond is the condition of the keys behind key.
func beyond(columns []keyColumn, key []string) string {
	return compare(columns, key, strategyGreater)
}

// upTo is the condition of the keys up to key, key included.
func upTo(columns []keyColumn, key []string) string {
	return compare(columns, key, strategyLessEqual)
}

// compare compares as rows, which an index on all columns can seek by. Where the columns'
// operators live in different schemas a row comparison cannot name them, and the same is
// said column by column; the index then seeks by the first.
func compare(columns []keyColumn, key []string, strategy string) string {
	op := columns[0].op(strategy)
	same := true
	left, right := make([]string, len(columns)), make([]string, len(columns))
	for i, c := range columns {
		left[i], right[i] = c.expr(), c.value(key[i])
		same = same && c.op(strategy) == op
	}
	if len(columns) == 1 {
		return left[0] + " " + op + " " + right[0]
	}
	if same {
		return "(" + strings.Join(left, ", ") + ") " + op + " (" + strings.Join(right, ", ") + ")"
	}
	return compareEach(columns, key, strategy)
}

func compareEach(columns []keyColumn, key []string, strategy string) string {
	c, value := columns[0], columns[0].value(key[0])
	if len(columns) == 1 {
		return c.expr() + " " + c.op(strategy) + " " + value
	}
	wide, strict := strategyGreaterEqual, strategyGreater
	if strategy == strategyLessEqual {
		wide, strict = strategyLessEqual, strategyLess
	}
	return c.expr() + " " + c.op(wide) + " " + value + " AND (" + c.expr() + " " + c.op(strict) + " " + value +
		" OR " + compareEach(columns[1:], key[1:], strategy) + ")"
}

// oneOf is the condition of single keys.
func oneOf(columns []keyColumn, keys [][]string) string {
	each := make([]string, len(keys))
	for i, key := range keys {
		parts := make([]string, len(columns))
		for j, c := range columns {
			parts[j] = c.expr() + " " + c.op(strategyEqual) + " " + c.value(key[j])
		}
		each[i] = strings.Join(parts, " AND ")
	}
	return strings.Join(each, "\n OR ")
}

func orderBy(columns []keyColumn) string {
	list := make([]string, len(columns))
	for i, c := range columns {
		list[i] = c.expr()
	}
	return " ORDER BY " + strings.Join(list, ", ")
}

// where joins conditions, those that are not empty. Each ends with a line of its own, so
// that a comment at its end does not reach further.
func where(conditions ...string) string {
	var b strings.Builder
	for _, c := range conditions {
		if c == "" {
			continue
		}
		if b.Len() == 0 {
			b.WriteString(" WHERE ")
		} else {
			b.WriteString(" AND ")
		}
		b.WriteString("(" + c + "\n)")
	}
	return b.String()
}

// selectSQL reads the published columns, xmin first where it is asked for.
func (d *description) selectSQL(o *Order, condition, tail string) string {
	var list []string
	if o.Xmin {
		list = append(list, "xmin")
	}
	for _, c := range d.shape.Relation.Columns {
		list = append(list, quote(c.Name))
	}
	return "SELECT " + strings.Join(list, ", ") + " FROM " + d.table.place().from() +
		where(condition, d.filter, o.Table.Where, o.Where) + tail
}

func (d *description) rangeSQL(o *Order, limit int) string {
	var conditions []string
	if o.After != nil {
		conditions = append(conditions, beyond(d.keys, o.After))
	}
	if o.To != nil {
		conditions = append(conditions, upTo(d.keys, o.To))
	}
	tail := orderBy(d.keys)
	if limit > 0 {
		tail += " LIMIT " + strconv.Itoa(limit)
	}
	return d.selectSQL(o, strings.Join(conditions, " AND "), tail)
}

// endSQL gives the greatest key. A row that does not meet the table's conditions now may
// meet them when it is read.
func (d *description) endSQL() string {
	names, order := make([]string, len(d.keys)), make([]string, len(d.keys))
	for i, k := range d.keys {
		names[i], order[i] = quote(k.Name), k.expr()+" DESC"
	}
	return "SELECT " + strings.Join(names, ", ") + " FROM " + d.table.place().from() + " ORDER BY " + strings.Join(order, ", ") + " LIMIT 1"
}

// splitsSQL parts the table by a sample of its pages: it gives up to pieces-1 keys in
// their order, none where the sample is too small to say anything.
func (d *description) splitsSQL(o *Order, percent float64) string {
	columns := make([]string, len(d.keys))
	for i, k := range d.keys {
		columns[i] = quote(k.Name)
	}
	list := strings.Join(columns, ", ")
	return fmt.Sprintf(`SELECT %s FROM (SELECT %s, row_number() OVER (%s) AS "walrelay n", count(*) OVER () AS "walrelay of" FROM %s TABLESAMPLE SYSTEM (%s)%s) AS s
 WHERE "walrelay of" >= %d AND "walrelay n" < "walrelay of" AND "walrelay n" * %d / "walrelay of" > ("walrelay n" - 1) * %d / "walrelay of" ORDER BY "walrelay n"`,
		list, list, strings.TrimSpace(orderBy(d.keys)), d.table.place().from(), strconv.FormatFloat(percent, 'f', 8, 64),
		where(d.filter, o.Table.Where, o.Where), o.Pieces*minSample, o.Pieces, o.Pieces)
}
