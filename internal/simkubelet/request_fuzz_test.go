package simkubelet

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// FuzzRegister holds that no request has a resource name accepted that is not a
// domain and a name. Register itself would dial, so only the name is tried.
func FuzzRegister(f *testing.F) {
	for _, request := range []*api.RegisterRequest{
		{Version: api.Version, Endpoint: "a.sock", ResourceName: "nvidia.com/gpu"},
		{Version: "v1", Endpoint: "a.sock", ResourceName: "nvidia.com/gpu"},
		{Version: api.Version, Endpoint: "../../x", ResourceName: "kubernetes.io/x", Options: &api.DevicePluginOptions{PreStartRequired: true}},
		{Version: api.Version, Endpoint: strings.Repeat("a", 200), ResourceName: "requests.x/\x1b"},
	} {
		data, err := proto.Marshal(request)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var request api.RegisterRequest
		if proto.Unmarshal(data, &request) != nil {
			return
		}
		err := checkResourceName(request.ResourceName)
		if domain, name, found := strings.Cut(request.ResourceName, "/"); err == nil && (!found || domain == "" || name == "" || strings.ContainsAny(name, "/\n\x1b ")) {
			t.Errorf("the name %q is accepted", request.ResourceName)
		}
	})
}

// FuzzList holds that of every list the devices are counted once and what is
// wrong is told in order, whatever is in it.
func FuzzList(f *testing.F) {
	for _, list := range [][]*api.Device{healthy("a@0", "b"), append(healthy("a"), unhealthy("a", "")...), {{ID: "a", Health: "\x1b", Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: -1}}}}}, {{}}, nil} {
		data, err := proto.Marshal(&api.ListAndWatchResponse{Devices: list})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var response api.ListAndWatchResponse
		if proto.Unmarshal(data, &response) != nil {
			return
		}
		next := newDevices(response.Devices)
		next.aligned()
		if len(next.all) > len(response.Devices) || next.capacity() < len(next.all) {
			t.Errorf("%d devices of %d", len(next.all), len(response.Devices))
		}
		wrong := checkList("r", newDevices(healthy("a", "b")), response.Devices, setOf("c"))
		if !slices.IsSorted(wrong) {
			t.Errorf("not sorted: %q", wrong)
		}
		if _, there := next.all["c"]; !there && !slices.ContainsFunc(wrong, func(w string) bool { return strings.Contains(w, "that pods hold: c") }) {
			t.Errorf("a held device is dropped, and nobody says so: %q", wrong)
		}
	})
}
