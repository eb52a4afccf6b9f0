package agent

import (
	"context"
	"maps"
	"reflect"
	"slices"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Host is where containers find what a grant names.
type Host interface {
	// Prepare makes ready what the grants need for these boards and returns what
	// is there. The loop calls it before each plan goes out, and waits; what is
	// returned is not changed afterwards.
	Prepare(grants sharing.Grants, gpus []sharing.GPU) plugin.Host
	// Watch is as in Node: it calls changed when Prepare would answer otherwise.
	Watch(ctx context.Context, changed func()) error
}

// prepare has the host made ready for the next plan, and withholds from it what
// cannot be granted. A program that stands by leaves the host to the one that
// serves.
func (a *agent) prepare(last, next *state) {
	if a.Host == nil || !a.serving.Load() {
		return
	}
	next.host = a.Host.Prepare(next.plan.Grants, next.gpus)
	next.plan = next.plan.Withhold(next.host.Obstacles)
	if reflect.DeepEqual(last.host, next.host) {
		return
	}
	a.Plugin.SetHost(next.host)
	reasons, known := count(next.host.Obstacles), count(last.host.Obstacles)
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		if reasons[reason] != known[reason] {
			a.Logger.Warn("gpus withheld", "reason", reason, "units", reasons[reason])
		}
	}
	if len(reasons) == 0 && len(known) > 0 {
		a.Logger.Info("all gpus can be granted")
	}
}

// count says how many units have each obstacle.
func count(obstacles map[string]string) map[string]int {
	reasons := map[string]int{}
	for _, reason := range obstacles {
		reasons[reason]++
	}
	return reasons
}
