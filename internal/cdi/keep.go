package cdi

import (
	"context"
	"reflect"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/sharing"
)

// askAgain is the time between two questions who holds units that have left.
const askAgain = time.Minute

// reconsider says that an entry whose unit has left may be due to go.
func (w *Writer) reconsider() bool {
	return !w.options.Now().Before(w.asked.Add(askAgain))
}

// keeper returns which entries of the spec stay beside those that the source
// has made: those of units that the node still has, or that a pod may hold.
//
// An index is kept only for a while: it soon names another unit, and who asks
// for devices by index has chosen that. While the unit that has it now has no
// entry of its own, no other's stands in for it.
func (w *Writer) keeper(ctx context.Context, gpus []sharing.GPU, spec *specs.Spec) func(name string) bool {
	now := w.options.Now()
	w.asked = now
	edits := map[string]specs.ContainerEdits{}
	if spec != nil {
		for _, d := range spec.Devices {
			edits[d.Name] = d.ContainerEdits
		}
	}
	present := map[string]bool{}
	for _, u := range units(gpus) {
		present[u.id], present[u.index] = true, reflect.DeepEqual(edits[u.id], edits[u.index])
	}
	before := w.left
	w.left = map[string]time.Time{}
	var held func(name string) bool
	return func(name string) bool {
		if its, is := present[name]; is {
			return its
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
