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
	allocatable, err := call(ctx, s, func(ctx context.Context, client api.PodResourcesListerClient) (*api.AllocatableResourcesResponse, error) {
		return client.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
	})
	if err != nil {
		return false, err
	}
	return len(devicesByResource(allocatable.Devices)[resource]) > 0, nil
}
