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

// Holders are the holders of units according to the kubelet. The zero Holders is a node on which no
// pod holds any.
type Holders struct {
	// pods are the holders by unit. claimed are the units held by claims; a claimed GPU is held
	// with all its partitions.
	pods    map[string]string
	claimed map[string]bool
	// doubtful are the units whose holder may have ended: the kubelet does not name their pod.
	doubtful map[string]bool
	// err is why the holders are unknown; nil if they are known.
	err error
}

var errHoldersUnknown = errors.New("what pods hold cannot be read")

// NewHolders makes Holders from the kubelet's answer or error.
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

// keep marks free units that are offered by DRA as held.
func (h Holders) keep(byDRA []string) {
	for _, unit := range byDRA {
		if h.pods[unit] == "" {
			h.pods[unit] = "it is offered by DRA: take its name out of dra.resources first"
		}
	}
}

func (h Holders) known() bool { return h.err == nil }

func (h Holders) doubtfulUnits() []string { return slices.Sorted(maps.Keys(h.doubtful)) }

// mark returns the GPU's state with what pods hold marked busy. If holders or processes are
// unknown, everything is busy.
func (h Holders) mark(gpu string, state sharing.MIGState) sharing.MIGState {
	if !h.known() || state.ProcessesHidden {
		return state.WithBusy(func(string) bool { return true })
	}
	return h.markHeld(gpu, state)
}

// markHeld is mark for a change that has begun. What it destroys was free, and unknown holders are
// no reason to leave it half done.
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

// holderReader reads the holders. Any goroutine may call read; the rest is for the goroutine that
// checks the GPUs.
type holderReader struct {
	*Options
	// seen is true once the holders have been read. Until deadline, that is waited for.
	seen     atomic.Bool
	deadline time.Time
}

// awaitKubelet is how long after the start Virgate waits for an unreadable kubelet.
const awaitKubelet = time.Minute

// begin sets the deadline at the first call.
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
