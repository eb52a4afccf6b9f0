package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// admission gives a pod its devices. It runs under the allocation mutex.
type admission struct {
	kubelet *Kubelet
	process *process
	pod     *pod
	// reusable are the devices of ended init containers, by resource.
	reusable map[string]set
}

// run goes through the containers, init containers first.
func (a *admission) run(ctx context.Context) error {
	for _, container := range a.pod.ordered() {
		if err := a.allocate(ctx, container); err != nil {
			return err
		}
		a.passOn(container)
	}
	return nil
}

// allocate gives one container its devices, one resource at a time. The kubelet
// takes the resources in no order; here it is theirs by name.
func (a *admission) allocate(ctx context.Context, container Container) error {
	k, p := a.kubelet, a.process
	k.lock()
	k.purge(p)
	affinity := a.affinity(container)
	k.unlock()
	for _, resource := range slices.Sorted(maps.Keys(container.Requests)) {
		if err := a.allocateResource(ctx, container, resource, affinity); err != nil {
			return err
		}
	}
	return nil
}

func (a *admission) allocateResource(ctx context.Context, container Container, resource string, affinity nodes) error {
	k, p := a.kubelet, a.process
	k.lock()
	defer k.unlock()
	defer func() {
		delete(p.admitting, resource)
		p.recount()
	}()
	chosen, err := a.choose(ctx, container.Name, resource, container.Requests[resource], affinity)
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
			ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: k.order(chosen)}},
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
		k.violate("%s: Allocate for one container got %d answers", resource, n)
	}
	if err := a.checkStillListed(resource, chosen); err != nil {
		return err
	}
	p.ledger[holder{a.pod.uid, container.Name, resource}] = newHolding(chosen, p.devices[resource].all, response.ContainerResponses[0])
	granted := Event{Kind: Granted, Resource: resource, Pod: a.pod.uid}
	for _, id := range chosen.sorted() {
		granted.Devices = append(granted.Devices, Device{ID: id, Healthy: p.devices[resource].healthy.has(id)})
	}
	k.tell(granted)
	k.writeCheckpoint(p)
	return nil
}

// checkStillListed is the place where the real kubelet dereferences a device
// that a list took away while Allocate was under way.
func (a *admission) checkStillListed(resource string, chosen set) error {
	gone := chosen
	if devices := a.process.devices[resource]; devices != nil {
		listed := set{}
		for id := range devices.all {
			listed[id] = struct{}{}
		}
		gone = chosen.without(listed)
	}
	if len(gone) == 0 {
		return nil
	}
	a.kubelet.violate("kubelet would panic: %s: devices left the list while Allocate was under way: %s", resource, join(gone))
	return errors.New("kubelet would panic")
}

// call calls a plugin without the lock and without a deadline; the end of ctx,
// or of the process, cancels it.
func (a *admission) call(ctx context.Context, resource string, to *endpoint, method func(context.Context, api.DevicePluginClient) error) error {
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

// passOn lets later containers use what an ended init container had, and takes
// out of their reach what any other one keeps.
func (a *admission) passOn(container Container) {
	a.kubelet.lock()
	defer a.kubelet.unlock()
	for _, resource := range a.process.ledger.resourcesOf(a.pod.uid, container.Name) {
		had := a.process.ledger[holder{a.pod.uid, container.Name, resource}].ids()
		if container.Init && !container.Sidecar {
			a.reusable[resource] = a.reusable[resource].union(had)
		} else {
			a.reusable[resource] = a.reusable[resource].without(had)
		}
	}
}
