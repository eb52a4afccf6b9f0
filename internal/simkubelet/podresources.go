package simkubelet

import (
	"context"
	"maps"
	"slices"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/sets"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podResourcesServer serves PodResources v1, with devices and claims only, without CPUs and memory.
type podResourcesServer struct {
	podresources.UnimplementedPodResourcesListerServer
	kubelet *Kubelet
	process *process
}

// limitRate is the kubelet's limit for all clients and calls together: 100 calls a
// second, in bursts of 10 (pkg/kubelet/apis/podresources/constants.go).
func limitRate() grpc.UnaryServerInterceptor {
	limiter := rate.NewLimiter(100, 10)
	return func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if !limiter.Allow() {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return handler(ctx, request)
	}
}

// List lists the pods that this process knows and that have not failed.
func (s *podResourcesServer) List(
	context.Context,
	*podresources.ListPodResourcesRequest,
) (*podresources.ListPodResourcesResponse, error) {
	s.kubelet.lock()
	defer s.kubelet.unlock()
	s.kubelet.updateAllocatedDevices(s.process)
	response := &podresources.ListPodResourcesResponse{}
	for _, pod := range s.kubelet.podsInOrder() {
		if pod.phase != Failed && s.process.knownPods.Has(pod.uid) {
			response.PodResources = append(response.PodResources, s.describe(pod))
		}
	}
	return response, nil
}

// GetAllocatableResources returns the healthy devices, allocated or not. It is the
// only way for a plugin to see that the kubelet has processed a list.
func (s *podResourcesServer) GetAllocatableResources(
	context.Context,
	*podresources.AllocatableResourcesRequest,
) (*podresources.AllocatableResourcesResponse, error) {
	s.kubelet.mu.Lock()
	defer s.kubelet.mu.Unlock()
	response := &podresources.AllocatableResourcesResponse{}
	for _, resource := range slices.Sorted(maps.Keys(s.process.devices)) {
		devices := s.process.devices[resource]
		for _, id := range sets.List(devices.healthy) {
			nodes := nodesOf(devices.all[id])
			if devices.all[id].Topology == nil {
				nodes = []int64{noNode}
			}
			for _, node := range nodes {
				response.Devices = append(response.Devices, deviceEntry(resource, id, node))
			}
		}
	}
	return response, nil
}

// describe leaves out init containers. Devices that only an init container had are therefore held
// but not listed.
func (s *podResourcesServer) describe(pod *pod) *podresources.PodResources {
	described := &podresources.PodResources{Namespace: pod.Namespace, Name: pod.Name}
	for _, container := range pod.Containers {
		if container.Init {
			continue
		}
		resources := &podresources.ContainerResources{Name: container.Name}
		for _, resource := range s.process.podDevices.resourcesOf(pod.uid, container.Name) {
			byNode := s.process.podDevices[allocationKey{pod.uid, container.Name, resource}].byNode
			for _, node := range slices.Sorted(maps.Keys(byNode)) {
				for _, id := range byNode[node] {
					resources.Devices = append(resources.Devices, deviceEntry(resource, id, node))
				}
			}
		}
		for _, claim := range container.Claims {
			resources.DynamicResources = append(resources.DynamicResources, dynamicResource(pod.Namespace, claim))
		}
		described.Containers = append(described.Containers, resources)
	}
	return described
}

// dynamicResource returns a claim. As in the kubelet (GetDynamicResources in
// pkg/kubelet/cm/container_manager_linux.go), each device also has the CDI entries of the same
// driver's devices before it.
func dynamicResource(namespace string, claim Claim) *podresources.DynamicResource {
	described := &podresources.DynamicResource{ClaimName: claim.Name, ClaimNamespace: namespace}
	entries := map[string][]*podresources.CDIDevice{}
	for _, device := range claim.Devices {
		for _, name := range device.CDI {
			entries[device.Driver] = append(entries[device.Driver], &podresources.CDIDevice{Name: name})
		}
		described.ClaimResources = append(described.ClaimResources, &podresources.ClaimResource{
			CdiDevices: slices.Clone(entries[device.Driver]),
			DriverName: device.Driver,
			PoolName:   device.Pool,
			DeviceName: device.Name,
		})
	}
	return described
}

// deviceEntry returns an entry for one ID and one NUMA node, as in the kubelet.
func deviceEntry(resource, id string, node int64) *podresources.ContainerDevices {
	entry := &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
	if node != noNode {
		entry.Topology = &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: node}}}
	}
	return entry
}
