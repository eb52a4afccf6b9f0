package plugin

import (
	"slices"
	"sync/atomic"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

// generation is one state of a resource. It is immutable but for the use
// records, which outlive it, and superseded, which is closed when another list
// takes its place.
type generation struct {
	resource   sharing.Resource
	list       List
	terms      terms
	index      *sharing.Index
	devices    map[string]served
	units      map[string]*backing
	response   *api.ListAndWatchResponse
	superseded chan struct{}
}

// terms are what grants depend on beside the list.
type terms struct {
	grants sharing.Grants
	host   *Host
}

// served is what Allocate knows of a device.
type served struct {
	unit *backing
	use  *use
}

// backing is a unit behind devices of the list. Its devices share it: a unit is
// some hundred bytes, and may have thousands of them.
type backing struct {
	sharing.Unit
	// fault says why the unit must not be used; empty when it may.
	fault string
	// place is the unit's in the list, for grants that do not depend on chance.
	place int
}

// use records when Allocate last granted a device and GetPreferredAllocation
// last named it, in Unix nanoseconds; 0 for never.
type use struct{ granted, named atomic.Int64 }

// newGeneration makes the generation that follows previous, which may be nil.
// Where the list is the same, streams have nothing to send and go on waiting.
func newGeneration(resource sharing.Resource, list List, terms terms, faults map[string]string, units map[string]sharing.Unit, previous *generation) *generation {
	g := &generation{
		resource: resource, list: list, terms: terms,
		devices:    make(map[string]served, len(list.Entries)),
		units:      map[string]*backing{},
		superseded: make(chan struct{}),
	}
	devices := make([]sharing.Device, len(list.Entries))
	var behind []sharing.Unit
	var fresh []use // Made together: a list may have thousands.
	for i, e := range list.Entries {
		devices[i] = e.Device
		unit := g.units[e.Unit]
		if unit == nil {
			unit = newBacking(e, faults, units, previous)
			unit.place = len(behind)
			g.units[e.Unit] = unit
			behind = append(behind, unit.Unit)
		}
		var record *use
		if previous != nil {
			record = previous.devices[e.ID].use
		}
		if record == nil {
			if len(fresh) == 0 {
				fresh = make([]use, len(list.Entries)-i)
			}
			record, fresh = &fresh[0], fresh[1:]
		}
		g.devices[e.ID] = served{unit, record}
	}
	g.index = sharing.NewIndex(devices, behind, resource.Policy)
	if previous != nil && slices.EqualFunc(previous.list.Entries, list.Entries, func(a, b Entry) bool { return a.Device == b.Device }) {
		g.response, g.superseded = previous.response, previous.superseded
		return g
	}
	g.response = listResponse(devices)
	return g
}

// newBacking is the unit behind the entry as the plan has it, else as it last
// was, else as far as the list knows it.
func newBacking(e Entry, faults map[string]string, units map[string]sharing.Unit, previous *generation) *backing {
	b := &backing{Unit: sharing.Unit{ID: e.Unit, Index: e.Index}}
	if previous != nil && previous.units[e.Unit] != nil {
		b.Unit = previous.units[e.Unit].Unit
	}
	if unit, ok := units[e.Unit]; ok {
		b.Unit = unit
	}
	fault, present := faults[e.Unit]
	if !present {
		fault = "no longer on this node"
	}
	b.fault = fault
	return b
}

// repeated is the same generation, to be sent once more.
func (g *generation) repeated() *generation {
	again := *g
	again.superseded = make(chan struct{})
	return &again
}

// listResponse is the list for the kubelet. It is never changed, so devices of
// one NUMA node share what says so.
func listResponse(devices []sharing.Device) *api.ListAndWatchResponse {
	response := &api.ListAndWatchResponse{Devices: make([]*api.Device, len(devices))}
	listed := make([]api.Device, len(devices))
	near := map[int]*api.TopologyInfo{}
	for i, d := range devices {
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

// calls adds what the use records say.
func (g *generation) calls(into Calls) {
	granted, named := map[string]time.Time{}, map[string]time.Time{}
	for id, d := range g.devices {
		if at := d.use.granted.Load(); at != 0 {
			granted[id] = time.Unix(0, at)
		}
		if at := d.use.named.Load(); at != 0 {
			named[id] = time.Unix(0, at)
		}
	}
	into.Granted[g.resource.Name], into.Named[g.resource.Name] = granted, named
}
