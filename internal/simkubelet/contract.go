package simkubelet

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// checkList returns, sorted, what is wrong with a resource's next list:
// previous are the devices before it, nil for none, and held those of the pods.
// The kubelet itself says nothing of any of this; some of it lets it panic
// later.
func checkList(resource string, previous *devices, list []*api.Device, held set) []string {
	var wrong []string
	complain := func(format string, arguments ...any) {
		wrong = append(wrong, resource+": "+fmt.Sprintf(format, arguments...))
	}
	seen := set{}
	for _, device := range list {
		switch {
		case device.ID == "":
			complain("list has a device without ID")
		case seen.has(device.ID):
			complain("list has %s twice", device.ID)
		}
		seen[device.ID] = struct{}{}
		if device.Health != api.Healthy && device.Health != api.Unhealthy {
			complain("health %q of %s counts as unhealthy", device.Health, device.ID)
		}
		if slices.ContainsFunc(nodesOf(device), func(node int64) bool { return node < 0 }) {
			complain("%s is on a negative NUMA node: no node is no topology", device.ID)
		}
		if device.Topology != nil && len(device.Topology.Nodes) == 0 {
			complain("%s has a topology without nodes: GetAllocatableResources does not show it", device.ID)
		}
	}
	if previous != nil {
		if dropped := previous.healthy.without(seen); len(dropped) > 0 {
			complain("list drops devices that were Healthy in the list before: %s", join(dropped))
		}
	}
	if dropped := held.without(seen); len(dropped) > 0 {
		complain("list drops devices that pods hold: %s", join(dropped))
	}
	slices.Sort(wrong)
	return wrong
}

// checkUnits looks for hardware that could be handed out under two names: a
// unit, which is an ID up to "::", with free healthy devices in two resources.
// The caller holds the lock.
func (k *Kubelet) checkUnits(p *process) {
	held := k.heldByPods(p)
	offered := map[string]string{}
	conflicts := map[[2]string]set{}
	for _, resource := range slices.Sorted(maps.Keys(p.devices)) {
		for id := range p.devices[resource].healthy {
			if held[resource].has(id) || p.admitting[resource].has(id) {
				continue
			}
			unit, _, _ := strings.Cut(id, "::")
			other, ok := offered[unit]
			switch {
			case !ok:
				offered[unit] = resource
			case other != resource:
				pair := [2]string{other, resource}
				conflicts[pair] = conflicts[pair].union(setOf(unit))
			}
		}
	}
	for _, pair := range slices.SortedFunc(maps.Keys(conflicts), func(a, b [2]string) int {
		return slices.Compare(a[:], b[:])
	}) {
		k.violate("units with free healthy devices in both %s and %s: %s", pair[0], pair[1], join(conflicts[pair]))
	}
}

// join lists IDs for a message, the first few of many.
func join(ids set) string {
	const shown = 4
	sorted := ids.sorted()
	if more := len(sorted) - shown; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(sorted[:shown], ", "), more)
	}
	return strings.Join(sorted, ", ")
}
