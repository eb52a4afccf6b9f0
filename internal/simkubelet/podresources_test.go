package simkubelet

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func (r *rig) podResources() podresources.PodResourcesListerClient {
	r.t.Helper()
	connection, err := grpc.NewClient("unix:"+r.options.PodResourcesSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = connection.Close() })
	return podresources.NewPodResourcesListerClient(connection)
}

// lines has a line "namespace/pod container id@node" for each entry.
func lines(pods []*podresources.PodResources) []string {
	var list []string
	for _, pod := range pods {
		for _, container := range pod.Containers {
			for _, entry := range container.Devices {
				list = append(list, fmt.Sprintf("%s/%s %s %s", pod.Namespace, pod.Name, container.Name, entryText(entry)))
			}
		}
	}
	return list
}

func entryText(entry *podresources.ContainerDevices) string {
	text := entry.ResourceName + " " + strings.Join(entry.DeviceIds, ",")
	for _, node := range entry.Topology.GetNodes() {
		text += fmt.Sprintf("@%d", node.ID)
	}
	return text
}

func (r *rig) list(client podresources.PodResourcesListerClient) []string {
	r.t.Helper()
	response, err := client.List(r.ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return lines(response.PodResources)
}

func TestPodResources(t *testing.T) {
	r := startRig(t, Options{DelayPods: true})
	client := r.podResources()
	p := r.startPlugin(gpu, "a.sock", append(healthy("a@0+1", "b", "c"), unhealthy("d")...)...)
	one := map[string]int{gpu: 1}
	r.add(Pod{Namespace: "n", Name: "p", Containers: []Container{
		{Name: "init", Init: true, Requests: map[string]int{gpu: 2}},
		{Name: "main", Requests: one},
		{Name: "idle"},
	}})
	if _, err := r.AddPod(r.ctx, oneContainer("fails", 2)); err == nil {
		t.Fatal("init container's unused device was given away")
	}

	want := []string{"n/p main nvidia.com/gpu a@0", "n/p main nvidia.com/gpu a@1"}
	if diff := cmp.Diff(want, r.list(client)); diff != "" {
		t.Errorf("List: %s", diff)
	}
	allocatable, err := client.GetAllocatableResources(r.ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var entries []string
	for _, entry := range allocatable.Devices {
		entries = append(entries, entryText(entry))
	}
	if diff := cmp.Diff([]string{gpu + " a@0", gpu + " a@1", gpu + " b", gpu + " c"}, entries); diff != "" {
		t.Errorf("GetAllocatableResources: %s", diff)
	}

	// After a restart List is incomplete until the pods are restored.
	if err := r.Restart(r.ctx); err != nil {
		t.Fatal(err)
	}
	client = r.podResources()
	if got := r.list(client); got != nil {
		t.Errorf("List before the pods are back: %q", got)
	}
	if err := r.RestorePods(r.ctx); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, r.list(client)); diff != "" {
		t.Errorf("List after the restart: %s", diff)
	}

	// List removes an ended pod from memory; the checkpoint has it until the next
	// write.
	r.remove("n", "p")
	if got := r.list(client); got != nil {
		t.Errorf("List of a dead pod: %q", got)
	}
	if entries := r.checkpoint().PodDeviceEntries; len(entries) == 0 {
		t.Error("List has written the checkpoint")
	}
	p.reregister(healthy("a@0+1", "b", "c")...)
	if entries := r.checkpoint().PodDeviceEntries; len(entries) != 0 {
		t.Errorf("got %+v", entries)
	}
}

// TestClaims checks that claims are shown as by the kubelet: each device has the CDI entries of its driver's
// devices before it, and a container that has ended has none.
func TestClaims(t *testing.T) {
	r := startRig(t, Options{})
	claims := []Claim{{Name: "c", Devices: []ClaimDevice{
		{Driver: "gpu.nvidia.com", Pool: "node", Name: "gpu-0", CDI: []string{"v/claim=c-gpu-0"}},
		{Driver: "dra.net", Pool: "node", Name: "eth1"},
		{Driver: "gpu.nvidia.com", Pool: "node", Name: "gpu-1", CDI: []string{"v/claim=c-gpu-1"}},
	}}}
	r.add(Pod{Namespace: "n", Name: "p", Containers: []Container{{Name: "init", Init: true, Claims: claims}, {Name: "main", Claims: claims}}})
	response, err := r.podResources().List(r.ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, container := range response.PodResources[0].Containers {
		for _, claim := range container.DynamicResources {
			for _, device := range claim.ClaimResources {
				text := fmt.Sprintf("%s %s/%s %s %s %s", container.Name, claim.ClaimNamespace, claim.ClaimName, device.DriverName, device.PoolName, device.DeviceName)
				for _, entry := range device.CdiDevices {
					text += " " + entry.Name
				}
				got = append(got, text)
			}
		}
	}
	want := []string{
		"main n/c gpu.nvidia.com node gpu-0 v/claim=c-gpu-0", "main n/c dra.net node eth1",
		"main n/c gpu.nvidia.com node gpu-1 v/claim=c-gpu-0 v/claim=c-gpu-1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestPodResourcesRateLimit(t *testing.T) {
	r := startRig(t, Options{})
	client := r.podResources()
	for range 1000 {
		_, err := client.List(r.ctx, &podresources.ListPodResourcesRequest{})
		if status.Code(err) == codes.ResourceExhausted {
			if text := status.Convert(err).Message(); text != "rejected by rate limit" {
				t.Errorf("got %q", text)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Error("1000 calls in a row were served")
}
