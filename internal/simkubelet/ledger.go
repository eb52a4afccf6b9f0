package simkubelet

import (
	"maps"
	"slices"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// ledger is who holds what. It is right for pods that the kubelet knows, and
// still names pods that are gone until the next purge.
type ledger map[holder]holding

// holder is one container's share of one resource.
type holder struct{ uid, container, resource string }

type holding struct {
	// byNode are the device IDs by NUMA node, noNode for those without; one on
	// two nodes is there twice.
	byNode map[int64][]string
	// response is what the plugin answered. The container gets it at each of
	// its starts.
	response *api.ContainerAllocateResponse
}

// noNode stands for "no NUMA node" in the ledger and the checkpoint.
const noNode = -1

func newHolding(ids set, known map[string]*api.Device, response *api.ContainerAllocateResponse) holding {
	h := holding{byNode: map[int64][]string{}, response: response}
	for _, id := range ids.sorted() {
		nodes := nodesOf(known[id])
		if len(nodes) == 0 {
			nodes = []int64{noNode}
		}
		for _, node := range nodes {
			h.byNode[node] = append(h.byNode[node], id)
		}
	}
	return h
}

func (h holding) ids() set {
	ids := set{}
	for _, onNode := range h.byNode {
		ids.add(setOf(onNode...))
	}
	return ids
}

// holders are sorted by pod, container and resource.
func (l ledger) holders() []holder {
	return slices.SortedFunc(maps.Keys(l), func(a, b holder) int {
		return slices.Compare([]string{a.uid, a.container, a.resource}, []string{b.uid, b.container, b.resource})
	})
}

// held are the devices that the pods with these UIDs hold, by resource.
func (l ledger) held(uids set) map[string]set {
	held := map[string]set{}
	for holder, holding := range l {
		if uids.has(holder.uid) {
			held[holder.resource] = held[holder.resource].union(holding.ids())
		}
	}
	return held
}

func (l ledger) uids() set {
	uids := set{}
	for holder := range l {
		uids[holder.uid] = struct{}{}
	}
	return uids
}

// resourcesOf are the names of which the container holds devices, sorted.
func (l ledger) resourcesOf(uid, container string) []string {
	var names []string
	for holder := range l {
		if holder.uid == uid && holder.container == container {
			names = append(names, holder.resource)
		}
	}
	slices.Sort(names)
	return names
}

// purge forgets the pods that are gone. The kubelet does so before it gives
// devices to a pod and before it answers List, never else, and not until it has
// heard of all pods (UpdateAllocatedDevices). The caller holds the lock.
func (k *Kubelet) purge(p *process) {
	if !p.sourcesReady {
		return
	}
	gone := p.ledger.uids().without(k.livePods())
	if len(gone) == 0 {
		return
	}
	maps.DeleteFunc(p.ledger, func(h holder, _ holding) bool { return gone.has(h.uid) })
	p.recount()
}

// recount makes the allocated devices those of the ledger and of the admission
// under way.
func (p *process) recount() {
	p.allocated = p.ledger.held(p.ledger.uids())
	for resource, ids := range p.admitting {
		p.allocated[resource] = p.allocated[resource].union(ids)
	}
}

// heldByPods are the devices that living pods hold, by resource, whether or not
// this process has heard of the pods. The caller holds the lock.
func (k *Kubelet) heldByPods(p *process) map[string]set {
	return p.ledger.held(k.livePods())
}
