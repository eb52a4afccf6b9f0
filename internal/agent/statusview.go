package agent

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// showStatus answers with the Status as JSON.
func (a *agent) showStatus(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, a.status())
}

// status is what goes on now.
func (a *agent) status() Status {
	s, p := a.state.Load(), a.progress.Load()
	unready := a.unready()
	status := Status{
		Node: a.NodeName, Version: a.Version, Role: a.role(),
		Ready: len(unready) == 0, Unready: append([]string{}, unready...),
		Profile:  p.status(s),
		Warnings: append([]string{}, s.plan.Warnings...),
	}
	withheld := count(s.host.Obstacles)
	for _, reason := range slices.Sorted(maps.Keys(withheld)) {
		status.Warnings = append(status.Warnings, fmt.Sprintf("GPUs and partitions that cannot be granted now: %d: %s", withheld[reason], reason))
	}
	if err := a.unkept(); err != nil {
		status.Warnings = append(status.Warnings, "what a restarted Virgate needs to know is not kept: "+err.Error())
	}
	if s.unread != nil {
		status.Unread = s.unread.Error()
	}
	var held []sharing.Allocation
	if known := a.allocations.Load(); known != nil {
		held, status.HoldersKnown = *known, true
	}
	var health sharing.HealthReport
	if a.Health != nil {
		health = a.Health.Health()
	}
	serving := a.Plugin.Status()
	status.KubeletKnown = serving.KubeletSeen
	usage := sharing.Usage(s.plan.Resources, held)
	status.Resources = resourcesOf(serving.Resources, s.plan, held, usage, status.HoldersKnown)
	status.Layouts = append([]sharing.BoardLayout{}, a.layouts()...)
	status.GPUs, status.Elsewhere = gpusOf(s.gpus, usage, health)
	addUse(&status, a.observed.Load().report)
	return status
}

// unkept is what Kept says.
func (a *agent) unkept() error {
	if a.Kept == nil {
		return nil
	}
	return a.Kept()
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

// resourcesOf joins what is served with what is planned.
func resourcesOf(served []plugin.ResourceStatus, plan sharing.Plan, held []sharing.Allocation, usage []sharing.UnitUsage, known bool) []ResourceStatus {
	byName := map[string]ResourceStatus{}
	for _, r := range served {
		byName[r.Name] = ResourceStatus{
			Name: r.Name, Dropped: r.Dropped, Streams: r.Streams, Devices: r.Devices, Healthy: r.Healthy, Leaving: r.Leaving,
			Refused: refusals(r),
		}
	}
	for _, r := range plan.Resources {
		status := byName[r.Name]
		status.Name, status.Strategy = r.Name, r.Strategy()
		byName[r.Name] = status
	}
	all := make([]ResourceStatus, 0, len(byName))
	for _, status := range byName {
		if known {
			count, free := heldAs(status.Name, held), freeOf(status.Name, usage)
			status.Held, status.Free = &count, &free
		}
		all = append(all, status)
	}
	slices.SortFunc(all, func(a, b ResourceStatus) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// refusals are the counts that are not 0; nil when all are.
func refusals(r plugin.ResourceStatus) map[plugin.Reason]uint64 {
	var counts map[plugin.Reason]uint64
	for why, count := range r.Refused {
		if count == 0 {
			continue
		}
		if counts == nil {
			counts = map[plugin.Reason]uint64{}
		}
		counts[why] = count
	}
	return counts
}

// heldAs counts the devices that are held under the name.
func heldAs(name string, held []sharing.Allocation) int {
	count := 0
	for _, allocation := range held {
		if allocation.Resource == name {
			count += len(allocation.Devices)
		}
	}
	return count
}

// freeOf counts the devices that healthy units of the resource have left. Which
// of a unit's devices are held does not matter: their IDs mean nothing.
func freeOf(name string, usage []sharing.UnitUsage) int {
	count := 0
	for _, unit := range usage {
		if unit.Resource == name && unit.Unit.Fault == "" {
			count += max(0, unit.Unit.Replicas-unit.Held())
		}
	}
	return count
}

// gpusOf joins the boards with who holds what. What is held and is no unit of a
// board is elsewhere.
func gpusOf(gpus []sharing.GPU, usage []sharing.UnitUsage, health sharing.HealthReport) (boards []GPUStatus, elsewhere []UnitStatus) {
	used := map[string]sharing.UnitUsage{}
	for _, u := range usage {
		used[u.Unit.ID] = u
	}
	states := map[string]sharing.UnitHealth{}
	for _, u := range health.Units {
		states[u.Unit] = u
	}
	unit := func(id, index, fault string, memory uint64) UnitStatus {
		u := used[id]
		delete(used, id)
		return UnitStatus{
			ID: id, Index: index, Memory: memory, Resource: u.Resource, Replicas: u.Unit.Replicas,
			Health: healthOf(states, id, fault), Holders: holdersOf(u),
		}
	}
	boards = make([]GPUStatus, 0, len(gpus))
	for _, g := range slices.SortedFunc(slices.Values(gpus), func(a, b sharing.GPU) int { return cmp.Compare(a.Index, b.Index) }) {
		board := GPUStatus{
			UUID: g.UUID, Index: g.Index, Model: g.Model, Memory: g.Memory, MIG: g.MIG,
			Health: healthOf(states, g.UUID, g.Fault), Units: []UnitStatus{},
		}
		index := strconv.Itoa(g.Index)
		for _, p := range g.Partitions {
			u := unit(p.UUID, index+":"+strconv.Itoa(p.Index), p.Fault, p.Memory)
			u.Profile, u.Placement = p.Profile.String(), &p.Placement
			board.Units = append(board.Units, u)
		}
		if _, held := used[g.UUID]; held || len(g.Partitions) == 0 {
			board.Units = append(board.Units, unit(g.UUID, index, g.Fault, g.Memory))
		}
		boards = append(boards, board)
	}
	elsewhere = []UnitStatus{}
	for _, u := range usage {
		if _, left := used[u.Unit.ID]; left {
			elsewhere = append(elsewhere, UnitStatus{
				ID: u.Unit.ID, Index: u.Unit.Index, Resource: u.Resource, Replicas: u.Unit.Replicas,
				Health: healthOf(states, u.Unit.ID, u.Unit.Fault), Holders: holdersOf(u),
			})
		}
	}
	return boards, elsewhere
}

// healthOf is the health that is reported of the unit, and where none is, what
// its fault says.
func healthOf(states map[string]sharing.UnitHealth, id, fault string) HealthStatus {
	if known, ok := states[id]; ok {
		since := known.Since
		return HealthStatus{State: known.State, Reason: known.Reason, Since: &since}
	}
	if fault != "" {
		return HealthStatus{State: sharing.Unhealthy, Reason: fault}
	}
	return HealthStatus{State: sharing.Healthy}
}

func holdersOf(u sharing.UnitUsage) []Holder {
	holders := make([]Holder, len(u.Holders))
	for i, h := range u.Holders {
		holders[i] = Holder{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container, Resource: h.Resource, Devices: h.Devices}
	}
	return holders
}
