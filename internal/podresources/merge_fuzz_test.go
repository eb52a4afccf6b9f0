package podresources

import (
	"cmp"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/virgate/virgate/sharing"
)

// FuzzMerge holds that of whatever the kubelet lists and has in its checkpoint no
// held device is lost and none is made up, and that the answer is sorted.
func FuzzMerge(f *testing.F) {
	add := func(checkpoint string, pods ...*api.PodResources) {
		listed, err := proto.Marshal(&api.ListPodResourcesResponse{PodResources: pods})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(listed, []byte(checkpoint))
	}
	pod := &api.PodResources{Namespace: "n", Name: "p", Containers: []*api.ContainerResources{{Name: "c", Devices: []*api.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"b", "a"}}, {ResourceName: "nvidia.com/gpu", DeviceIds: []string{"a"}}, {},
	}}}}
	add(kubeletText, pod, pod)
	add(kubeletText)
	add("", pod, &api.PodResources{Name: "\x1b\xe2\x80\xae"})
	f.Fuzz(func(t *testing.T, listed, text []byte) {
		var list api.ListPodResourcesResponse
		if proto.Unmarshal(listed, &list) != nil {
			return
		}
		checkpoint, _ := ParseCheckpoint(text) // Without one, it has no entries.
		held := merge(list.PodResources, checkpoint.Entries)
		if !slices.IsSortedFunc(held, func(a, b sharing.Allocation) int {
			return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource))
		}) {
			t.Errorf("not sorted: %+v", held)
		}
		want, got := map[device]bool{}, map[device]bool{}
		for _, pod := range list.PodResources {
			for _, container := range pod.Containers {
				for _, entry := range container.Devices {
					for _, id := range entry.DeviceIds {
						want[device{entry.ResourceName, id}] = true
					}
				}
			}
		}
		for _, entry := range checkpoint.Entries {
			for _, id := range entry.Devices {
				want[device{entry.Resource, id}] = true
			}
		}
		for _, allocation := range held {
			if len(allocation.Devices) == 0 || !strictlySorted(allocation.Devices) {
				t.Errorf("holds %q", allocation.Devices)
			}
			for _, id := range allocation.Devices {
				got[device{allocation.Resource, id}] = true
				if !want[device{allocation.Resource, id}] {
					t.Errorf("%s of %s is made up", id, allocation.Resource)
				}
			}
		}
		if len(got) != len(want) {
			t.Errorf("%d devices are held, want %d", len(got), len(want))
		}
	})
}
