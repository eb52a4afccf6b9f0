package plugin_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// by is the plan with these strategies.
func by(p sharing.Plan, strategies ...sharing.ListStrategy) sharing.Plan {
	p.Grants = sharing.Grants{Strategies: strategies, AnnotationPrefix: "cdi.k8s.io/"}
	return p
}

// granted is the answer for one container.
func granted(t *testing.T, client api.DevicePluginClient, ids ...string) *api.ContainerAllocateResponse {
	t.Helper()
	response, err := client.Allocate(t.Context(), allocate(ids...))
	if err != nil {
		t.Fatal(err)
	}
	return response.ContainerResponses[0]
}

// awaitGrant asks again until the answer is as wanted: the manager takes a new
// plan or host up by itself.
func awaitGrant(t *testing.T, client api.DevicePluginClient, id string, wanted func(*api.ContainerAllocateResponse) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		response, err := client.Allocate(t.Context(), allocate(id))
		if err == nil && wanted(response.ContainerResponses[0]) {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("answer stays %v, %v", response, err)
		}
	}
}

// TestUnknownNodeIsRefused holds that a container is not started without the
// device that it was promised.
func TestUnknownNodeIsRefused(t *testing.T) {
	for _, grants := range []sharing.Grants{
		{DeviceNodes: true},
		{Strategies: []sharing.ListStrategy{sharing.DriverMounts}},
	} {
		p := plan(gpu, 2, 1)
		p.Grants = grants
		client, manager := dialManager(t, p)
		_, err := client.Allocate(t.Context(), allocate("GPU-0001"))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "device GPU-0001 must not be used: its device node is not known") {
			t.Errorf("%+v: error is %v", grants, err)
		}
		manager.SetHost(plugin.Host{Nodes: map[string][]string{"GPU-0001": {"/dev/nvidia1"}}, DevRoot: "/driver/"})
		awaitGrant(t, client, "GPU-0001", func(r *api.ContainerAllocateResponse) bool {
			return len(r.Devices) == 1 && r.Devices[0].HostPath == "/driver/dev/nvidia1" && r.Devices[0].ContainerPath == "/dev/nvidia1"
		})
	}
}

// TestNodesOfOneBoard holds that a node which two units have is granted once, and
// that a grant writes nothing into the host, which others read at that moment.
func TestNodesOfOneBoard(t *testing.T) {
	p := plan(gpu, 2, 1)
	p.Grants = sharing.Grants{DeviceNodes: true}
	client, manager := dialManager(t, p)
	const board = "/dev/nvidia0"
	control := make([]string, 1, 8)
	control[0] = "/dev/nvidiactl"
	manager.SetHost(plugin.Host{ControlNodes: control, Nodes: map[string][]string{"GPU-0000": {board, "/dev/a"}, "GPU-0001": {board, "/dev/b"}}})
	awaitGrant(t, client, "GPU-0000", func(r *api.ContainerAllocateResponse) bool { return len(r.Devices) == 3 })
	var paths []string
	for _, device := range granted(t, client, "GPU-0001", "GPU-0000").Devices {
		paths = append(paths, device.HostPath)
	}
	if diff := cmp.Diff([]string{"/dev/nvidiactl", board, "/dev/a", "/dev/b"}, paths); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if written := control[:2][1]; written != "" {
		t.Errorf("%s is written behind the control nodes", written)
	}
}

// TestHostSendsNoList holds that what only grants depend on costs the kubelet
// no list.
func TestHostSendsNoList(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 2))
	b.shows(gpu, 4, 4)
	before := b.kubelet.Snapshot().Resources[gpu]
	b.manager.SetHost(plugin.Host{ControlNodes: []string{"/dev/nvidiactl"}})
	b.manager.Apply(by(plan(gpu, 2, 2), sharing.CDICRI))
	b.manager.Apply(plan(gpu, 3, 2)) // Something that does need one.
	b.shows(gpu, 6, 6)
	after := b.kubelet.Snapshot().Resources[gpu]
	if after.Lists != before.Lists+1 || after.StreamsOpened != 1 {
		t.Errorf("%d lists more and %d streams", after.Lists-before.Lists, after.StreamsOpened)
	}
}

func TestAnnotationKey(t *testing.T) {
	client := dialPlugin(t, by(plan(gpu, 3, 2), sharing.CDIAnnotations))
	key := func(client api.DevicePluginClient, ids ...string) string {
		for key := range granted(t, client, ids...).Annotations {
			return key
		}
		return ""
	}
	first := key(client, "GPU-0000::0", "GPU-0001::0")
	name, ok := strings.CutPrefix(first, "cdi.k8s.io/nvidia-device-plugin_")
	if !ok || len(name) != 36 || len("nvidia-device-plugin_"+name) > 63 {
		t.Errorf("key is %q", first)
	}
	if again := key(client, "GPU-0001::0", "GPU-0000::0"); again != first {
		t.Errorf("the order of the request matters: %q and %q", first, again)
	}
	other := dialPlugin(t, by(plan(gpu+".shared", 3, 2), sharing.CDIAnnotations))
	keys := []string{first, key(client, "GPU-0000::0"), key(client, "GPU-0000::1", "GPU-0001::0"), key(other, "GPU-0000::0", "GPU-0001::0")}
	slices.Sort(keys)
	if len(slices.Compact(keys)) != 4 {
		t.Errorf("unlike allocations have one key: %q", keys)
	}
}

// TestDroppedResourceIsGrantedAsThePlanSays holds that strategies are the
// plan's, not those of when the resource was last planned.
func TestDroppedResourceIsGrantedAsThePlanSays(t *testing.T) {
	p := plan(gpu, 2, 1)
	client, manager := dialManager(t, p)
	manager.Apply(by(sharing.Plan{Faults: p.Faults}, sharing.CDICRI))
	awaitGrant(t, client, "GPU-0001", func(r *api.ContainerAllocateResponse) bool {
		return len(r.CdiDevices) == 1 && r.CdiDevices[0].Name == "k8s.device-plugin.nvidia.com/gpu=GPU-0001" && len(r.Envs) == 0
	})
}

// TestUnknownIndex holds that a unit without an index is told by UUID, which
// every runtime knows, rather than by nothing.
func TestUnknownIndex(t *testing.T) {
	p := plan(gpu, 2, 1)
	p.Resources[0].DeviceIDs = sharing.ByIndex
	p.Resources[0].Units[1].Index = ""
	want := map[string]string{"NVIDIA_VISIBLE_DEVICES": "0,GPU-0001"}
	if diff := cmp.Diff(want, granted(t, dialPlugin(t, p), "GPU-0000", "GPU-0001").Envs); diff != "" {
		t.Error(diff)
	}
}

// TestOneShareOnlyIsForShares holds that whole GPUs may be had by the number
// where shares may not.
func TestOneShareOnlyIsForShares(t *testing.T) {
	p := plan(gpu, 2, 1)
	p.Resources[0].OneShareOnly = true
	if got := granted(t, dialPlugin(t, p), "GPU-0000", "GPU-0001").Envs["NVIDIA_VISIBLE_DEVICES"]; got != "GPU-0000,GPU-0001" {
		t.Errorf("granted %q", got)
	}
}
