package config

import (
	"fmt"
	"maps"
	"net"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Validate checks the whole configuration and returns a *Problems, or nil.
// Load and Parse have done so already; it is for a Config built in code, after
// FillNames.
func (c Config) Validate() error {
	p := &Problems{}
	c.validate(p, func(string) source { return source{} })
	return p.err()
}

// validator adds to the problems that decoding found. at tells where a value
// stands in the file.
type validator struct {
	*Problems
	table table
	at    func(path string) source
	// prefix and reserved are for the topics of events: what {prefix} stands for, and the
	// topics that are none of theirs, with what they are.
	prefix   string
	reserved map[string]string
}

func (c Config) validate(p *Problems, at func(string) source) {
	v := &validator{Problems: p, table: newTable(), at: at, prefix: c.Topics.Prefix, reserved: map[string]string{
		c.Kafka.CheckpointTopic: "the checkpoint topic, which holds only the position",
		strings.ReplaceAll(c.DeadLetter.Topic, "{prefix}", c.Topics.Prefix): "the topic of the dead letters, and of nothing else",
	}}
	v.single("", reflect.ValueOf(c))
	v.name(c)
	v.source(c)
	v.mode(c)
	for i, o := range c.Outbox {
		v.outbox(fmt.Sprintf("outbox[%d]", i), o, c.Outbox[:i])
	}
	v.topics(c)
	v.kafka(c)
	v.limits(c)
	v.admin(c)
}

// bad reports path unless it was spoken about already: the first word about a
// value is the most precise one, and the rest would only follow from it.
func (v *validator) bad(path, value, reason, remedy string) {
	if v.spokenIn(path) {
		return
	}
	at := v.at(path)
	if strings.Contains(at.text, "${") && value != masked {
		value = at.text // what the environment holds may be meant for no eyes
	}
	v.add(Problem{Path: path, Line: at.line, Value: value, Reason: reason, Remedy: remedy})
}

// single checks each value by itself against the table: mandatory, one of the
// choices, within the bounds.
func (v *validator) single(path string, val reflect.Value) {
	switch {
	case isGroup(val.Type()):
		for _, f := range fieldsOf(val) {
			v.single(join(path, f.key), f.value)
		}
		return
	case val.Type() == reflect.TypeFor[[]Outbox]():
		for i := range val.Len() {
			v.single(fmt.Sprintf("%s[%d]", path, i), val.Index(i))
		}
		return
	}
	s := v.table.at(path)
	switch {
	case s.required && isEmpty(val):
		v.bad(path, "", "is missing", mandatoryRemedy(path))
	case len(s.enum) > 0 && val.Kind() == reflect.String:
		v.choice(path, val.String(), s)
	case len(s.enum) > 0 && val.Kind() == reflect.Slice:
		for i := range val.Len() {
			v.choice(fmt.Sprintf("%s[%d]", path, i), val.Index(i).String(), s)
		}
	case s.min != "":
		v.bounds(path, val, s)
	}
}

// isEmpty tells whether a mandatory value is not there. Blanks are none.
func isEmpty(val reflect.Value) bool {
	if d, ok := val.Interface().(DSN); ok {
		return strings.TrimSpace(d.Reveal()) == ""
	}
	return val.Kind() == reflect.Slice && val.Len() == 0 || val.Kind() == reflect.String && strings.TrimSpace(val.String()) == ""
}

func mandatoryRemedy(path string) string {
	switch path {
	case "name":
		return "write for example name: shop"
	case "source.dsn":
		return "write postgres://user:${PGPASSWORD}@host:5432/database"
	case "kafka.brokers":
		return "write at least one, such as [127.0.0.1:9092]"
	}
	return "write a value"
}

func (v *validator) choice(path, val string, s spec) {
	if slices.Contains(s.enum, val) || val == "" && s.whenSet {
		return
	}
	if slices.Contains(s.later, val) {
		v.bad(path, val, "is not there in this version", "write "+strings.Join(s.enum, " or ")+", which works")
		return
	}
	remedy := "write " + orList(s.enum)
	if right, ok := closest(val, s.enum); ok && len(s.enum) > 1 {
		remedy = "did you mean " + right + "? The choices are " + orList(s.enum)
	}
	v.bad(path, quoteEmpty(val), "is not one of the choices", remedy)
}

// bounds compares in the type's own arithmetic; the table holds them as text.
func (v *validator) bounds(path string, val reflect.Value, s spec) {
	low, high := reflect.New(val.Type()).Elem(), reflect.New(val.Type()).Elem()
	if setScalar(low, s.min) != nil || setScalar(high, s.max) != nil {
		panic(fmt.Sprintf("field table: bounds of %s: %q, %q", path, s.min, s.max))
	}
	n := val.Int()
	if n >= low.Int() && n <= high.Int() {
		return
	}
	reason := fmt.Sprintf("is below %s", s.min)
	if n > high.Int() {
		reason = fmt.Sprintf("is above %s", s.max)
	}
	v.bad(path, fmt.Sprint(val.Interface()), reason, fmt.Sprintf("write a value from %s to %s", s.min, s.max))
}

// maxName keeps the longest name made of it, walrelay_NAME_insert, within
// PostgreSQL's 63 bytes for an identifier.
const maxName = 63 - len("walrelay_") - len("_insert")

// name must be usable in slot, publication, transactional id and topic names.
func (v *validator) name(c Config) {
	if c.Name == "" || regexp.MustCompile(`^[a-z0-9][a-z0-9_-]*$`).MatchString(c.Name) && len(c.Name) <= maxName {
		return
	}
	if len(c.Name) > maxName {
		v.bad("name", c.Name, fmt.Sprintf("is longer than %d characters, so that slot and publication could not be named after it", maxName), "write a shorter name")
		return
	}
	right := strings.Trim(regexp.MustCompile(`[^a-z0-9_-]+`).ReplaceAllString(strings.ToLower(c.Name), "-"), "-_")
	if right == "" {
		right = "shop"
	}
	v.bad("name", c.Name, "must be lower-case letters, digits, - and _, beginning with a letter or digit, because slot and topics are named after it", "write for example "+right)
}

func (v *validator) source(c Config) {
	s := c.Source
	if !s.DSN.IsZero() {
		if reason, remedy := s.DSN.check(); reason != "" {
			v.bad("source.dsn", masked, reason, remedy)
		}
	}
	if !s.PrimaryDSN.IsZero() {
		if reason, remedy := s.PrimaryDSN.check(); reason != "" {
			v.bad("source.primary-dsn", masked, reason, remedy)
		}
	}
	if s.Slot != "" && !regexp.MustCompile(`^[a-z0-9_]{1,63}$`).MatchString(s.Slot) && !v.spoken("name") {
		v.bad("source.slot", s.Slot, "a slot's name has 1 to 63 lower-case letters, digits and _", "write for example "+slotLike(s.Slot))
	}
	// A managed publication has a twin with a suffix; both must fit.
	room := 63
	if s.PublicationMode == PublicationManaged {
		room -= len("_insert")
	}
	if len(s.Publication) > room && !v.spoken("name") {
		v.bad("source.publication", s.Publication, fmt.Sprintf("is longer than %d bytes, what PostgreSQL leaves for it", room), "write a shorter name")
	}
	if c.Replay.RetainWAL > 0 && c.Replay.RetainTime > 0 && len(s.Slot) > 63-len("_anchor") && !v.spoken("name") {
		v.bad("source.slot", s.Slot, "is longer than 56 bytes, what PostgreSQL leaves for it with its anchor, "+s.Slot+"_anchor", "write a shorter name, or replay: {retain-wal: 0}")
	}
	const nothing = "so that nothing is captured"
	v.globs("source.tables", s.Tables, true, nothing, `"*.*"`)
	v.globs("source.messages", s.Messages, false, nothing, `"*"`)
	v.globs("snapshot.exclude", c.Snapshot.Exclude, true, "so that nothing is left out", `"*.*"`)
	if len(s.Tables) == 0 && len(s.Messages) == 0 && len(c.Outbox) == 0 {
		v.bad("source.tables", "[]", "nothing is captured: no tables, no messages and no outbox", `write for example ["public.*"]`)
	}
	for _, t := range slices.Sorted(maps.Keys(s.Keys)) {
		v.keyColumns(join("source.keys", t), t, s.Keys[t])
	}
	v.columns(c)
}

// slotLike is the nearest valid slot name.
func slotLike(s string) string {
	s = regexp.MustCompile(`[^a-z0-9_]+`).ReplaceAllString(strings.ToLower(s), "_")
	return s[:min(len(s), 63)]
}

// globs checks patterns. Where all of them exclude, effect says what that does, and all
// is the pattern to begin with.
func (v *validator) globs(path string, globs []string, tables bool, effect, all string) {
	positive := false
	for i, g := range globs {
		positive = positive || !strings.HasPrefix(g, "!")
		if err := checkGlob(g, tables); err != nil {
			reason, remedy, _ := strings.Cut(err.Error(), "; ")
			v.bad(fmt.Sprintf("%s[%d]", path, i), quoteEmpty(g), reason, remedy)
		}
	}
	if len(globs) > 0 && !positive {
		v.bad(path, "["+strings.Join(globs, ", ")+"]", "has only excluding patterns, "+effect, "add what they exclude from, such as "+all)
	}
}

func (v *validator) keyColumns(path, name string, columns []string) {
	v.tableName(path, name)
	if len(columns) == 0 {
		v.bad(path, "[]", "has no columns", "write for example [event_id]")
	}
	v.distinct(path, columns, "column")
}

// tableName checks the name of one table, written schema.table.
func (v *validator) tableName(path, name string) {
	schema, table, ok := strings.Cut(name, ".")
	switch {
	case !ok || schema == "" || table == "":
		v.bad(path, name, "is not of the form schema.table", "write for example public."+strings.Trim(name, "."))
	case strings.ContainsAny(name, `*?"`) || strings.HasPrefix(name, "!"):
		v.bad(path, name, "names one table, without patterns and SQL quotes", "write schema.table as the catalog spells it")
	}
}

// distinct reports empty and repeated elements of a list.
func (v *validator) distinct(path string, list []string, what string) {
	for i, s := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		if s == "" {
			v.bad(at, `""`, "is empty", "write the "+what+"'s name")
		} else if slices.Contains(list[:i], s) {
			v.bad(at, s, "is in the list already", "keep one of the two")
		}
	}
}

// format judges what the choices of format mean together.
func (v *validator) format(f Format) {
	if f.Debezium.Placeholder == "" {
		v.bad("format.debezium.unavailable-value-placeholder", `""`, "is empty, and could not be told from an empty text", "write for example __debezium_unavailable_value")
	}
	if f.Types == TypesDebezium && f.TOAST == TOASTMarker {
		v.bad("format.toast", f.TOAST, "does not go with types debezium, which has a placeholder for each type", "remove it, and set format.debezium.unavailable-value-placeholder if the placeholder is to be another one")
	}
	if !f.Envelope && f.Deletes == DeletesTombstone && !f.Tombstones {
		v.bad("format.tombstones", "false", "leaves nothing of a delete where envelope is false and deletes is tombstone", "write tombstones: true, or deletes: field")
	}
	if f.Envelope && f.Deletes == DeletesField {
		v.bad("format.deletes", f.Deletes, "goes with envelope: false; in an envelope op says that a row was deleted", "remove it, or write envelope: false")
	}
}

// limits checks the bounds of a batch against the transaction that carries it.
func (v *validator) limits(c Config) {
	// The transaction is open while its batch fills and is then sent and
	// committed; a batch may take half of the time to fill, not all of it.
	delay, timeout := c.Batch.MaxDelay, c.Kafka.TransactionTimeout
	if delay > timeout/2 && !v.spoken("kafka.transaction-timeout") {
		v.bad("batch.max-delay", delay.String(), fmt.Sprintf("is more than half of kafka.transaction-timeout (%s), so that the broker would abort transactions before they are sent", timeout), "write a shorter delay, such as 5ms, or a longer timeout")
	}
}

func (v *validator) admin(c Config) {
	if c.Admin.Listen == "" {
		return
	}
	if reason := hostPortProblem(c.Admin.Listen, 0); reason != "" {
		v.bad("admin.listen", c.Admin.Listen, reason, `write host:port, such as 127.0.0.1:8642, or "" to turn it off`)
	}
}

// hostPortProblem tells what is wrong with host:port; the lowest port is 0
// where the system may choose one, and then the host may be empty too.
func hostPortProblem(s string, lowest int) string {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "is not of the form host:port"
	}
	n, err := strconv.Atoi(port)
	switch {
	case err != nil || n < lowest || n > 65535:
		return fmt.Sprintf("its port is not a number from %d to 65535", lowest)
	case host == "" && lowest > 0 || strings.ContainsAny(host, "/@ "):
		return "its host is not a host's name or address"
	}
	return ""
}

// orList is "a, b or c".
func orList(list []string) string {
	if len(list) < 2 {
		return strings.Join(list, "")
	}
	return strings.Join(list[:len(list)-1], ", ") + " or " + list[len(list)-1]
}

// quoteEmpty makes the empty text visible.
func quoteEmpty(s string) string {
	if s == "" {
		return `""`
	}
	return s
}
