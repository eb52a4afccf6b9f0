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
	order      map[string]int // of units, for grants that do not depend on chance
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
	unit sharing.Unit
	// fault says why the unit must not be used; empty when it may.
	fault string
	use   *use
}

// use records when Allocate last granted a device and GetPreferredAllocation
// last named it, in Unix nanoseconds; 0 for never.
type use struct{ granted, named atomic.Int64 }

// newGeneration makes the generation that follows previous, which may be nil.
// Where the list is the same, streams have nothing to send and go on waiting.
func newGeneration(resource sharing.Resource, list List, terms terms, faults map[string]string, units map[string]sharing.Unit, previous *generation) *generation {
	devices := make([]sharing.Device, len(list.Entries))
	var behind []sharing.Unit
	g := &generation{
		resource: resource, list: list, terms: terms,
		devices:    make(map[string]served, len(list.Entries)),
		order:      map[string]int{},
		superseded: make(chan struct{}),
	}
	for i, e := range list.Entries {
		devices[i] = e.Device
		d := served{unit: sharing.Unit{ID: e.Unit, Index: e.Index}, use: &use{}}
		if previous != nil {
			if before, ok := previous.devices[e.ID]; ok {
				d = before
			}
		}
		if unit, ok := units[e.Unit]; ok {
			d.unit = unit
		}
		fault, present := faults[e.Unit]
		if !present {
			fault = "no longer on this node"
		}
		d.fault = fault
		g.devices[e.ID] = d
		if _, again := g.order[e.Unit]; !again {
			behind = append(behind, d.unit)
		}
		g.order[e.Unit] = i
	}
	g.index = sharing.NewIndex(devices, behind, resource.Policy)
	if previous != nil && slices.EqualFunc(previous.list.Entries, list.Entries, func(a, b Entry) bool { return a.Device == b.Device }) {
		g.response, g.superseded = previous.response, previous.superseded
		return g
	}
	g.response = listResponse(devices)
	return g
}

// repeated is the same generation, to be sent once more.
func (g *generation) repeated() *generation {
	again := *g
	again.superseded = make(chan struct{})
	return &again
}

func listResponse(devices []sharing.Device) *api.ListAndWatchResponse {
	response := &api.ListAndWatchResponse{Devices: make([]*api.Device, len(devices))}
	for i, d := range devices {
		health := api.Unhealthy
		if d.Healthy {
			health = api.Healthy
		}
		response.Devices[i] = &api.Device{ID: d.ID, Health: health}
		if d.NUMANode >= 0 {
			response.Devices[i].Topology = &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: int64(d.NUMANode)}}}
		}
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
