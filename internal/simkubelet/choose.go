package simkubelet

import (
	"context"
	"fmt"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// choose picks devices for a container and books them. It returns none when the
// container has them already. The steps and the errors' words are those of the
// kubelet's devicesToAllocate. The caller holds the lock, which is released
// while the plugin is asked.
func (a *admission) choose(ctx context.Context, container, resource string, required int, affinity nodes) (set, error) {
	p := a.process
	had, again := p.ledger[holder{a.pod.uid, container, resource}]
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
	case again && len(had.ids().without(devices.healthy)) > 0:
		return nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", resource)
	case again || required == 0:
		return nil, nil
	}

	b := &booking{admission: a, resource: resource, required: required, booked: set{}}
	if b.take(a.reusable[resource]) {
		return b.booked, nil
	}
	available := devices.healthy.without(p.allocated[resource])
	if len(available) < b.missing() {
		return nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d",
			resource, b.missing(), len(available))
	}
	return b.fill(ctx, available, devices, affinity)
}

// booking gathers the devices of one request. What it takes is booked at once,
// so that nothing else gets it while the plugin is asked.
type booking struct {
	admission *admission
	resource  string
	required  int
	booked    set
}

func (b *booking) missing() int { return b.required - len(b.booked) }

// take books what is still needed and says whether that is all.
func (b *booking) take(from set) bool {
	p := b.admission.process
	for _, id := range b.admission.kubelet.order(from.without(b.booked)) {
		if b.missing() == 0 {
			break
		}
		b.booked[id] = struct{}{}
	}
	p.admitting[b.resource] = b.booked
	p.allocated[b.resource] = p.allocated[b.resource].union(b.booked)
	return b.missing() == 0
}

// fill takes the rest from what is available: aligned devices first. The plugin
// chooses among the aligned ones where there are more than needed, else among
// the others once all aligned ones are taken. Its answer is a hint: what is not
// available is ignored, what is missing is filled up.
func (b *booking) fill(ctx context.Context, available set, devices *devices, affinity nodes) (set, error) {
	aligned, unaligned, unbound := affinity.split(available, devices)
	pool := available
	if b.missing() < len(aligned) {
		pool = aligned
	} else if b.take(aligned) {
		return b.booked, nil
	}
	preferred, err := b.preferred(ctx, pool)
	if err != nil {
		return nil, err
	}
	for _, from := range []set{preferred.intersection(pool), aligned, unaligned, unbound} {
		if b.take(from) {
			return b.booked, nil
		}
	}
	return nil, fmt.Errorf("unexpectedly allocated less resources than required. Requested: %d, Got: %d",
		b.required, len(b.booked))
}

// preferred asks the plugin, if it wants to be asked. It returns nothing if
// not.
func (b *booking) preferred(ctx context.Context, pool set) (set, error) {
	k, p := b.admission.kubelet, b.admission.process
	endpoint := p.endpoints[b.resource]
	if endpoint == nil {
		return nil, fmt.Errorf("endpoint not found in cache for a registered resource: %s", b.resource)
	}
	if !endpoint.options.GetGetPreferredAllocationAvailable() {
		return nil, nil
	}
	request := &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{{
		AvailableDeviceIDs:   k.order(pool.union(b.booked)),
		MustIncludeDeviceIDs: k.order(b.booked),
		AllocationSize:       int32(b.required),
	}}}
	var response *api.PreferredAllocationResponse
	err := b.admission.call(ctx, b.resource, endpoint, func(ctx context.Context, plugin api.DevicePluginClient) (err error) {
		response, err = plugin.GetPreferredAllocation(ctx, request)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %w", err)
	}
	if len(response.ContainerResponses) == 0 {
		return nil, nil
	}
	return setOf(response.ContainerResponses[0].DeviceIDs...), nil
}

// order lists IDs in the order that Options.Random gives, else sorted. The
// caller holds the lock.
func (k *Kubelet) order(ids set) []string {
	list := ids.sorted()
	if random := k.options.Random; random != nil {
		random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	}
	return list
}
