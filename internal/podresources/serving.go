package podresources

import (
	"context"

	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Serving says whether the kubelet is connected to a plugin that offers healthy
// devices of the resource.
//
// Only PodResources can tell: the checkpoint still shows a resource's devices
// when its plugin has gone. The error is PodResources' own.
func (s *Source) Serving(ctx context.Context, resource string) (bool, error) {
	healthy, err := s.allocatable(ctx)
	return len(healthy[resource]) > 0, err
}

// allocatable is what PodResources shows of the devices that the kubelet takes
// for healthy, sorted, by resource. It may be for several and must not be changed.
func (s *Source) allocatable(ctx context.Context) (map[string][]string, error) {
	return s.allocatables.ask(ctx, func(ctx context.Context, begins func()) (map[string][]string, error) {
		response, err := call(ctx, s, func(ctx context.Context, client api.PodResourcesListerClient) (*api.AllocatableResourcesResponse, error) {
			begins()
			return client.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
		})
		if err != nil {
			return nil, err
		}
		return devicesByResource(response.Devices), nil
	})
}
