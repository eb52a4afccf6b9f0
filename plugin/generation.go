package plugin

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

// generation is what a resource serves until something changes. It is immutable
// except for the use records, which later generations share, and superseded, which
// is closed when another list takes its place.
type generation struct {
	resource sharing.Resource
	list     List
	terms    grantTerms
	choices  *sharing.DeviceSet
	// units are those behind the list, by ID, and withheld says which of them cannot be granted
	// in the way in which the plan offers them, and why.
	units    map[string]sharing.Unit
	withheld map[string]string
	// uses are by place in the list.
	uses []*deviceUse
	// version counts the lists of the server that have other devices than the one before.
	version    int64
	superseded chan struct{}
}

// grantTerms are what grants depend on apart from the list.
type grantTerms struct {
	grants sharing.Grants
	host   *Host
}

// deviceUse records when Allocate last granted a device and GetPreferredAllocation
// last chose it, since when it is refused, and since when one that is Whole is granted as a
// time-slice, in Unix nanoseconds; 0 for never.
type deviceUse struct{ granted, preferred, closed, shared atomic.Int64 }

// newGeneration makes the generation that follows previous, which may be nil. When
// the devices are the same, streams have nothing to send and go on waiting.
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
		if !e.Closed {
			record.closed.Store(0)
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

// servedUnit returns the entry's unit as the plan has it, or else as it last was, or else
// as far as the list knows it.
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

// response is the list for the kubelet. It is made when a stream needs it, because it is
// large. Devices of one NUMA node share their topology.
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

// rpcState adds what the use records say.
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
		note(into.Closed, id, use.closed.Load())
		note(into.Shared, id, use.shared.Load())
	}
}
