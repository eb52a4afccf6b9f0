package plugin

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// generation is what a resource serves until something changes. It is immutable except for the use
// records, which later generations share, and superseded, which is closed when a different list
// replaces this one.
type generation struct {
	resource sharing.Resource
	list     List
	terms    grantTerms
	choices  *sharing.DeviceSet
	// units are the units of the listed devices, by ID. withheld gives the reason for each unit
	// that cannot be granted now in the mode in which the plan offers it.
	units    map[string]sharing.Unit
	withheld map[string]string
	// uses has the record of each device, in the order of the list.
	uses []*deviceUse
	// version increases with each list of the server that has other devices than the previous list.
	version    int64
	superseded chan struct{}
}

// grantTerms are what grants depend on, apart from the list.
type grantTerms struct {
	grants sharing.Grants
	host   *grant.Host
}

// deviceUse has times in Unix nanoseconds, 0 for never: when Allocate last granted the device, when
// GetPreferredAllocation last chose it, since when it is refused (closed), and since when a Whole
// device is granted as a time-slice (shared).
type deviceUse struct{ granted, preferred, refused, shared atomic.Int64 }

// newGeneration returns the generation that follows previous, which may be nil. If the devices are
// the same, streams have nothing to send and keep waiting.
func newGeneration(
	resource sharing.Resource,
	list List,
	terms grantTerms,
	health map[string]sharing.Health,
	units map[string]sharing.Unit,
	previous *generation,
) *generation {
	g := &generation{
		resource:   resource,
		list:       list,
		terms:      terms,
		units:      map[string]sharing.Unit{},
		withheld:   map[string]string{},
		uses:       make([]*deviceUse, len(list.Entries)),
		version:    1,
		superseded: make(chan struct{}),
	}
	for _, u := range resource.Units {
		if !u.Health.Healthy() {
			g.withheld[u.ID] = u.Health.Reason
		}
	}
	devices := make([]sharing.Device, len(list.Entries))
	var fresh []deviceUse // Allocated together: a list may have thousands.
	for i, e := range list.Entries {
		devices[i] = e.Device
		if _, known := g.units[e.Unit]; !known {
			g.units[e.Unit] = servedUnit(e, health, units, previous)
		}
		var record *deviceUse
		if previous != nil {
			if at, ok := previous.choices.Index(e.ID); ok {
				record = previous.uses[at]
			}
		}
		if record == nil {
			if len(fresh) == 0 {
				fresh = make([]deviceUse, len(list.Entries)-i)
			}
			record, fresh = &fresh[0], fresh[1:]
		}
		g.uses[i] = record
		if !e.RefusesAllocate {
			record.refused.Store(0)
		}
		if !e.Whole {
			record.shared.Store(0)
		}
	}
	g.choices = sharing.NewDeviceSet(devices, slices.Collect(maps.Values(g.units)), resource.Policy)
	if previous == nil {
		return g
	}
	g.version = previous.version + 1
	if slices.EqualFunc(previous.list.Entries, list.Entries, func(a, b Entry) bool { return a.Device == b.Device }) {
		g.version, g.superseded = previous.version, previous.superseded
	}
	return g
}

// servedUnit returns the entry's unit from the plan, or else as it last was, or else with what the
// list knows of it.
func servedUnit(
	e Entry,
	health map[string]sharing.Health,
	units map[string]sharing.Unit,
	previous *generation,
) sharing.Unit {
	unit, found := units[e.Unit]
	if !found && previous != nil {
		unit, found = previous.units[e.Unit]
	}
	if !found {
		unit = sharing.Unit{ID: e.Unit, Index: e.Index}
	}
	var present bool
	unit.Health, present = health[e.Unit]
	if !present {
		unit.Health = sharing.Faulty("no longer on this node")
	}
	return unit
}

func (g *generation) repeated() *generation {
	again := *g
	again.superseded = make(chan struct{})
	return &again
}

// response returns the list for the kubelet. It is built only when a stream needs it, because it is
// large. Devices on the same NUMA node share one topology value.
func (g *generation) response() *api.ListAndWatchResponse {
	response := &api.ListAndWatchResponse{Devices: make([]*api.Device, len(g.list.Entries))}
	listed := make([]api.Device, len(g.list.Entries))
	near := map[int]*api.TopologyInfo{}
	for i, d := range g.list.Entries {
		listed[i].ID, listed[i].Health = d.ID, api.Unhealthy
		if d.Healthy {
			listed[i].Health = api.Healthy
		}
		if d.NUMANode >= 0 {
			if near[d.NUMANode] == nil {
				near[d.NUMANode] = &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: int64(d.NUMANode)}}}
			}
			listed[i].Topology = near[d.NUMANode]
		}
		response.Devices[i] = &listed[i]
	}
	return response
}

// rpcState adds the times in the use records to into.
func (g *generation) rpcState(into RPCState) {
	note := func(into DeviceTimes, id string, at int64) {
		if at != 0 {
			into.set(g.resource.Name, id, time.Unix(0, at))
		}
	}
	for i, use := range g.uses {
		id := g.list.Entries[i].ID
		note(into.Granted, id, use.granted.Load())
		note(into.Preferred, id, use.preferred.Load())
		note(into.Refused, id, use.refused.Load())
		note(into.Shared, id, use.shared.Load())
	}
}
