package agent

import (
	"maps"
	"slices"
	"time"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// longestSwitch is the longest time that is measured. A longer switch waits for something other
// than the scheduler, such as the end of a claim.
const longestSwitch = 10 * time.Minute

// profileChange is the replacement of one profile by another.
type profileChange struct {
	// seen is when the loop noticed it.
	seen time.Time
	// before is how many Healthy devices the previous plan had, by resource.
	before map[string]int
}

func healthyDevices(plan sharing.Plan) map[string]int {
	counts := map[string]int{}
	for _, r := range plan.Resources {
		counts[r.Name] = r.HealthyDevices()
	}
	return counts
}

// switchState is how far a profileChange is.
type switchState int

const (
	switchGoesOn switchState = iota
	// switchAgrees: the Node's status has what the kubelet was told.
	switchAgrees
	// switchUntold: the Node shows nothing to measure, because no number has changed or one could
	// not be written.
	switchUntold
)

// state derives the state from the plan and how it is served. pending is true if something other
// than pods is waited for. Units that pods hold do not count: their change may take days, and the
// scheduler knows the others without them.
func (c profileChange) state(plan sharing.Plan, status plugin.Status, pending bool) switchState {
	if !status.Served || !status.Switched || pending {
		return switchGoesOn
	}
	now, result := healthyDevices(plan), switchUntold
	for _, name := range slices.Sorted(maps.Keys(merge(c.before, now))) {
		if c.before[name] == now[name] {
			continue
		}
		at := slices.IndexFunc(status.Resources, func(r plugin.ResourceStatus) bool { return r.Name == name })
		if at < 0 {
			continue // Its server has stopped, or none of its units is free yet.
		}
		switch r := status.Resources[at]; {
		case r.AnnounceState == plugin.Unannounced:
			return switchUntold
		case !r.Applied || r.AnnounceState == plugin.Announcing:
			return switchGoesOn
		}
		result = switchAgrees
	}
	return result
}

func merge(a, b map[string]int) map[string]int {
	both := maps.Clone(a)
	maps.Copy(both, b)
	return both
}

// startsMPS reports whether a unit waits only for its MPS daemon to start or to end, not for a pod.
func startsMPS(plan sharing.Plan, mps *decide.MPS, waits []nodereport.Wait) bool {
	if !mps.Connected {
		return false
	}
	for _, r := range plan.Resources {
		for _, unit := range r.Units {
			switch {
			case unit.Health.Healthy() || slices.ContainsFunc(waits,
				func(w nodereport.Wait) bool { return w.Unit == unit.ID }):
			case unit.MPS.Shares == 0 && mps.Busy[unit.ID]:
				return true
			case unit.MPS.Shares > 0 && mps.Waits[unit.ID] == "" && mps.States[unit.ID].Phase != nodereport.MPSFailed:
				return true
			}
		}
	}
	return false
}

// measureSwitch observes how long the last change of the profile took, once. over is the change
// that is already finished.
func (r *reports) measureSwitch(
	over *profileChange,
	s *state,
	p profileProgress,
	status plugin.Status,
	now time.Time,
) *profileChange {
	if s.change == over || !r.serving.Load() || r.draining.Load() {
		return over
	}
	took := now.Sub(s.change.seen)
	pending := startsMPS(s.plan, r.mps.View(), p.waits) ||
		slices.ContainsFunc(p.layouts, func(l nodereport.GPULayout) bool { return l.State == nodereport.LayoutPending })
	switch state := s.change.state(s.plan, status, pending); {
	case state == switchGoesOn && took < longestSwitch:
		return over
	case state == switchAgrees && took < longestSwitch:
		r.switches.Observe(took.Seconds())
	}
	return s.change
}
