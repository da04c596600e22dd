package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// watch lets the parts work until ctx ends or a limit is reached, both nil, or a
// part has failed.
func (d *demo) watch(ctx context.Context) error {
	footers := time.NewTicker(footerEvery)
	defer footers.Stop()
	limit, stopLimit := after(d.Duration)
	defer stopLimit()
	kills, stopKills := every(d.KillEvery)
	defer stopKills()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-limit:
			return nil
		case <-d.client.arrived:
			if d.Events > 0 && d.totals().Records() >= d.Events {
				return nil
			}
		case <-d.Kill:
			d.kill()
		case <-kills:
			d.kill()
		case <-footers.C:
			d.Screen.Footer(footer(d.totals(), d.ledger.Count(), d.kills()))
		case <-d.shop.done:
			return ended(d.shop, "the shop")
		case <-d.connector.done:
			return ended(d.connector, "the connector")
		case <-d.consumer.done:
			return ended(d.consumer, "the consumer")
		}
	}
}

// after gives a channel that receives once, after t; for 0 one that never does.
func after(t time.Duration) (<-chan time.Time, func()) {
	if t <= 0 {
		return nil, func() {}
	}
	timer := time.NewTimer(t)
	return timer.C, func() { timer.Stop() }
}

// every gives a channel that receives each t; for 0 one that never does.
func every(t time.Duration) (<-chan time.Time, func()) {
	if t <= 0 {
		return nil, func() {}
	}
	ticker := time.NewTicker(t)
	return ticker.C, ticker.Stop
}

// ended takes the error of a part that has ended though nobody asked it to, so
// that finish does not give it a second time.
func ended(p *part, name string) error {
	if err := p.err; err != nil {
		p.err = nil
		return err
	}
	return fmt.Errorf("run %s: it ended by itself", name)
}

func (d *demo) totals() Totals { return d.client.stats.Totals(time.Now()) }

func (d *demo) kills() int {
	if d.process == nil {
		return 0
	}
	return d.process.killed()
}

func (d *demo) kill() {
	if d.process == nil {
		return
	}
	if pid, ok := d.process.kill(); ok {
		d.Screen.Note(fmt.Sprintf("kill -9 %d: the connector is dead, and starts again. The shop goes on.", pid))
	}
}

// finish ends the parts in an order in which nothing that the shop committed can
// miss its way, and, if all went well, prints and judges the result.
func (d *demo) finish(ctx context.Context, well bool) error {
	shopErr := d.shop.stop() // it finishes the transaction in hand
	if well {
		d.settle()
	}
	err := errors.Join(shopErr, d.connector.stop())
	if well && err == nil {
		// What the connector sent while it stopped could hold a repeat, too.
		drain, cancel := context.WithTimeout(ctx, drainBudget)
		err = d.client.drain(drain, d.consumer.done)
		cancel()
	}
	err = errors.Join(err, d.consumer.stop())
	d.shop, d.connector, d.consumer = nil, nil, nil // their errors are given; close has nothing to add
	if !well || err != nil {
		return err
	}
	d.Screen.EndFooter()
	lines, err := summary(d.totals(), d.ledger.Count(), d.kills())
	for _, m := range d.ledger.Missing(10) {
		d.Screen.Warn("MISSING: " + m)
	}
	d.Screen.Line("")
	for _, l := range lines {
		d.Screen.Heading(l)
	}
	return err
}

// settle waits until everything committed has arrived, or the budget is used up;
// the ledger then names what is missing. The shop has ended.
func (d *demo) settle() {
	budget, stop := after(d.SettleBudget)
	defer stop()
	for d.ledger.Count().Missing > 0 {
		select {
		case <-d.ledger.Settled():
		case <-budget:
			return
		case <-d.connector.done:
			return
		case <-d.consumer.done:
			return
		}
	}
}

// header says what runs where and what to try.
type header struct {
	version, dsn, config, status, pgpass string
	brokers                              []string
	killable                             bool
}

func (h header) print(s *Screen) {
	s.EndFooter()
	s.Heading("walrelay demo: what a shop commits in PostgreSQL arrives in Kafka, each change exactly once")
	s.Line("")
	s.Line(fmt.Sprintf("  PostgreSQL %-5s %s", h.version, h.dsn))
	s.Line("  Kafka            " + strings.Join(h.brokers, ",") + "  (embedded; topics shop.* and outbox.event.*)")
	s.Line("  connector        walrelay run -c " + h.config)
	s.Line("  status           " + h.status)
	s.Line("")
	s.Line("  Change rows      PGPASSFILE=" + h.pgpass + " psql '" + h.dsn + "'")
	s.Line("  Read the topics  kcat -b " + h.brokers[0] + " -t shop.public.orders   (or any Kafka client)")
	if h.killable {
		s.Line("  Kill it          k and Enter: kill -9 the connector; nothing is lost or doubled")
	}
	s.Line("  End it           Ctrl-C; nothing is left behind")
	s.Line("")
	s.Line("  ● is an outbox event, the other lines are table changes; at the right, commit to consumer")
	s.Line("")
}
