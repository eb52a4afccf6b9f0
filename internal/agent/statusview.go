package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// lookTimeout is how long an answer waits for the kubelet to say who holds what. It is
// asked again after lookPause only: HTTP, which any pod may reach, must not take the turns
// of a switch that waits for holders.
const (
	lookTimeout = time.Second
	lookPause   = 200 * time.Millisecond
)

// status is what the program does now, and who holds what as the kubelet says now.
func (a *agent) status(ctx context.Context) Status {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	_, _ = a.readHolders(ctx, lookPause)
	s, p := a.state.Load(), a.progress.Load()
	unready := a.unready()
	status := Status{
		At: time.Now(), Waits: append([]nodereport.Wait{}, p.waits...), Layouts: append([]nodereport.GPULayout{}, p.layouts...),
		Node: a.NodeName, Version: a.Version, Role: a.role(),
		Ready: len(unready) == 0, Unready: append([]string{}, unready...),
		Profile:  p.status(s),
		Warnings: append([]string{}, s.plan.Warnings...),
	}
	withheld := countObstacles(s.host.Obstacles)
	for _, reason := range slices.Sorted(maps.Keys(withheld)) {
		status.Warnings = append(status.Warnings, fmt.Sprintf("GPUs and partitions that cannot be granted now: %d: %s", withheld[reason], reason))
	}
	podResources, checkpoint := a.UnreadKubelet()
	if podResources != nil {
		status.Warnings = append(status.Warnings, "the kubelet's PodResources cannot be reached, so pods are known by its checkpoint alone, by UID and without names: "+podResources.Error())
	}
	if checkpoint != nil {
		status.Warnings = append(status.Warnings, "the kubelet's checkpoint cannot be read, so what only finished init containers had is not known: "+checkpoint.Error())
	}
	if err := a.StateWriteError(); err != nil {
		status.Warnings = append(status.Warnings, "what a restarted Virgate needs to know is not kept: "+err.Error())
	}
	status.Unread, status.DRA = message(s.unread), a.draStatus()
	var held []sharing.Allocation
	if known := a.holders.Load(); known != nil {
		held, status.HoldersKnown, status.HoldersAt = known.held, true, &known.at
	}
	serving := a.Plugin.Status()
	status.KubeletKnown = serving.KubeletSeen
	resources := listed(serving.Resources, s.gpus)
	status.Resources = resourcesOf(serving.Resources, resources, s.plan, held, status.HoldersKnown)
	status.GPUs, status.Elsewhere = gpusOf(s.gpus, sharing.Usage(resources, held), a.Health.Health())
	for i := range status.GPUs {
		status.GPUs[i].Settings = a.gpuSettings.All()[status.GPUs[i].UUID]
		status.GPUs[i].MPS = daemonsOf(a.mps.View(), status.GPUs[i].Units)
	}
	addUtilization(&status, a.lastSample.Load().Report)
	return status
}

func (a *agent) role() Role {
	switch {
	case a.draining.Load():
		return RoleDraining
	case a.serving.Load():
		return RoleServing
	case a.standby.Load():
		return RoleStandby
	default:
		return RoleStarting
	}
}

// listed are the resources as the kubelet is told of them.
func listed(served []plugin.ResourceStatus, gpus []sharing.GPU) []sharing.Resource {
	gpu := sharing.GPUByUnit(gpus)
	resources := make([]sharing.Resource, len(served))
	for i, r := range served {
		resources[i] = sharing.Resource{Name: r.Name, Units: r.Units, Devices: make([]sharing.Device, len(r.Listed))}
		for j, e := range r.Listed {
			resources[i].Devices[j] = e.Device
		}
		for j := range r.Units { // One that was never planned knows no GPU.
			r.Units[j].GPU = cmp.Or(r.Units[j].GPU, gpu[r.Units[j].ID])
		}
	}
	return resources
}

// resourcesOf joins what is served, listed as the kubelet is told, with what is planned.
func resourcesOf(served []plugin.ResourceStatus, listed []sharing.Resource, plan sharing.Plan, held []sharing.Allocation, known bool) []ResourceStatus {
	byName := map[string]ResourceStatus{}
	for i, r := range served {
		status := ResourceStatus{
			Name: r.Name, Dropped: r.Dropped, Streams: r.Streams, Devices: r.Devices, Healthy: r.Healthy, Leaving: r.Leaving,
			Refused: maps.Clone(r.Refused),
		}
		maps.DeleteFunc(status.Refused, func(_ plugin.RefusalReason, count uint64) bool { return count == 0 })
		if !r.Dropped {
			status.Strategy = listed[i].Strategy()
		}
		byName[r.Name] = status
	}
	for _, r := range plan.Resources {
		status := byName[r.Name]
		status.Name, status.Strategy = r.Name, cmp.Or(status.Strategy, r.Strategy())
		byName[r.Name] = status
	}
	devices := map[string]int{} // Those held.
	for _, allocation := range held {
		devices[allocation.Resource] += len(allocation.Devices)
	}
	free := map[string]int{}
	for _, count := range sharing.CountDevices(nil, listed, held) {
		free[count.Resource] += count.Free
	}
	all := make([]ResourceStatus, 0, len(byName))
	for name, status := range byName {
		if known {
			status.Held, status.Free = new(devices[name]), new(free[name])
		}
		all = append(all, status)
	}
	slices.SortFunc(all, func(a, b ResourceStatus) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// gpusOf joins the GPUs with who holds what. Elsewhere are held units of none of them.
func gpusOf(gpus []sharing.GPU, usage []sharing.UnitUsage, health sharing.HealthReport) (list []GPUStatus, elsewhere []UnitStatus) {
	used := map[string]sharing.UnitUsage{}
	for _, u := range usage {
		used[u.Unit.ID] = u
	}
	states := map[string]sharing.UnitHealth{}
	for _, u := range health.Units {
		states[u.Unit] = u
	}
	unit := func(id, index string, unitHealth sharing.Health, memory uint64) UnitStatus {
		u := used[id]
		delete(used, id)
		status := UnitStatus{
			ID: id, Index: index, Memory: memory, Resource: u.Resource, Replicas: u.Unit.Replicas,
			Health: healthOf(states, id, unitHealth), Holders: make([]Holder, len(u.Holders)),
		}
		for i, h := range u.Holders {
			status.Holders[i] = Holder{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Resource: h.Resource, Devices: h.Devices, Claim: h.Claim, AnyGPU: h.AnyGPU}
		}
		return status
	}
	list = make([]GPUStatus, 0, len(gpus))
	for _, g := range slices.SortedFunc(slices.Values(gpus), func(a, b sharing.GPU) int { return cmp.Compare(a.Index, b.Index) }) {
		gpu := GPUStatus{
			UUID: g.UUID, Index: g.Index, DriverIndex: g.DriverIndex, Model: g.Model, Memory: g.Memory, MIG: g.MIG,
			Health: healthOf(states, g.UUID, g.Health), Units: []UnitStatus{},
		}
		index := strconv.Itoa(g.Index)
		for _, p := range g.Partitions {
			u := unit(p.UUID, index+":"+strconv.Itoa(p.Index), p.Health, p.Memory)
			if u.Profile = p.Profile.String(); p.Placement.Size > 0 {
				u.Placement = &p.Placement
			}
			gpu.Units = append(gpu.Units, u)
		}
		if _, held := used[g.UUID]; held || len(g.Partitions) == 0 {
			gpu.Units = append(gpu.Units, unit(g.UUID, index, g.Health, g.Memory))
		}
		list = append(list, gpu)
	}
	elsewhere = []UnitStatus{}
	for _, u := range usage {
		if _, left := used[u.Unit.ID]; left {
			elsewhere = append(elsewhere, unit(u.Unit.ID, u.Unit.Index, u.Unit.Health, 0))
		}
	}
	return list, elsewhere
}

// healthOf is the unit's reported health, or else what its fault says.
func healthOf(states map[string]sharing.UnitHealth, id string, health sharing.Health) HealthStatus {
	if known, ok := states[id]; ok {
		return HealthStatus{State: known.State, Reason: known.Reason, Explanation: known.Explanation, Since: new(known.Since)}
	}
	if !health.Healthy() {
		return HealthStatus{State: sharing.Unhealthy, Reason: health.Reason}
	}
	return HealthStatus{State: sharing.Healthy}
}

func addUtilization(status *Status, report sharing.UtilizationReport) {
	status.Attributed = report.Attributed
	gpus := gpuUtilizations(report)
	type user struct {
		unit      string
		container sharing.Container
	}
	users := map[user]*UseStatus{}
	for _, c := range report.Containers {
		users[user{c.Unit, c.Container}] = &UseStatus{
			Memory: c.Memory, SM: c.SM, Processes: c.Processes, OverShare: c.OverShare, Limit: c.Limit, OverLimit: c.OverLimit,
		}
	}
	for g := range status.GPUs {
		gpu := &status.GPUs[g]
		gpu.Use = gpus[gpu.UUID]
		for _, unit := range gpu.Units {
			for h := range unit.Holders {
				holder := &unit.Holders[h]
				holder.Use = users[user{unit.ID, sharing.Container{Namespace: holder.Namespace, Pod: holder.Pod, Name: holder.Container}}]
			}
		}
	}
}

// gpuUtilizations are those of whole GPUs, by UUID.
func gpuUtilizations(report sharing.UtilizationReport) map[string]*UseStatus {
	gpus := map[string]*UseStatus{}
	for _, b := range report.GPUs {
		gpus[b.GPU] = &UseStatus{Memory: b.Memory, SM: b.SM, Celsius: b.Celsius, Throttled: b.Throttled}
	}
	for _, c := range report.Contention {
		if gpu := gpus[c.GPU]; gpu != nil && c.Contended {
			gpu.Contended, gpu.MaxShare = true, &c.MaxShare
		}
	}
	for _, u := range report.Unattributed {
		if gpu := gpus[u.GPU]; gpu != nil && u.Processes > 0 {
			gpu.Unattributed = append(gpu.Unattributed, u)
		}
	}
	return gpus
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// daemonsOf are the MPS daemons of the GPU's units.
func daemonsOf(v *decide.MPS, units []UnitStatus) (list []nodereport.MPSState) {
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
