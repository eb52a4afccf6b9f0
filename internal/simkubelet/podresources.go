package simkubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podResourcesServer is PodResources v1 with devices only: no CPUs, no memory,
// no DRA.
type podResourcesServer struct {
	podresources.UnimplementedPodResourcesListerServer
	kubelet *Kubelet
	process *process
}

// limitRate is the kubelet's limiter for all clients and calls together:
// 100 calls a second, 10 at once (pkg/kubelet/apis/podresources/constants.go).
func limitRate() grpc.UnaryServerInterceptor {
	limiter := rate.NewLimiter(100, 10)
	return func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if !limiter.Allow() {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return handler(ctx, request)
	}
}

// List shows the pods that this process knows and that have not failed.
func (s *podResourcesServer) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	s.kubelet.lock()
	defer s.kubelet.unlock()
	s.kubelet.purge(s.process)
	response := &podresources.ListPodResourcesResponse{}
	for _, pod := range s.kubelet.podsByAge() {
		if s.shows(pod) {
			response.PodResources = append(response.PodResources, s.describe(pod))
		}
	}
	return response, nil
}

// Get shows one pod; it knows the same pods as List.
func (s *podResourcesServer) Get(_ context.Context, request *podresources.GetPodResourcesRequest) (*podresources.GetPodResourcesResponse, error) {
	s.kubelet.mu.Lock()
	defer s.kubelet.mu.Unlock()
	pod := s.kubelet.pods[podKey{request.PodNamespace, request.PodName}]
	if pod == nil || !s.shows(pod) {
		return nil, fmt.Errorf("pod %s in namespace %s not found", request.PodName, request.PodNamespace)
	}
	return &podresources.GetPodResourcesResponse{PodResources: s.describe(pod)}, nil
}

// GetAllocatableResources shows the healthy devices, held or not. It is the one
// way for a plugin to see that the kubelet has taken in a list.
func (s *podResourcesServer) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	s.kubelet.mu.Lock()
	defer s.kubelet.mu.Unlock()
	response := &podresources.AllocatableResourcesResponse{}
	for _, resource := range slices.Sorted(maps.Keys(s.process.devices)) {
		devices := s.process.devices[resource]
		for _, id := range devices.healthy.sorted() {
			device := devices.all[id]
			if device.Topology == nil {
				response.Devices = append(response.Devices, deviceEntry(resource, id, noNode))
				continue
			}
			for _, node := range nodesOf(device) {
				response.Devices = append(response.Devices, deviceEntry(resource, id, node))
			}
		}
	}
	return response, nil
}

func (s *podResourcesServer) shows(pod *pod) bool {
	return pod.phase != Failed && s.process.known.has(pod.uid)
}

// describe leaves init containers out, but not sidecars. What only an init
// container had is held and shown nowhere.
func (s *podResourcesServer) describe(pod *pod) *podresources.PodResources {
	described := &podresources.PodResources{Namespace: pod.Namespace, Name: pod.Name}
	for _, container := range pod.Containers {
		if container.Init && !container.Sidecar {
			continue
		}
		resources := &podresources.ContainerResources{Name: container.Name}
		for _, resource := range s.process.ledger.resourcesOf(pod.uid, container.Name) {
			byNode := s.process.ledger[holder{pod.uid, container.Name, resource}].byNode
			for _, node := range slices.Sorted(maps.Keys(byNode)) {
				for _, id := range byNode[node] {
					resources.Devices = append(resources.Devices, deviceEntry(resource, id, node))
				}
			}
		}
		described.Containers = append(described.Containers, resources)
	}
	return described
}

// deviceEntry is one entry an ID and a NUMA node, as the kubelet makes them.
func deviceEntry(resource, id string, node int64) *podresources.ContainerDevices {
	entry := &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
	if node != noNode {
		entry.Topology = &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: node}}}
	}
	return entry
}
