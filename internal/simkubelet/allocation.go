package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// admission allocates devices to a pod (cm/devicemanager/manager.go, Allocate). It
// runs with the allocation mutex held.
type admission struct {
	kubelet *Kubelet
	process *process
	pod     *pod
	// devicesToReuse are the devices of init containers that have ended, by
	// resource.
	devicesToReuse map[string]idSet
}

func newAdmission(k *Kubelet, p *process, pod *pod) *admission {
	return &admission{
		kubelet:        k,
		process:        p,
		pod:            pod,
		devicesToReuse: map[string]idSet{},
	}
}

// run admits the containers, init containers first, one resource at a time. A real kubelet has no
// fixed order of resources; this one sorts them by name.
func (a *admission) run(ctx context.Context) error {
	for _, container := range a.pod.ordered() {
		a.kubelet.lock()
		a.kubelet.updateAllocatedDevices(a.process)
		a.kubelet.unlock()
		for _, resource := range slices.Sorted(maps.Keys(container.Requests)) {
			if err := a.allocate(ctx, container, resource); err != nil {
				return err
			}
		}
		a.updateDevicesToReuse(container)
	}
	return nil
}

func (a *admission) allocate(ctx context.Context, container Container, resource string) error {
	k, p := a.kubelet, a.process
	k.lock()
	defer k.unlock()
	defer func() { delete(p.admitting, resource) }()
	chosen, err := a.devicesToAllocate(ctx, container.Name, resource, container.Requests[resource])
	if err != nil || len(chosen) == 0 {
		return err
	}

	endpoint := p.endpoints[resource]
	if endpoint == nil {
		return fmt.Errorf("unknown Device Plugin %s", resource)
	}
	var response *api.AllocateResponse
	err = a.call(ctx, resource, endpoint, func(ctx context.Context, plugin api.DevicePluginClient) (err error) {
		response, err = plugin.Allocate(ctx, &api.AllocateRequest{
			ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: sets.List(chosen)}},
		})
		return err
	})
	if err != nil {
		return err
	}
	switch n := len(response.ContainerResponses); n {
	case 0:
		return fmt.Errorf("no containers return in allocation response %v", response)
	case 1:
	default:
		k.violation("%s: Allocate for one container got %d answers", resource, n)
	}
	if err := a.checkStillListed(resource, chosen); err != nil {
		return err
	}
	p.podDevices[allocationKey{a.pod.uid, container.Name, resource}] = newDeviceAllocateInfo(chosen,
		p.devices[resource].all, response.ContainerResponses[0])
	event := Event{
		Kind:     Allocated,
		Resource: resource,
		Pod:      a.pod.uid,
	}
	for _, id := range sets.List(chosen) {
		event.Devices = append(event.Devices, Device{ID: id, Healthy: p.devices[resource].healthy.Has(id)})
	}
	k.notify(event)
	k.writeCheckpoint(p)
	return nil
}

// checkStillListed reports the devices that a list dropped while Allocate was in flight. A real
// kubelet dereferences the allocated devices at this point, and panics.
func (a *admission) checkStillListed(resource string, chosen idSet) error {
	gone := chosen
	if devices := a.process.devices[resource]; devices != nil {
		gone = chosen.Difference(sets.KeySet(devices.all))
	}
	if len(gone) == 0 {
		return nil
	}
	a.kubelet.violation("kubelet would panic: %s: devices left the list while Allocate was under way: %s", resource,
		joinSome(gone))
	return errors.New("kubelet would panic")
}

// call calls a plugin without the lock and without a deadline. It is cancelled when
// ctx or the process ends.
func (a *admission) call(
	ctx context.Context,
	resource string,
	to *endpoint,
	method func(context.Context, api.DevicePluginClient) error,
) error {
	if to.client == nil || !to.stopped.IsZero() {
		return fmt.Errorf("endpoint of %s has been stopped", resource)
	}
	cancellable, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	a.kubelet.unlock()
	defer a.kubelet.lock()
	return method(cancellable, to.client.plugin)
}

// updateDevicesToReuse adds the devices of an init container that has ended, and removes those that
// any other container keeps.
func (a *admission) updateDevicesToReuse(container Container) {
	a.kubelet.lock()
	defer a.kubelet.unlock()
	for _, resource := range a.process.podDevices.resourcesOf(a.pod.uid, container.Name) {
		had := a.process.podDevices[allocationKey{a.pod.uid, container.Name, resource}].ids()
		if container.Init {
			a.devicesToReuse[resource] = a.devicesToReuse[resource].Union(had)
		} else {
			a.devicesToReuse[resource] = a.devicesToReuse[resource].Difference(had)
		}
	}
}

// devicesToAllocate selects a container's devices as the kubelet does under topology policy none,
// except that a real kubelet picks them in map order. It returns none if the container has them
// already. Its steps and errors are those of the kubelet's function of the same name. The caller
// holds the lock, which is released while the plugin is called.
func (a *admission) devicesToAllocate(ctx context.Context, container, resource string, required int) (idSet, error) {
	p := a.process
	had, again := p.podDevices[allocationKey{a.pod.uid, container, resource}]
	if again && len(had.ids()) != required {
		return nil, fmt.Errorf("pod %q container %q changed request for resource %q from %d to %d",
			a.pod.uid, container, resource, len(had.ids()), required)
	}
	if !p.sourcesReady && a.pod.containersRunning {
		return nil, nil
	}
	devices := p.devices[resource]
	switch {
	case devices == nil && required == 0:
		return nil, nil
	case devices == nil:
		return nil, fmt.Errorf("cannot allocate unregistered device %s", resource)
	case len(devices.healthy) == 0:
		return nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", resource)
	case again && !devices.healthy.IsSuperset(had.ids()):
		return nil,
			fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s",
				resource)
	case again || required == 0:
		return nil, nil
	}

	// Selected devices count as allocated at once, so nothing else gets them while the plugin is
	// called.
	selected := idSet{}
	missing := func() int { return required - len(selected) }
	take := func(from idSet) bool {
		fresh := sets.List(from.Difference(selected))
		selected.Insert(fresh[:min(missing(), len(fresh))]...)
		p.admitting[resource] = selected
		return missing() == 0
	}
	if take(a.devicesToReuse[resource]) {
		return selected, nil
	}
	available := devices.healthy.Difference(p.allocated(resource))
	if len(available) < missing() {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			resource, missing(), len(available))
	}
	preferred, err := a.preferred(ctx, resource, required, available, selected)
	if err != nil {
		return nil, err
	}
	// The plugin's response is only a hint: unavailable devices are ignored, and missing ones are
	// filled up.
	if take(preferred.Intersection(available)) || take(available) {
		return selected, nil
	}
	return nil, fmt.Errorf("unexpectedly allocated less resources than required. Requested: %d, Got: %d",
		required, len(selected))
}

// preferred calls GetPreferredAllocation, and returns nothing if the plugin does not
// offer it.
func (a *admission) preferred(
	ctx context.Context,
	resource string,
	required int,
	available, selected idSet,
) (idSet, error) {
	endpoint := a.process.endpoints[resource]
	if endpoint == nil {
		return nil, fmt.Errorf("endpoint not found in cache for a registered resource: %s", resource)
	}
	if !endpoint.options.GetGetPreferredAllocationAvailable() {
		return nil, nil
	}
	request := &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{{
		AvailableDeviceIDs:   sets.List(available.Union(selected)),
		MustIncludeDeviceIDs: sets.List(selected),
		AllocationSize:       int32(required),
	}}}
	var response *api.PreferredAllocationResponse
	err := a.call(ctx, resource, endpoint, func(ctx context.Context, plugin api.DevicePluginClient) (err error) {
		response, err = plugin.GetPreferredAllocation(ctx, request)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %w", err)
	}
	if len(response.ContainerResponses) == 0 {
		return nil, nil
	}
	return sets.New(response.ContainerResponses[0].DeviceIDs...), nil
}
