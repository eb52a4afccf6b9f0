package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// RestartContainer starts a container of a running pod again. It gets what the
// plugin answered when the pod was admitted: the devices' health does not
// matter, and neither does the plugin unless it asked for PreStartContainer.
// The start fails when the resource's endpoint was removed after its grace.
func (k *Kubelet) RestartContainer(ctx context.Context, namespace, name, container string) (ContainerStatus, error) {
	status, err := k.restartContainer(ctx, podKey{namespace, name}, container)
	if err != nil {
		return ContainerStatus{}, fmt.Errorf("restart container %s of pod %s/%s: %w", container, namespace, name, err)
	}
	return status, nil
}

func (k *Kubelet) restartContainer(ctx context.Context, key podKey, name string) (ContainerStatus, error) {
	k.lock()
	p, pod := k.process, k.pods[key]
	if p != nil {
		p.goroutines.Add(1)
	}
	k.unlock()
	if p == nil {
		return ContainerStatus{}, ErrDown
	}
	defer p.goroutines.Done()
	if pod == nil {
		return ContainerStatus{}, ErrNoPod
	}
	index := slices.IndexFunc(pod.Containers, func(c Container) bool { return c.Name == name })
	if index < 0 {
		return ContainerStatus{}, ErrNoPod
	}
	admission := admission{kubelet: k, process: p, pod: pod}
	if err := admission.start(ctx, pod.Containers[index]); err != nil {
		return ContainerStatus{}, err
	}
	k.lock()
	defer k.unlock()
	return k.containerStatus(pod, name), nil
}

// start checks a container's endpoints and calls PreStartContainer where the
// plugin asked for it, with the kubelet's 30 s.
func (a *admission) start(ctx context.Context, container Container) error {
	k, p := a.kubelet, a.process
	k.lock()
	defer k.unlock()
	if a.pod.phase != Running {
		return fmt.Errorf("pod is %s", a.pod.phase)
	}
	for _, resource := range slices.Sorted(maps.Keys(container.Requests)) {
		if container.Requests[resource] == 0 {
			continue
		}
		endpoint := p.endpoints[resource]
		if endpoint == nil {
			return fmt.Errorf("endpoint not found in cache for a registered resource: %s", resource)
		}
		if !endpoint.options.GetPreStartRequired() {
			continue
		}
		holding, ok := p.ledger[holder{a.pod.uid, container.Name, resource}]
		if !ok {
			return errors.New("no devices found allocated in local cache")
		}
		request := &api.PreStartContainerRequest{DevicesIds: k.order(holding.ids())}
		err := a.call(ctx, resource, endpoint, func(ctx context.Context, plugin api.DevicePluginClient) error {
			limited, cancel := context.WithTimeout(ctx, api.KubeletPreStartContainerRPCTimeoutInSecs*time.Second)
			defer cancel()
			_, err := plugin.PreStartContainer(limited, request)
			return err
		})
		if err != nil {
			return fmt.Errorf("device plugin PreStartContainer rpc failed with err: %w", err)
		}
	}
	return nil
}
