package e2e

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// holding is a device of a pod as the kubelet has it.
type holding struct {
	way
	unit, id string
}

// kubeletSays is a client of the kubelet's PodResources, where the kubelet says what
// it has and who holds it, without the API server.
func (c *cluster) kubeletSays(t *testing.T) api.PodResourcesListerClient {
	t.Helper()
	// The kubelet may be away for a while: gRPC's own pauses grow to minutes.
	again := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Second / 4, Multiplier: 1, MaxDelay: time.Second / 4}, MinConnectTimeout: time.Second}
	connection, err := grpc.NewClient("unix:///var/lib/kubelet/pod-resources/kubelet.sock",
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(again))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return api.NewPodResourcesListerClient(connection)
}

// holdings are the devices of the tests' pods, by the pods' names.
func holdings(ctx context.Context, kubelet api.PodResourcesListerClient) (map[string][]holding, error) {
	answer, err := kubelet.List(ctx, &api.ListPodResourcesRequest{})
	if err != nil {
		return nil, err
	}
	found := map[string][]holding{}
	for _, pod := range answer.PodResources {
		if pod.Namespace != workspace {
			continue
		}
		for _, container := range pod.Containers {
			for _, devices := range container.Devices {
				found[pod.Name] = append(found[pod.Name], holdingsOf(devices)...)
			}
		}
	}
	return found, nil
}

func holdingsOf(devices *api.ContainerDevices) []holding {
	var found []holding
	for _, id := range devices.DeviceIds {
		unit, _, shared := strings.Cut(id, "::")
		found = append(found, holding{way{devices.ResourceName, shared}, unit, id})
	}
	return found
}

// healthy are the devices of NVIDIA's resources that the kubelet could grant or has
// granted, by resource.
func healthy(ctx context.Context, kubelet api.PodResourcesListerClient) (map[string][]holding, error) {
	answer, err := kubelet.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
	if err != nil {
		return nil, err
	}
	found := map[string][]holding{}
	for _, devices := range answer.Devices {
		found[devices.ResourceName] = append(found[devices.ResourceName], holdingsOf(devices)...)
	}
	return found, nil
}

// units are those that the resource is offered on, sorted.
func units(t *testing.T, kubelet api.PodResourcesListerClient, resource string) []string {
	t.Helper()
	devices, err := healthy(t.Context(), kubelet)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]struct{}{}
	for _, device := range devices[resource] {
		found[device.unit] = struct{}{}
	}
	return slices.Sorted(maps.Keys(found))
}
