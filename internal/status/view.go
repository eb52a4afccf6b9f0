package status

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// Listed returns the resources as they are listed to the kubelet.
func Listed(served []plugin.ResourceStatus, gpus []sharing.GPU) []sharing.Resource {
	gpu := sharing.GPUByUnit(gpus)
	resources := make([]sharing.Resource, len(served))
	for i, r := range served {
		resources[i] = sharing.Resource{
			Name:    r.Name,
			Units:   r.Units,
			Devices: make([]sharing.Device, len(r.Listed)),
		}
		for j, e := range r.Listed {
			resources[i].Devices[j] = e.Device
		}
		for j := range r.Units { // A unit that was never planned has no GPU yet.
			r.Units[j].GPU = cmp.Or(r.Units[j].GPU, gpu[r.Units[j].ID])
		}
	}
	return resources
}

// Resources joins the served resources with the planned ones. listed are the served ones as they
// are listed to the kubelet, and known is true if held is known.
func Resources(
	served []plugin.ResourceStatus,
	listed []sharing.Resource,
	plan sharing.Plan,
	held []sharing.Allocation,
	known bool,
) []Resource {
	byName := map[string]Resource{}
	for i, r := range served {
		resource := Resource{
			Name:    r.Name,
			Dropped: r.Dropped,
			Streams: r.Streams,
			Devices: r.Devices,
			Healthy: r.Healthy,
			Leaving: r.Leaving,
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
	devices := map[string]int{} // The held ones.
	for _, allocation := range held {
		devices[allocation.Resource] += len(allocation.Devices)
	}
	free := map[string]int{}
	for _, count := range sharing.CountDevices(nil, listed, held) {
		free[count.Resource] += count.Free
	}
	all := make([]Resource, 0, len(byName))
	for name, resource := range byName {
		if known {
			resource.Held, resource.Free = new(devices[name]), new(free[name])
		}
		all = append(all, resource)
	}
	slices.SortFunc(all, func(a, b Resource) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// GPUs joins the GPUs with their holders. elsewhere are the held units that belong to none of them.
func GPUs(gpus []sharing.GPU, usage []sharing.UnitUsage, health sharing.HealthReport) (list []GPU, elsewhere []Unit) {
	used := map[string]sharing.UnitUsage{}
	for _, u := range usage {
		used[u.Unit.ID] = u
	}
	states := map[string]sharing.UnitHealth{}
	for _, u := range health.Units {
		states[u.Unit] = u
	}
	unit := func(id, index string, unitHealth sharing.Health, memory uint64) Unit {
		u := used[id]
		delete(used, id)
		shown := Unit{
			ID:       id,
			Index:    index,
			Memory:   memory,
			Resource: u.Resource,
			Replicas: u.Unit.Replicas,
			Health:   healthOf(states, id, unitHealth),
			Holders:  make([]Holder, len(u.Holders)),
		}
		for i, h := range u.Holders {
			shown.Holders[i] = Holder{
				Namespace: h.Namespace,
				Pod:       h.Pod,
				Container: h.Container,
				Resource:  h.Resource,
				Devices:   h.Devices,
				Claim:     h.Claim,
				AnyGPU:    h.AnyGPU,
			}
		}
		return shown
	}
	list = make([]GPU, 0, len(gpus))
	for _, g := range slices.SortedFunc(slices.Values(gpus),
		func(a, b sharing.GPU) int { return cmp.Compare(a.Index, b.Index) }) {
		gpu := GPU{
			UUID:        g.UUID,
			Index:       g.Index,
			DriverIndex: g.DriverIndex,
			Model:       g.Model,
			Memory:      g.Memory,
			MIG:         g.MIG,
			Health:      healthOf(states, g.UUID, g.Health),
			Units:       []Unit{},
		}
		for _, p := range g.Partitions {
			u := unit(p.UUID, g.PartitionIndex(p), p.Health, p.Memory)
			u.Profile = p.Profile.String()
			if p.Placement.Size > 0 {
				u.Placement = &p.Placement
			}
			gpu.Units = append(gpu.Units, u)
		}
		if _, held := used[g.UUID]; held || len(g.Partitions) == 0 {
			gpu.Units = append(gpu.Units, unit(g.UUID, strconv.Itoa(g.Index), g.Health, g.Memory))
		}
		list = append(list, gpu)
	}
	elsewhere = []Unit{}
	for _, u := range usage {
		if _, left := used[u.Unit.ID]; left {
			elsewhere = append(elsewhere, unit(u.Unit.ID, u.Unit.Index, u.Unit.Health, 0))
		}
	}
	return list, elsewhere
}

// healthOf returns the unit's reported health, or else what its fault says.
func healthOf(states map[string]sharing.UnitHealth, id string, health sharing.Health) Health {
	if known, ok := states[id]; ok {
		return Health{
			State:       known.State,
			Reason:      known.Reason,
			Explanation: known.Explanation,
			Since:       new(known.Since),
		}
	}
	if !health.Healthy() {
		return Health{State: sharing.Unhealthy, Reason: health.Reason}
	}
	return Health{State: sharing.Healthy}
}

// AddUtilization adds how the GPUs are used, and by which containers.
func (s *Status) AddUtilization(report sharing.UtilizationReport) {
	s.Attributed = report.Attributed
	gpus := gpuUtilizations(report)
	type user struct {
		unit      string
		container sharing.Container
	}
	users := map[user]*Use{}
	for _, c := range report.Containers {
		users[user{c.Unit, c.Container}] = &Use{
			Memory:    c.Memory,
			SM:        c.SM,
			Processes: c.Processes,
			OverShare: c.OverShare,
			Limit:     c.Limit,
			OverLimit: c.OverLimit,
		}
	}
	for g := range s.GPUs {
		gpu := &s.GPUs[g]
		gpu.Use = gpus[gpu.UUID]
		for _, unit := range gpu.Units {
			for h := range unit.Holders {
				holder := &unit.Holders[h]
				holder.Use = users[user{unit.ID, sharing.Container{
					Namespace: holder.Namespace,
					Pod:       holder.Pod,
					Name:      holder.Container,
				}}]
			}
		}
	}
}

// gpuUtilizations returns the use of each whole GPU, by UUID.
func gpuUtilizations(report sharing.UtilizationReport) map[string]*Use {
	gpus := map[string]*Use{}
	for _, b := range report.GPUs {
		gpus[b.GPU] = &Use{
			Memory:    b.Memory,
			SM:        b.SM,
			Celsius:   b.Celsius,
			Throttled: b.Throttled,
		}
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
