package demo

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/text/width"
)

// defaultWidth is the line width where the output is no terminal: wide enough
// for every record of the shop, and a log file does not mind.
const defaultWidth = 150

// ANSI sequences, used only where Screen.color is set.
const (
	ansiReset  = "\x1b[0m"
	ansiBold   = "\x1b[1m"
	ansiDim    = "\x1b[2m"
	ansiRed    = "\x1b[31m"
	ansiGreen  = "\x1b[32m"
	ansiYellow = "\x1b[33m"
	ansiCyan   = "\x1b[36m"
	ansiClear  = "\r\x1b[K" // to the line's start, and clear it
)

// Screen prints the demo's lines. Where live is set its last line is a footer,
// redrawn below whatever is printed. All methods are safe for concurrent use.
type Screen struct {
	mu     sync.Mutex
	w      io.Writer
	width  func() int
	color  bool
	live   bool
	footer string
}

// NewScreen gives a Screen on w. The function gives the terminal's columns, asked for
// each line because windows are resized; nil means that w is no terminal, and
// then there is no footer.
func NewScreen(w io.Writer, columns func() int, color bool) *Screen {
	s := &Screen{w: w, width: columns, color: color, live: columns != nil}
	if columns == nil {
		s.width = func() int { return defaultWidth }
	}
	return s
}

// Line prints one line as it is.
func (s *Screen) Line(text string) { s.print("", text) }

// Note prints a line about what the demo itself or the shop did.
func (s *Screen) Note(text string) { s.print(ansiYellow, "  ~ "+clean(text)) }

// Warn prints a line about something that must not be.
func (s *Screen) Warn(text string) { s.print(ansiBold+ansiRed, "  ! "+clean(text)) }

// Heading prints a line that stands out.
func (s *Screen) Heading(text string) { s.print(ansiBold, text) }

// Event prints a record as one line, problem (where there is one) below it.
func (s *Screen) Event(e *Event, problem string) {
	color := ""
	switch {
	case e.Kind == KindEvent:
		color = ansiBold + ansiCyan
	case e.Tombstone:
		color = ansiDim
	}
	s.print(color, FormatEvent(e, s.width()))
	if problem != "" {
		s.Warn(problem)
	}
}

// Footer replaces the last line on a terminal; elsewhere it does nothing.
func (s *Screen) Footer(text string) {
	if !s.live {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.footer = fit(text, s.width()-1) // a full last column would wrap
	fmt.Fprint(s.w, ansiClear, s.paint(ansiGreen, s.footer))
}

// EndFooter takes the footer away.
func (s *Screen) EndFooter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.footer != "" {
		_, _ = io.WriteString(s.w, ansiClear)
		s.footer = ""
	}
}

// print writes one line. An output that fails (a pipe whose reader has gone) is
// no reason to end the demo, whose summary would fail to print too.
func (s *Screen) print(color, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	if s.footer != "" {
		b.WriteString(ansiClear)
	}
	b.WriteString(s.paint(color, text))
	b.WriteByte('\n')
	if s.footer != "" {
		b.WriteString(s.paint(ansiGreen, s.footer))
	}
	_, _ = io.WriteString(s.w, b.String())
}

func (s *Screen) paint(color, text string) string {
	if !s.color || color == "" {
		return text
	}
	return color + text + ansiReset
}

// Widths of a line's columns, in terminal cells.
const (
	opWidth      = 16 // the longest event type of the shop
	keyWidth     = 10
	latencyWidth = 9
	topicWidth   = 29 // outbox.event.payment.charged and a blank
	minTopic     = 11 // order_items
	minDetail    = 24
)

// FormatEvent gives a record as one line of at most total cells: a mark for its
// kind, the topic, op or event type, key, what happened, and the time from the
// source's commit to the consumer. Where the line is narrow the topic gives way
// first, down to the table's name; then the detail.
func FormatEvent(e *Event, total int) string {
	mark, op := "  ", opName(e)
	if e.Kind == KindEvent {
		mark = "● "
	}
	latency := ""
	if !e.Committed.IsZero() {
		latency = formatLatency(e.Arrived.Sub(e.Committed))
	}
	topic := topicWidth
	fixed := 2 + opWidth + 1 + keyWidth + 1 + 1 + latencyWidth
	if rest := total - fixed - (topic + 1); rest < minDetail {
		topic = max(minTopic, topic-(minDetail-rest))
	}
	line := mark + pad(fitTopic(clean(e.Topic), topic), topic) + " "
	detail := max(0, total-fixed-(topic+1))
	line += pad(fit(op, opWidth), opWidth) + " " + pad(fit(clean(e.ShortKey()), keyWidth), keyWidth) + " "
	line += pad(fit(clean(e.Detail()), detail), detail) + " " + padLeft(latency, latencyWidth)
	return strings.TrimRight(line, " ")
}

// opName gives the operation in a word; the letter alone says little to someone
// who sees it for the first time.
func opName(e *Event) string {
	if e.Kind == KindEvent {
		return clean(e.Type)
	}
	if e.Tombstone {
		return "-"
	}
	names := map[string]string{"c": "c insert", "u": "u update", "d": "d delete", "t": "t truncate", "r": "r read", "m": "m message"}
	if n, ok := names[e.Op]; ok {
		return n
	}
	return clean(e.Op)
}

// formatLatency gives a duration in milliseconds, in seconds from ten on.
// Clocks are the same machine's, but a commit time is cut to milliseconds, so
// that nothing is negative unless somebody sets the clock.
func formatLatency(d time.Duration) string {
	if d >= 10*time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return fmt.Sprintf("%d ms", d.Milliseconds())
}

// clean makes text safe for one line of a terminal: rows hold what anybody wrote
// into them, escape sequences included.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case !unicode.IsPrint(r):
			return '·'
		}
		return r
	}, text)
}

// cells gives how many columns of a terminal text takes.
func cells(text string) int {
	n := 0
	for _, r := range text {
		n += runeCells(r)
	}
	return n
}

func runeCells(r rune) int {
	if unicode.Is(unicode.Mn, r) {
		return 0 // a combining mark
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	default:
		return 1
	}
}

// fit cuts text to n cells, with an ellipsis at its end where it was longer.
func fit(text string, n int) string {
	if cells(text) <= n {
		return text
	}
	var b strings.Builder
	used := 0
	for _, r := range text {
		if used+runeCells(r) > n-1 {
			break
		}
		used += runeCells(r)
		b.WriteRune(r)
	}
	if n > 0 {
		b.WriteString("…")
	}
	return b.String()
}

// fitTopic leaves parts out at the beginning, since of a topic the end tells more:
// shop.public.orders, public.orders, orders.
func fitTopic(topic string, n int) string {
	for cells(topic) > n {
		_, rest, ok := strings.Cut(topic, ".")
		if !ok {
			break
		}
		topic = rest
	}
	return fit(topic, n)
}

func pad(text string, n int) string {
	return text + strings.Repeat(" ", max(0, n-cells(text)))
}

func padLeft(text string, n int) string {
	return strings.Repeat(" ", max(0, n-cells(text))) + text
}
