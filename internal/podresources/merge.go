package podresources

import (
	"cmp"
	"maps"
	"slices"

	"github.com/virgate/virgate/sharing"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// devicesByResource gathers entries, of which a device has one for each of its
// NUMA nodes.
func devicesByResource(entries []*api.ContainerDevices) map[string][]string {
	devices := map[string][]string{}
	for _, entry := range entries {
		if len(entry.DeviceIds) > 0 {
			devices[entry.ResourceName] = append(devices[entry.ResourceName], entry.DeviceIds...)
		}
	}
	for resource, ids := range devices {
		slices.Sort(ids)
		devices[resource] = slices.Compact(ids)
	}
	return devices
}

// device is an ID with its resource: IDs are unique in a resource only.
type device struct{ resource, id string }

// owner is a container that PodResources shows.
type owner struct{ namespace, pod, container string }

// merge adds to the listed pods what the checkpoint's entries have beyond them:
// the devices that no listed container holds.
func merge(listed []*api.PodResources, entries []Entry) []sharing.Allocation {
	var held []sharing.Allocation
	owners := map[device]owner{}
	for _, pod := range listed {
		for _, container := range pod.Containers {
			by := owner{pod.Namespace, pod.Name, container.Name}
			for resource, ids := range devicesByResource(container.Devices) {
				for _, id := range ids {
					owners[device{resource, id}] = by
				}
				held = append(held, allocation(by, resource, ids))
			}
		}
	}
	pods := identify(entries, owners)
	for _, entry := range entries {
		hidden := slices.DeleteFunc(slices.Clone(entry.Devices), func(id string) bool {
			_, shown := owners[device{entry.Resource, id}]
			return shown
		})
		if len(hidden) == 0 {
			continue
		}
		by, ok := pods[entry.PodUID]
		if !ok {
			by = owner{pod: "uid:" + entry.PodUID}
		}
		by.container = entry.Container
		held = append(held, allocation(by, entry.Resource, hidden))
	}
	slices.SortFunc(held, func(a, b sharing.Allocation) int {
		return cmp.Or(
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Container, b.Container),
			cmp.Compare(a.Resource, b.Resource),
		)
	})
	return held
}

func allocation(by owner, resource string, ids []string) sharing.Allocation {
	return sharing.Allocation{Namespace: by.namespace, Pod: by.pod, Container: by.container, Resource: resource, Devices: ids}
}

// identify finds the pods behind UIDs: those of which a container of the same
// name is shown with the same device. Their containers are left empty.
func identify(entries []Entry, owners map[device]owner) map[string]owner {
	pods := map[string]owner{}
	for _, entry := range entries {
		for _, id := range entry.Devices {
			if by, shown := owners[device{entry.Resource, id}]; shown && by.container == entry.Container {
				pods[entry.PodUID] = owner{namespace: by.namespace, pod: by.pod}
			}
		}
	}
	return pods
}

// sortedUnion is the IDs of all lists, sorted, each once; nil for none.
func sortedUnion(lists map[int64][]string) []string {
	ids := slices.Concat(slices.Collect(maps.Values(lists))...)
	slices.Sort(ids)
	return slices.Compact(ids)
}
