package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/checkpoint"
	"github.com/walrelay/walrelay/internal/config"
	"github.com/walrelay/walrelay/replication"
)

// newSlotCommand is slot: what the connector keeps in the database.
func newSlotCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "slot", Short: "Show or drop the slot and its anchor", Args: unknownCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	show := &cobra.Command{
		Use: "show -c FILE", Short: "Show slot, anchor and publications, as JSON", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.slotShow(cmd.Context()) },
	}
	a.addConfigFlag(show.Flags())
	var yes bool
	drop := &cobra.Command{
		Use: "drop -c FILE [--yes]", Short: "Drop the slot, its anchor and the managed publications", Args: cobra.NoArgs,
		Long: "Drops the connector's slot, its anchor, and the publications that it manages. What is\n" +
			"committed from then on, until a new slot is made, is not streamed. Refused beside a\n" +
			"live instance.",
		RunE: func(cmd *cobra.Command, _ []string) error { return a.slotDrop(cmd.Context(), yes) },
	}
	a.addConfigFlag(drop.Flags())
	drop.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.AddCommand(show, drop)
	return cmd
}

// shownSlot is a slot as slot show prints it; null where it is not there.
type shownSlot struct {
	Name         string `json:"name"`
	Active       bool   `json:"active"`
	RestartLSN   string `json:"restart_lsn"`
	Confirmed    string `json:"confirmed_flush_lsn"`
	Retained     int64  `json:"retained_wal_bytes"`
	WALStatus    string `json:"wal_status"`
	Invalidation string `json:"invalidation,omitempty"`
	Failover     bool   `json:"failover"`
}

type shownSlots struct {
	Slot         *shownSlot `json:"slot"`
	Anchor       *shownSlot `json:"anchor"`
	Publications []string   `json:"publications"`
}

func (a *app) slotShow(ctx context.Context) error {
	c, err := a.loadConfig()
	if err != nil {
		return err
	}
	conn, err := replication.Connect(ctx, c.Source.DSN.Reveal(), "walrelay_"+c.Name)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	room, err := replication.ReadRoom(ctx, conn)
	if err != nil {
		return err
	}
	read := func(name string) (*shownSlot, error) {
		s, found, err := replication.ReadSlot(ctx, conn, name)
		if err != nil || !found {
			return nil, err
		}
		shown := &shownSlot{
			Name: s.Name, Active: s.Active, RestartLSN: s.RestartLSN.String(), Confirmed: s.ConfirmedFlush.String(),
			WALStatus: s.WALStatus, Invalidation: s.Invalidation, Failover: s.Failover,
		}
		if s.RestartLSN > 0 { // one that is lost keeps nothing
			shown.Retained = int64(room.WALEnd - s.RestartLSN)
		}
		return shown, nil
	}
	out := shownSlots{Publications: []string{}}
	if out.Slot, err = read(c.Source.Slot); err != nil {
		return err
	}
	if out.Anchor, err = read(replication.AnchorName(c.Source.Slot)); err != nil {
		return err
	}
	for _, name := range []string{c.Source.Publication, c.Source.Publication + replication.InsertSuffix} {
		_, found, err := replication.ReadPublication(ctx, conn, name)
		if err != nil {
			return err
		}
		if found {
			out.Publications = append(out.Publications, name)
		}
	}
	return printJSON(a.stdout, out)
}

func (a *app) slotDrop(ctx context.Context, yes bool) error {
	c, err := a.loadConfig()
	if err != nil {
		return err
	}
	conn, err := replication.Connect(ctx, c.Source.DSN.Reveal(), "walrelay_"+c.Name)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	slot, _, err := replication.ReadSlot(ctx, conn, c.Source.Slot)
	if err != nil {
		return err
	}
	if slot.Active {
		return &exitError{exitRefused, &checkpoint.Refusal{
			What:   fmt.Sprintf("slot %s is in use by process %d of the server: an instance of this connector runs", slot.Name, slot.ActivePID),
			Risk:   "it would lose its place in the WAL",
			Remedy: "stop the connector, then do this again",
		}}
	}
	managed := c.Source.PublicationMode == config.PublicationManaged
	what := fmt.Sprintf("Slot %s and its anchor", c.Source.Slot)
	if managed {
		what += ", and publications " + c.Source.Publication + " and " + c.Source.Publication + replication.InsertSuffix + ","
	}
	text := fmt.Sprintf("%s are dropped: what is committed from now on, until a new slot is made, is never streamed,\n"+
		"and nothing committed so far can be replayed.", what)
	if !yes {
		if err := a.confirm(ctx, text+"\nDrop them?"); err != nil {
			return err
		}
	}
	// In a transaction, so that who may not drop the publications drops nothing.
	tx, err := conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after the commit it does nothing
	var dropped []string
	if managed { // an existing publication is somebody else's
		if err := replication.DropPublications(ctx, conn, c.Source.Publication); err != nil {
			return fmt.Errorf("nothing was dropped: %w", err)
		}
		dropped = append(dropped, c.Source.Publication, c.Source.Publication+replication.InsertSuffix)
	}
	// The anchor first: one that is left alone would keep its WAL, and the next start from
	// being a first one.
	for _, name := range []string{replication.AnchorName(c.Source.Slot), c.Source.Slot} {
		if err := replication.DropSlot(ctx, conn, name); err != nil {
			return err
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("the slots are dropped, the publications are not: %w", err)
	}
	dropped = append([]string{c.Source.Slot, replication.AnchorName(c.Source.Slot)}, dropped...)
	_, err = fmt.Fprintf(a.stdout, "dropped %s\n", strings.Join(dropped, ", "))
	return err
}
