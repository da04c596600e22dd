package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Line is one line on a process's standard error. Fields are those of a zerolog JSON line, nil if it is none; numbers
// are json.Number, so that an LSN or an xid keeps all its digits.
type Line struct {
	Raw    string
	Fields map[string]any
}

// Message is the line's message.
func (l Line) Message() string { return l.Field("message") }

// Level is the line's level, such as info.
func (l Line) Level() string { return l.Field("level") }

// Field is a field as text; empty if the line does not have it.
func (l Line) Field(name string) string {
	value, ok := l.Fields[name]
	if !ok {
		return ""
	}
	return fmt.Sprint(value)
}

// Matches says whether all the matches hold.
func (l Line) Matches(matches ...Match) bool {
	return !slices.ContainsFunc(matches, func(m Match) bool { return !m(l) })
}

// Match is a condition on a line.
type Match func(Line) bool

// Text matches a line that contains a string, anywhere.
func Text(substring string) Match {
	return func(l Line) bool { return strings.Contains(l.Raw, substring) }
}

// Message matches a line whose message contains a string.
func Message(substring string) Match {
	return func(l Line) bool { return l.Fields != nil && strings.Contains(l.Message(), substring) }
}

// Field matches a line whose field has this value, compared as text.
func Field(name string, value any) Match {
	return func(l Line) bool {
		_, ok := l.Fields[name]
		return ok && l.Field(name) == fmt.Sprint(value)
	}
}

// logBuffer is an io.Writer that parses lines and wakes who waits for more.
type logBuffer struct {
	mu      sync.Mutex
	partial []byte
	lines   []Line
	more    chan struct{} // closed and replaced when lines grew
}

func newLogBuffer() *logBuffer { return &logBuffer{more: make(chan struct{})} }

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.partial = append(b.partial, p...)
	grew := false
	for {
		line, rest, found := bytes.Cut(b.partial, []byte("\n"))
		if !found {
			break
		}
		b.lines = append(b.lines, parseLine(line))
		b.partial = append([]byte(nil), rest...)
		grew = true
	}
	if grew {
		close(b.more)
		b.more = make(chan struct{})
	}
	return len(p), nil
}

func parseLine(raw []byte) Line {
	line := Line{Raw: string(raw)}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if decoder.Decode(&line.Fields) != nil { // a panic, or a message for people
		line.Fields = nil
	}
	return line
}

// watch returns the lines so far, and a channel that is closed when there are more.
func (b *logBuffer) watch() ([]Line, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clip(b.lines), b.more
}

// snapshot returns the lines so far, an unfinished one last.
func (b *logBuffer) snapshot() []Line {
	b.mu.Lock()
	defer b.mu.Unlock()
	lines := slices.Clone(b.lines)
	if len(b.partial) > 0 {
		lines = append(lines, parseLine(b.partial))
	}
	return lines
}
