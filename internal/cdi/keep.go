package cdi

import (
	"context"
	"time"

	"github.com/virgate/virgate/sharing"
)

// askAgain is the time between two questions who holds units that have left.
const askAgain = time.Minute

// reconsider says that an entry whose unit has left may be due to go.
func (w *Writer) reconsider() bool {
	return len(w.left) > 0 && !w.options.Now().Before(w.asked.Add(askAgain))
}

// keeper returns which entries of a spec stay beside those that the source has
// made: those of units that the node still has, or that a pod may hold.
//
// An index is kept only for a while: it soon names another unit, and who asks
// for devices by index has chosen that.
func (w *Writer) keeper(ctx context.Context, gpus []sharing.GPU) func(name string) bool {
	now := w.options.Now()
	w.asked = now
	present := map[string]bool{}
	for _, u := range units(gpus) {
		present[u.id], present[u.index] = true, true
	}
	before := w.left
	w.left = map[string]time.Time{}
	var held func(name string) bool
	return func(name string) bool {
		if present[name] {
			return true
		}
		since, known := before[name]
		if !known {
			since = now
		}
		keep := now.Before(since.Add(w.options.Keep))
		if !keep {
			if held == nil {
				held = w.held(ctx)
			}
			keep = held(name)
		}
		if keep {
			w.left[name] = since
		}
		return keep
	}
}

// held returns whether a pod may hold a unit: all may be held while nobody can
// tell.
func (w *Writer) held(ctx context.Context) func(unit string) bool {
	everything := func(string) bool { return true }
	if w.options.Holders == nil {
		return everything
	}
	allocations, err := w.options.Holders.Held(ctx)
	if err != nil {
		return everything
	}
	units := map[string]bool{}
	for _, allocation := range allocations {
		for _, id := range allocation.Devices {
			unit, _, _ := sharing.ParseDeviceID(id)
			units[unit] = true
		}
	}
	return func(unit string) bool { return units[unit] }
}
