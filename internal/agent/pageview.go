package agent

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// pageView is a Status as the page draws it.
type pageView struct {
	Status
	Now time.Time
	// Reasons are why it is not ready, without those that the page says elsewhere.
	Reasons []string
	Boards  []boardView
	Changes []changeView
}

// boardView is a board as a tile.
type boardView struct {
	GPUStatus
	// Slots is how many memory slots its partitions lie in; 0 without partitions.
	Slots int
	// Layout is how far it is on its way to a wanted layout; nil without one.
	Layout *sharing.BoardLayout
	Blocks []blockView
}

// blockView is a unit with a cell for each device that stands for it. Its
// holders are the busiest first.
type blockView struct {
	UnitStatus
	Cells []cellView
	// More is how many devices have no cell.
	More int
}

// cellView is a device: held by somebody, or free where By is empty.
type cellView struct{ By string }

// changeView is something that came to be as it is.
type changeView struct {
	At         time.Time
	What, Text string
}

const (
	// maxCells bounds the cells of a unit, maxChanges the changes shown.
	maxCells, maxChanges = 48, 10
)

// newPageView is pure.
func newPageView(status Status, now time.Time) pageView {
	view := pageView{Status: status, Now: now, Changes: changesOf(status)}
	for _, reason := range status.Unready {
		if status.Profile.Error == "" || !strings.HasSuffix(reason, status.Profile.Error) {
			view.Reasons = append(view.Reasons, reason)
		}
	}
	for _, g := range status.GPUs {
		board := boardView{GPUStatus: g, Slots: slotsOf(g)}
		if i := slices.IndexFunc(status.Layouts, func(l sharing.BoardLayout) bool { return l.GPU == g.UUID }); i >= 0 {
			board.Layout = &status.Layouts[i]
			if board.Slots > 0 && board.Layout.Slots > 0 {
				board.Slots = board.Layout.Slots
			}
		}
		for _, u := range g.Units {
			board.Blocks = append(board.Blocks, newBlockView(u))
		}
		view.Boards = append(view.Boards, board)
	}
	return view
}

func newBlockView(u UnitStatus) blockView {
	block := blockView{UnitStatus: u}
	block.Holders = slices.Clone(u.Holders)
	slices.SortStableFunc(block.Holders, busiestFirst)
	total := max(u.Replicas, u.Held())
	for _, holder := range block.Holders {
		for range holder.Devices {
			block.Cells = append(block.Cells, cellView{By: holder.Namespace + "/" + holder.Pod})
		}
	}
	for len(block.Cells) < min(total, maxCells) {
		block.Cells = append(block.Cells, cellView{})
	}
	if len(block.Cells) > maxCells {
		block.Cells = block.Cells[:maxCells]
	}
	block.More = total - len(block.Cells)
	return block
}

// busiestFirst puts who computes more before the others, then who has more
// memory.
func busiestFirst(a, b Holder) int {
	load := func(h Holder) (sm, memory float64) {
		if h.Use != nil {
			sm, _ = number(h.Use.SM)
			memory, _ = number(h.Use.Memory)
		}
		return sm, memory
	}
	smA, memoryA := load(a)
	smB, memoryB := load(b)
	return cmp.Or(cmp.Compare(smB, smA), cmp.Compare(memoryB, memoryA))
}

// slotsOf is the number of memory slots of the board. A partition's memory is a
// little less than its part of the board's, and boards have 4 or 8 slots (see
// mig.GeometryOf).
func slotsOf(g GPUStatus) int {
	slots := 0
	for _, u := range g.Units {
		if u.Placement == nil {
			continue
		}
		slots = max(slots, 4, u.Placement.Start+u.Placement.Size)
		if u.Memory > 0 {
			slots = max(slots, int(math.Round(float64(g.Memory)/float64(u.Memory)*float64(u.Placement.Size)*0.9)))
		}
	}
	if slots == 0 {
		return 0
	}
	return min(1<<bits.Len(uint(slots-1)), 8) //nolint:gosec // it is positive
}

// changesOf are the moments that the status knows of, the latest first.
func changesOf(status Status) []changeView {
	var changes []changeView
	if p := status.Profile; !p.Since.IsZero() {
		changes = append(changes, changeView{p.Since, "profile", strings.TrimSpace(p.Wanted.Name + " " + string(p.State))})
	}
	unit := func(name string, h HealthStatus) {
		if h.Since != nil && h.Reason != "" {
			changes = append(changes, changeView{*h.Since, name, string(h.State) + ": " + h.Reason})
		}
	}
	for _, g := range status.GPUs {
		unit(fmt.Sprintf("GPU %d", g.Index), g.Health)
		for _, u := range g.Units {
			if u.ID != g.UUID {
				unit("partition "+u.Index, u.Health)
			}
		}
	}
	slices.SortStableFunc(changes, func(a, b changeView) int {
		return cmp.Or(b.At.Compare(a.At), strings.Compare(a.What, b.What))
	})
	return changes[:min(len(changes), maxChanges)]
}
