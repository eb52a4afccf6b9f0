package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/migchange"
	"github.com/virgate/virgate/internal/mpsshare"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// lookTimeout is how long an answer waits for the kubelet to list the holders, and lookPause the
// shortest time between two requests. Any pod may reach HTTP, which must not take the turns of a
// switch that waits for holders.
const (
	lookTimeout = time.Second
	lookPause   = 200 * time.Millisecond
)

// view shows what the program does, in the status and in metrics. It only reads.
type view struct {
	*Options
	*current
	calls       *nodemetrics.Calls
	switches    prometheus.Histogram
	mig         *migchange.Reconciler
	dra         *drapath.Paths
	gpuSettings *gpusettings.Settings
	mps         *mpsshare.Manager
	guard       *memoryguard.Guard
	samples     *sampler
}

func newView(a *agent) *view {
	v := &view{
		Options:     &a.Options,
		current:     &a.current,
		calls:       nodemetrics.NewCalls(),
		switches:    nodemetrics.NewSwitches(),
		mig:         a.mig,
		dra:         a.dra,
		gpuSettings: a.gpuSettings,
		mps:         a.mps,
		guard:       a.guard,
		samples:     a.samples,
	}
	v.Plugin.SetCallMetrics(v.calls)
	return v
}

// status returns what the program does now, with the holders that the kubelet reports now.
func (v *view) status(ctx context.Context) status.Status {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	_, _ = v.samples.readHolders(ctx, lookPause)
	s, p := v.state.Load(), v.progress.Load()
	unready := v.unready()
	node := status.Status{
		At:       time.Now(),
		Waits:    append([]nodereport.Wait{}, p.waits...),
		Layouts:  append([]nodereport.GPULayout{}, p.layouts...),
		Node:     v.NodeName,
		Version:  v.Version,
		Role:     v.role(),
		Ready:    len(unready) == 0,
		Unready:  append([]string{}, unready...),
		Profile:  p.status(s),
		Warnings: append([]string{}, s.plan.Warnings...),
	}
	if s.pause.by.Any() && !s.planned {
		node.Warnings = append(node.Warnings, s.pause.by.Text())
	}
	withheld := countObstacles(s.host.Obstacles)
	for _, reason := range slices.Sorted(maps.Keys(withheld)) {
		node.Warnings = append(node.Warnings,
			fmt.Sprintf("GPUs and partitions that cannot be granted now: %d: %s", withheld[reason], reason))
	}
	podResources, checkpoint := v.UnreadKubelet()
	if podResources != nil {
		node.Warnings = append(node.Warnings,
			"the kubelet's PodResources cannot be reached, so pods are known by its checkpoint alone, by UID and "+
				"without names: "+podResources.Error())
	}
	if checkpoint != nil {
		node.Warnings = append(node.Warnings,
			"the kubelet's checkpoint cannot be read, so what only finished init containers had is not known: "+
				checkpoint.Error())
	}
	if err := v.StateWriteError(); err != nil {
		node.Warnings = append(node.Warnings, "what a restarted Virgate needs to know is not kept: "+err.Error())
	}
	node.Unread, node.DRA = message(s.unread), v.draStatus()
	var held []sharing.Allocation
	if known := v.samples.holders.Load(); known != nil {
		held = known.held
		node.HoldersKnown = true
		node.HoldersAt = &known.at
	}
	serving := v.Plugin.Status()
	node.KubeletKnown = serving.KubeletSeen
	resources := status.Listed(serving.Resources, s.gpus)
	node.Resources = status.Resources(serving.Resources, resources, s.plan, held, node.HoldersKnown)
	node.GPUs, node.Elsewhere = status.GPUs(s.gpus, sharing.Usage(resources, held), v.Health.Health())
	for i := range node.GPUs {
		node.GPUs[i].Settings = v.gpuSettings.All()[node.GPUs[i].UUID]
		node.GPUs[i].MPS = daemonsOf(v.mps.View(), node.GPUs[i].Units)
	}
	node.AddUtilization(v.samples.last.Load().Report)
	return node
}

// draStatus returns nil if DRA is not served.
func (v *view) draStatus() *status.DRA {
	if v.DRA.Driver == nil {
		return nil
	}
	known := v.DRA.Claims.View()
	told := &status.DRA{
		DriverState: v.DRA.Driver.State(),
		Paths:       known.Paths,
		Claims:      append([]dra.Claim{}, known.Claims...),
		Refused:     []claims.Refused{},
	}
	for _, uid := range slices.Sorted(maps.Keys(known.Refused)) {
		told.Refused = append(told.Refused, known.Refused[uid])
	}
	return told
}

func (v *view) role() status.Role {
	switch {
	case v.draining.Load():
		return status.RoleDraining
	case v.serving.Load():
		return status.RoleServing
	case v.standby.Load():
		return status.RoleStandby
	default:
		return status.RoleStarting
	}
}

// unready returns why this program is not ready; nothing if it is.
func (v *view) unready() []string {
	switch {
	case v.serving.Load():
	case v.standby.Load():
		return nil // Another Virgate serves this node.
	default:
		return []string{"not serving yet"}
	}
	s := v.state.Load()
	var reasons []string
	switch {
	case s.profile == nil && s.rejected != nil:
		reasons = append(reasons, "no profile: "+s.rejected.Error())
	case s.profile == nil:
		reasons = append(reasons, "no profile yet")
	case !s.planned && s.pause.by.Any(): // It has nothing to serve before the pause ends.
	case !s.planned && s.unread != nil:
		reasons = append(reasons, "GPUs not read: "+s.unread.Error())
	case !s.planned:
		reasons = append(reasons, "GPUs not read yet")
	}
	if s.unlisted != "" && !s.pause.by.Any() {
		reasons = append(reasons, s.unlisted)
	}
	status := v.Plugin.Status()
	if s.planned && !status.Served {
		reasons = append(reasons, "plan not served yet")
	}
	for _, name := range unregistered(status) {
		reasons = append(reasons, name+": not registered with the kubelet")
	}
	return reasons
}

// unregistered returns the resources whose lists the kubelet does not watch.
func unregistered(status plugin.Status) (names []string) {
	for _, r := range status.Resources {
		if r.Streams != 1 {
			names = append(names, r.Name)
		}
	}
	return names
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// daemonsOf returns the MPS daemons of the GPU's units.
func daemonsOf(v *decide.MPS, units []status.Unit) (list []nodereport.MPSState) {
	for _, u := range units {
		state, told := v.States[u.ID]
		switch {
		case !told:
			continue
		case !v.Connected:
			state.Phase, state.Reason = nodereport.MPSFailed, decide.MPSUnanswered
		}
		list = append(list, state)
	}
	return list
}
