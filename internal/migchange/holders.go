package migchange

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Holders says who holds which unit, as the kubelet tells. The zero Holders is a
// node on which no pod holds any.
type Holders struct {
	// pods are the holders by unit. claimed are the units that are held by claims; a GPU is
	// held with all of its partitions then.
	pods    map[string]string
	claimed map[string]bool
	// doubtful are the units whose holder may be gone: the kubelet does not say which
	// pod has them.
	doubtful map[string]bool
	// err says why that cannot be known; nil when it is.
	err error
}

var errHoldersUnknown = errors.New("what pods hold cannot be read")

// NewHolders makes Holders of what was asked of the kubelet: its answer, or why
// there is none.
func NewHolders(allocations []sharing.Allocation, err error) Holders {
	if err != nil {
		return Holders{err: fmt.Errorf("%w: %w", errHoldersUnknown, err)}
	}
	h := Holders{
		pods:     map[string]string{},
		claimed:  map[string]bool{},
		doubtful: map[string]bool{},
	}
	for unit, holders := range sharing.HoldersByUnit(allocations) {
		for _, a := range holders {
			h.pods[unit] = a.Holder()
			h.claimed[unit] = h.claimed[unit] || a.Claim != ""
			if !a.Certain() {
				h.doubtful[unit] = true
			}
		}
	}
	return h
}

// keep counts free units as held that are offered by DRA.
func (h Holders) keep(byDRA []string) {
	for _, unit := range byDRA {
		if h.pods[unit] == "" {
			h.pods[unit] = "it is offered by DRA: take its name out of dra.resources first"
		}
	}
}

func (h Holders) known() bool { return h.err == nil }

func (h Holders) doubtfulUnits() []string { return slices.Sorted(maps.Keys(h.doubtful)) }

// mark returns the GPU's state with what pods hold as busy, and with everything
// busy while that is not known, or who uses it.
func (h Holders) mark(gpu string, state sharing.MIGState) sharing.MIGState {
	if !h.known() || state.ProcessesHidden {
		return state.WithBusy(func(string) bool { return true })
	}
	return h.markHeld(gpu, state)
}

// markHeld is mark for a change that has begun: what it destroys was free, and not
// knowing is no reason to leave it half done.
func (h Holders) markHeld(gpu string, state sharing.MIGState) sharing.MIGState {
	return state.WithBusy(func(uuid string) bool { return h.pods[uuid] != "" || h.claimed[gpu] })
}

func anyBusy(state sharing.MIGState) bool {
	return slices.ContainsFunc(state.Instances, func(i mig.Instance) bool {
		return slices.ContainsFunc(i.Computes, func(c mig.Compute) bool { return c.Busy })
	})
}

func (h Holders) explain(gpu string, blocked []mig.Blocked) string {
	reasons := make([]string, len(blocked))
	for i, b := range blocked {
		reasons[i] = b.String()
		if pod := cmp.Or(h.pods[b.UUID], h.pods[gpu]); pod != "" {
			reasons[i] += " (" + pod + ")"
		}
	}
	if !h.known() {
		reasons = append(reasons, h.err.Error())
	}
	return strings.Join(reasons, "; ")
}

// holderReader reads who holds what, which any goroutine may ask it to. The rest is for the one
// that looks at the GPUs.
type holderReader struct {
	*Options
	// seen says that the holders could be read once. Until deadline that is waited for.
	seen     atomic.Bool
	deadline time.Time
}

// awaitKubelet is how long, after the start, a kubelet is waited for that cannot be
// read.
const awaitKubelet = time.Minute

// begin has the time for the kubelet begin, the first time.
func (r *holderReader) begin() {
	if r.deadline.IsZero() {
		r.deadline = r.now().Add(awaitKubelet)
	}
}

func (r *holderReader) awaitsKubelet() bool { return !r.seen.Load() && r.now().Before(r.deadline) }

func (r *holderReader) read(ctx context.Context) Holders {
	if r.Holders == nil {
		return Holders{err: errHoldersUnknown}
	}
	h := NewHolders(r.Holders(ctx))
	if h.known() {
		r.seen.Store(true)
		if r.ByDRA != nil {
			h.keep(r.ByDRA())
		}
	}
	return h
}
