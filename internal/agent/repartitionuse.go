package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// use is who holds which unit, as the kubelet says.
type use struct {
	// pods are the holders by unit; known says that they could be read.
	pods  map[string]string
	known bool
	err   error
	// doubtful are the units whose holder may be gone: the kubelet does not say
	// which pod has them.
	doubtful map[string]bool
	// enabled says of the board that is looked at that nobody can have been given
	// it as a whole, so that not knowing is no reason to wait.
	enabled bool
}

// inUse asks the kubelet, for the sake of that board.
func (r *repartitioner) inUse(ctx context.Context, gpu string) use {
	u := use{pods: map[string]string{}, doubtful: map[string]bool{}, enabled: slices.Contains(r.journalled.Enabled, gpu)}
	if r.holders == nil {
		u.err = errBlind
		return u
	}
	allocations, err := r.holders(ctx)
	if err != nil {
		u.err = fmt.Errorf("%w: %w", errBlind, err)
		return u
	}
	u.known, r.seen = true, true
	for _, a := range allocations {
		pod := a.Namespace + "/" + a.Pod
		if a.Namespace == "" {
			pod = "a pod"
		}
		for _, id := range a.Devices {
			unit, _, _ := sharing.ParseDeviceID(id)
			u.pods[unit] = pod
			if a.Namespace == "" {
				u.doubtful[unit] = true
			}
		}
	}
	return u
}

var errBlind = errors.New("what pods hold cannot be read")

// mark returns the board's listing with what pods hold as busy, and with
// everything busy while that is not known.
func (u use) mark(cut sharing.Cut) sharing.Cut {
	return busy(cut, func(uuid string) bool { return !u.known || u.pods[uuid] != "" })
}

// hold is mark for a change that has begun: what it destroys was free, and not
// knowing is no reason to leave it half done.
func (u use) hold(cut sharing.Cut) sharing.Cut {
	return busy(cut, func(uuid string) bool { return u.pods[uuid] != "" })
}

func busy(cut sharing.Cut, held func(uuid string) bool) sharing.Cut {
	cut.Instances = slices.Clone(cut.Instances)
	for i := range cut.Instances {
		computes := slices.Clone(cut.Instances[i].Computes)
		for j := range computes {
			computes[j].Busy = computes[j].Busy || held(computes[j].UUID)
		}
		cut.Instances[i].Computes = computes
	}
	return cut
}

// anyBusy says that something of the board's listing is in use.
func anyBusy(cut sharing.Cut) bool {
	for _, instance := range cut.Instances {
		if slices.ContainsFunc(instance.Computes, func(c mig.Compute) bool { return c.Busy }) {
			return true
		}
	}
	return false
}

// whole says what keeps the board, as a whole, from another MIG mode; "" for
// nothing.
func (u use) whole(gpu string, cut sharing.Cut) string {
	pod, held := u.pods[gpu]
	switch {
	case !u.known && !u.enabled:
		return u.err.Error()
	case held:
		return fmt.Sprintf("the GPU is in use as a whole by %s", pod)
	case !cut.MIG && cut.Busy:
		return "the GPU is in use as a whole by a process, or its processes cannot be listed"
	}
	return ""
}

// explain says what the change waits for.
func (u use) explain(blocked []mig.Blocked) string {
	text := ""
	for _, b := range blocked {
		if text != "" {
			text += "; "
		}
		text += b.String()
		if pod := u.pods[b.UUID]; pod != "" {
			text += " (" + pod + ")"
		}
	}
	if !u.known {
		text += "; " + u.err.Error()
	}
	return text
}
