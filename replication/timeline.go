package replication

import (
	"bufio"
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/checkpoint"
)

// TimelineSwitch is a line of a timeline history file: a timeline that the server's own
// one descends from, and where it was left.
type TimelineSwitch struct {
	Timeline int32
	At       checkpoint.LSN // what the two have in common ends here
}

// ParseTimelineHistory reads the content that TIMELINE_HISTORY gives: lines of timeline,
// switch point and reason, separated by white space, oldest first, with comments (#).
// The history of timeline 1 does not exist and is empty.
func ParseTimelineHistory(content []byte) ([]TimelineSwitch, error) {
	var history []TimelineSwitch
	lines := bufio.NewScanner(bytes.NewReader(content))
	lines.Buffer(nil, 1<<20) // a recovery target's name may be part of the reason
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 2 {
			return nil, fmt.Errorf("parse timeline history %q: want a timeline and an LSN", line)
		}
		tli, err := strconv.ParseInt(fields[0], 10, 32)
		if err != nil || tli < 1 {
			return nil, fmt.Errorf("parse timeline history %q: want a timeline, 1 or above", line)
		}
		at, err := checkpoint.ParseLSN(fields[1])
		if err != nil {
			return nil, fmt.Errorf("parse timeline history: %w", err)
		}
		// The server demands the same of the file.
		if n := len(history); n > 0 && int32(tli) <= history[n-1].Timeline {
			return nil, fmt.Errorf("parse timeline history %q: timelines must rise from line to line", line)
		}
		history = append(history, TimelineSwitch{Timeline: int32(tli), At: at})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("parse timeline history: %w", err)
	}
	return history, nil
}

// CheckTimeline tells whether position p, reached on the timeline of cp, lies in the
// past of a server on timeline current with the given history. It does when the
// timeline is the same, or when the server left it at p or later. Otherwise a
// *checkpoint.Refusal: however far the server's WAL has grown since, p is a point on
// another branch.
//
// Two clusters restored from one backup may both call their new timeline 2; that
// cannot be seen from here.
func CheckTimeline(cp checkpoint.Source, p checkpoint.LSN, current int32, history []TimelineSwitch) error {
	if cp.Timeline == 0 || p == 0 || cp.Timeline == current {
		return nil
	}
	i := slices.IndexFunc(history, func(s TimelineSwitch) bool { return s.Timeline == cp.Timeline })
	if i >= 0 && p <= history[i].At {
		return nil
	}
	how := fmt.Sprintf("the server is on timeline %d, which does not descend from timeline %d", current, cp.Timeline)
	remedy := "point source.dsn to the server that has the checkpoint's timeline; or accept the loss: walrelay checkpoint set -c FILE --lsn L with an LSN of this server's WAL"
	if i >= 0 {
		how = fmt.Sprintf("the server left timeline %d at %s for timeline %d, %d bytes before the checkpoint", cp.Timeline, history[i].At, current, uint64(p-history[i].At))
		remedy = fmt.Sprintf("point source.dsn to the server that has the checkpoint's timeline; or accept the loss: walrelay checkpoint set -c FILE --lsn %s", history[i].At)
	}
	return &checkpoint.Refusal{
		What:   fmt.Sprintf("the server's WAL is behind the checkpoint: the checkpoint is at %s on timeline %d, and %s", p, cp.Timeline, how),
		Risk:   "the server lost commits in a failover or restore that Kafka already holds, and new ones would be taken for old ones and skipped",
		Remedy: remedy + ", then walrelay snapshot -c FILE --table T --replace for the tables concerned",
	}
}

func verifyTimeline(f Facts) error {
	return CheckTimeline(f.Checkpoint.Source, f.Checkpoint.Position.LSN, f.Database.Timeline, f.History)
}
