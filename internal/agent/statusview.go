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

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
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
func (a *agent) status(ctx context.Context) status.Status {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	_, _ = a.readHolders(ctx, lookPause)
	s, p := a.state.Load(), a.progress.Load()
	unready := a.unready()
	node := status.Status{
		At: time.Now(), Waits: append([]nodereport.Wait{}, p.waits...), Layouts: append([]nodereport.GPULayout{}, p.layouts...),
		Node: a.NodeName, Version: a.Version, Role: a.role(),
		Ready: len(unready) == 0, Unready: append([]string{}, unready...),
		Profile:  p.status(s),
		Warnings: append([]string{}, s.plan.Warnings...),
	}
	withheld := countObstacles(s.host.Obstacles)
	for _, reason := range slices.Sorted(maps.Keys(withheld)) {
		node.Warnings = append(node.Warnings, fmt.Sprintf("GPUs and partitions that cannot be granted now: %d: %s", withheld[reason], reason))
	}
	podResources, checkpoint := a.UnreadKubelet()
	if podResources != nil {
		node.Warnings = append(node.Warnings, "the kubelet's PodResources cannot be reached, so pods are known by its checkpoint alone, by UID and without names: "+podResources.Error())
	}
	if checkpoint != nil {
		node.Warnings = append(node.Warnings, "the kubelet's checkpoint cannot be read, so what only finished init containers had is not known: "+checkpoint.Error())
	}
	if err := a.StateWriteError(); err != nil {
		node.Warnings = append(node.Warnings, "what a restarted Virgate needs to know is not kept: "+err.Error())
	}
	node.Unread, node.DRA = message(s.unread), a.draStatus()
	var held []sharing.Allocation
	if known := a.holders.Load(); known != nil {
		held, node.HoldersKnown, node.HoldersAt = known.held, true, &known.at
	}
	serving := a.Plugin.Status()
	node.KubeletKnown = serving.KubeletSeen
	resources := listed(serving.Resources, s.gpus)
	node.Resources = resourcesOf(serving.Resources, resources, s.plan, held, node.HoldersKnown)
	node.GPUs, node.Elsewhere = gpusOf(s.gpus, sharing.Usage(resources, held), a.Health.Health())
	for i := range node.GPUs {
		node.GPUs[i].Settings = (*a.gpuSettings.list.Load())[node.GPUs[i].UUID]
		node.GPUs[i].MPS = daemonsOf(a.mps.view.Load(), node.GPUs[i].Units)
	}
	addUtilization(&node, a.lastSample.Load().Report)
	return node
}

func (a *agent) role() status.Role {
	switch {
	case a.draining.Load():
		return status.RoleDraining
	case a.serving.Load():
		return status.RoleServing
	case a.standby.Load():
		return status.RoleStandby
	default:
		return status.RoleStarting
	}
}

// unready says why this program is not ready.
func (a *agent) unready() []string {
	switch {
	case a.serving.Load():
	case a.standby.Load():
		return nil // Another Virgate serves this node.
	default:
		return []string{"not serving yet"}
	}
	s := a.state.Load()
	var reasons []string
	switch {
	case s.profile == nil && s.rejected != nil:
		reasons = append(reasons, "no profile: "+s.rejected.Error())
	case s.profile == nil:
		reasons = append(reasons, "no profile yet")
	case !s.planned && s.unread != nil:
		reasons = append(reasons, "GPUs not read: "+s.unread.Error())
	case !s.planned:
		reasons = append(reasons, "GPUs not read yet")
	}
	status := a.Plugin.Status()
	if s.planned && !status.Served {
		reasons = append(reasons, "plan not served yet")
	}
	for _, name := range unregistered(status) {
		reasons = append(reasons, name+": not registered with the kubelet")
	}
	return reasons
}

// unregistered are the resources that the kubelet does not listen to.
func unregistered(status plugin.Status) (names []string) {
	for _, r := range status.Resources {
		if r.Streams != 1 {
			names = append(names, r.Name)
		}
	}
	return names
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
func resourcesOf(served []plugin.ResourceStatus, listed []sharing.Resource, plan sharing.Plan, held []sharing.Allocation, known bool) []status.Resource {
	byName := map[string]status.Resource{}
	for i, r := range served {
		resource := status.Resource{
			Name: r.Name, Dropped: r.Dropped, Streams: r.Streams, Devices: r.Devices, Healthy: r.Healthy, Leaving: r.Leaving,
			Refused: maps.Clone(r.Refused),
		}
		maps.DeleteFunc(resource.Refused, func(_ plugin.RefusalReason, count uint64) bool { return count == 0 })
		if !r.Dropped {
			resource.Strategy = listed[i].Strategy()
		}
		byName[r.Name] = resource
	}
	for _, r := range plan.Resources {
		resource := byName[r.Name]
		resource.Name, resource.Strategy = r.Name, cmp.Or(resource.Strategy, r.Strategy())
		byName[r.Name] = resource
	}
	devices := map[string]int{} // Those held.
	for _, allocation := range held {
		devices[allocation.Resource] += len(allocation.Devices)
	}
	free := map[string]int{}
	for _, count := range sharing.CountDevices(nil, listed, held) {
		free[count.Resource] += count.Free
	}
	all := make([]status.Resource, 0, len(byName))
	for name, resource := range byName {
		if known {
			resource.Held, resource.Free = new(devices[name]), new(free[name])
		}
		all = append(all, resource)
	}
	slices.SortFunc(all, func(a, b status.Resource) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// gpusOf joins the GPUs with who holds what. Elsewhere are held units of none of them.
func gpusOf(gpus []sharing.GPU, usage []sharing.UnitUsage, health sharing.HealthReport) (list []status.GPU, elsewhere []status.Unit) {
	used := map[string]sharing.UnitUsage{}
	for _, u := range usage {
		used[u.Unit.ID] = u
	}
	states := map[string]sharing.UnitHealth{}
	for _, u := range health.Units {
		states[u.Unit] = u
	}
	unit := func(id, index string, unitHealth sharing.Health, memory uint64) status.Unit {
		u := used[id]
		delete(used, id)
		shown := status.Unit{
			ID: id, Index: index, Memory: memory, Resource: u.Resource, Replicas: u.Unit.Replicas,
			Health: healthOf(states, id, unitHealth), Holders: make([]status.Holder, len(u.Holders)),
		}
		for i, h := range u.Holders {
			shown.Holders[i] = status.Holder{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Resource: h.Resource, Devices: h.Devices, Claim: h.Claim, AnyGPU: h.AnyGPU}
		}
		return shown
	}
	list = make([]status.GPU, 0, len(gpus))
	for _, g := range slices.SortedFunc(slices.Values(gpus), func(a, b sharing.GPU) int { return cmp.Compare(a.Index, b.Index) }) {
		gpu := status.GPU{
			UUID: g.UUID, Index: g.Index, DriverIndex: g.DriverIndex, Model: g.Model, Memory: g.Memory, MIG: g.MIG,
			Health: healthOf(states, g.UUID, g.Health), Units: []status.Unit{},
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
	elsewhere = []status.Unit{}
	for _, u := range usage {
		if _, left := used[u.Unit.ID]; left {
			elsewhere = append(elsewhere, unit(u.Unit.ID, u.Unit.Index, u.Unit.Health, 0))
		}
	}
	return list, elsewhere
}

// healthOf is the unit's reported health, or else what its fault says.
func healthOf(states map[string]sharing.UnitHealth, id string, health sharing.Health) status.Health {
	if known, ok := states[id]; ok {
		return status.Health{State: known.State, Reason: known.Reason, Explanation: known.Explanation, Since: new(known.Since)}
	}
	if !health.Healthy() {
		return status.Health{State: sharing.Unhealthy, Reason: health.Reason}
	}
	return status.Health{State: sharing.Healthy}
}

func addUtilization(node *status.Status, report sharing.UtilizationReport) {
	node.Attributed = report.Attributed
	gpus := gpuUtilizations(report)
	type user struct {
		unit      string
		container sharing.Container
	}
	users := map[user]*status.Use{}
	for _, c := range report.Containers {
		users[user{c.Unit, c.Container}] = &status.Use{
			Memory: c.Memory, SM: c.SM, Processes: c.Processes, OverShare: c.OverShare, Limit: c.Limit, OverLimit: c.OverLimit,
		}
	}
	for g := range node.GPUs {
		gpu := &node.GPUs[g]
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
func gpuUtilizations(report sharing.UtilizationReport) map[string]*status.Use {
	gpus := map[string]*status.Use{}
	for _, b := range report.GPUs {
		gpus[b.GPU] = &status.Use{Memory: b.Memory, SM: b.SM, Celsius: b.Celsius, Throttled: b.Throttled}
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
