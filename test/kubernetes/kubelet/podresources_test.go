package kubelet

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	limit "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

// devicesProvider gives the device manager's devices the form of PodResources:
// an entry for each ID and NUMA node (container manager, cm/container_manager.go).
type devicesProvider struct {
	*devicemanager.ManagerImpl
	pods *pods
}

// UpdateAllocatedDevices forgets the pods that are gone. The kubelet reads which
// are active before it takes its lock, and forgets one too that is admitted in
// between; its container then gets devices again at its start, which can crash
// a kubelet that admits another pod just then (kubernetes#136021). These are the
// kubelet's own races, so here the two take turns.
func (p devicesProvider) UpdateAllocatedDevices() {
	p.pods.cleaning.Lock()
	defer p.pods.cleaning.Unlock()
	p.ManagerImpl.UpdateAllocatedDevices()
}

// GetDevices is what a container holds.
func (p devicesProvider) GetDevices(podUID, container string) []*api.ContainerDevices {
	return entries(p.ManagerImpl.GetDevices(podUID, container))
}

// GetAllocatableDevices is every healthy device.
func (p devicesProvider) GetAllocatableDevices() []*api.ContainerDevices {
	return entries(p.ManagerImpl.GetAllocatableDevices())
}

func entries(resources devicemanager.ResourceDeviceInstances) []*api.ContainerDevices {
	var all []*api.ContainerDevices
	for resource, devices := range resources {
		for id, device := range devices {
			entry := func(topology *api.TopologyInfo) {
				all = append(all, &api.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}, Topology: topology})
			}
			if device.GetTopology() == nil {
				entry(nil)
			}
			for _, node := range device.GetTopology().GetNodes() {
				entry(&api.TopologyInfo{Nodes: []*api.NUMANode{{ID: node.GetID()}}})
			}
		}
	}
	return all
}

// nothingElse answers for what Virgate does not ask about.
type nothingElse struct{}

func (nothingElse) GetCPUs(string, string) []int64                                    { return nil }
func (nothingElse) GetAllocatableCPUs() []int64                                       { return nil }
func (nothingElse) GetMemory(string, string) []*api.ContainerMemory                   { return nil }
func (nothingElse) GetAllocatableMemory() []*api.ContainerMemory                      { return nil }
func (nothingElse) GetDynamicResources(*v1.Pod, *v1.Container) []*api.DynamicResource { return nil }

// servePodResources serves as the kubelet does, rate limit and all. The
// returned function ends it.
func servePodResources(socket string, pods *pods, manager *devicemanager.ManagerImpl) (func(), error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	server := grpc.NewServer(limit.WithRateLimiter(ctx, "podresources", podresources.DefaultQPS, podresources.DefaultBurstTokens))
	api.RegisterPodResourcesListerServer(server, podresources.NewV1PodResourcesServer(ctx, podresources.PodResourcesProviders{
		Pods: pods, Devices: devicesProvider{manager, pods},
		Cpus: nothingElse{}, Memory: nothingElse{}, DynamicResources: nothingElse{},
	}))
	return serveOn(listener, server), nil
}

// serveOn serves until the returned function is called, which may be again.
func serveOn(listener net.Listener, server *grpc.Server) (stop func()) {
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	return sync.OnceFunc(func() {
		server.Stop()
		<-served
	})
}
