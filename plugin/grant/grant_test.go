package grant

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/virgate/virgate/sharing"
)

// allocation is of these devices, of GPUs called A and B.
func allocation(resource string, grants sharing.Grants, ids ...string) Allocation {
	a := Allocation{
		Grants:   grants,
		Host:     &Host{},
		Resource: sharing.Resource{Name: resource},
		IDs:      ids,
	}
	for i, id := range []string{"A", "B"} {
		if slices.ContainsFunc(ids, func(device string) bool { return strings.HasPrefix(device, id) }) {
			a.Units = append(a.Units, sharing.Unit{ID: id, Index: string(rune('0' + i))})
		}
	}
	return a
}

// TestNodesOfOneGPU checks that a node of two units is granted once, and that a grant does not modify the host,
// which is read concurrently.
func TestNodesOfOneGPU(t *testing.T) {
	control := make([]string, 1, 8)
	control[0] = "/dev/nvidiactl"
	a := allocation("gpu", sharing.Grants{DeviceNodes: true}, "A", "B")
	a.Host = &Host{ControlNodes: control, Nodes: map[string][]string{"A": {GPUNode(0), "/dev/a"}, "B": {GPUNode(0), "/dev/b"}}}
	var paths []string
	for _, device := range a.Response().Devices {
		paths = append(paths, device.HostPath)
	}
	if diff := cmp.Diff([]string{"/dev/nvidiactl", "/dev/nvidia0", "/dev/a", "/dev/b"}, paths); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if written := control[:2][1]; written != "" {
		t.Errorf("%s is written behind the control nodes", written)
	}
}

func TestAnnotationKey(t *testing.T) {
	key := func(resource string, ids ...string) string {
		grants := sharing.Grants{Strategies: []sharing.DeviceListStrategy{sharing.CDIAnnotations}, AnnotationPrefix: "cdi.k8s.io/"}
		for key := range allocation(resource, grants, ids...).Response().Annotations {
			return key
		}
		return ""
	}
	first := key("gpu", "A::0", "B::0")
	name, ok := strings.CutPrefix(first, "cdi.k8s.io/nvidia-device-plugin_")
	if !ok || len(name) != 36 || len("nvidia-device-plugin_"+name) > 63 {
		t.Errorf("key is %q", first)
	}
	if again := key("gpu", "B::0", "A::0"); again != first {
		t.Errorf("the order of the request matters: %q and %q", first, again)
	}
	keys := []string{first, key("gpu", "A::0"), key("gpu", "A::1", "B::0"), key("gpu.shared", "A::0", "B::0")}
	slices.Sort(keys)
	if len(slices.Compact(keys)) != 4 {
		t.Errorf("unlike allocations have one key: %q", keys)
	}
}

// TestExtrasAreVariables checks that a container gets GDRCopy, GDS and MOFED as variables with every strategy,
// and only those that are enabled.
func TestExtrasAreVariables(t *testing.T) {
	for _, strategies := range [][]sharing.DeviceListStrategy{
		nil, {sharing.Envvar}, {sharing.VolumeMounts}, {sharing.DriverMounts}, {sharing.CDIAnnotations}, {sharing.CDICRI},
		{sharing.CDICRI, sharing.CDIAnnotations}, {sharing.Envvar, sharing.CDICRI},
	} {
		for bits := range 8 {
			grants := sharing.Grants{Strategies: strategies, GDRCopy: bits&1 > 0, GDS: bits&2 > 0, MOFED: bits&4 > 0}
			want := map[string]string{}
			for i, name := range []string{"NVIDIA_GDRCOPY", "NVIDIA_GDS", "NVIDIA_MOFED"} {
				if bits>>i&1 > 0 {
					want[name] = "enabled"
				}
			}
			got := maps.Clone(allocation("gpu", grants, "A").Response().Envs)
			visible := got["NVIDIA_VISIBLE_DEVICES"] != ""
			delete(got, "NVIDIA_VISIBLE_DEVICES")
			delete(got, "NVIDIA_DRIVER_CAPABILITIES")
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || visible == grants.OnlyCDI() {
				t.Errorf("%v: devices by variable: %t; variables (-want +got):\n%s", strategies, visible, diff)
			}
		}
	}
}

// TestUnknownIndex checks that a unit without an index is granted by its UUID, which every runtime knows.
func TestUnknownIndex(t *testing.T) {
	a := allocation("gpu", sharing.Grants{}, "A", "B")
	a.Resource.DeviceIDs = sharing.ByIndex
	a.Units[1].Index = ""
	if diff := cmp.Diff(map[string]string{"NVIDIA_VISIBLE_DEVICES": "0,B"}, a.Response().Envs); diff != "" {
		t.Error(diff)
	}
}
