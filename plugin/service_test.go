package plugin_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

func TestAllocate(t *testing.T) {
	oneShare := plan(gpu, 2, 4)
	oneShare.Resources[0].OneShareOnly = true
	strict := plan(gpu, 2, 4)
	strict.Resources[0].SpreadStrict = true
	gone := plan(gpu, 2, 1)
	delete(gone.Faults, "GPU-0001")
	byIndex := plan(gpu, 3, 2)
	byIndex.Resources[0].DeviceIDs = sharing.ByIndex
	for _, test := range []struct {
		name    string
		plan    sharing.Plan
		request *api.AllocateRequest
		visible string
		code    codes.Code
		message string
	}{
		{"one exclusive", plan(gpu, 2, 1), allocate("GPU-0001"), "GPU-0001", codes.OK, ""},
		{"two units in the plan's order", plan(gpu, 3, 4), allocate("GPU-0002::1", "GPU-0000::3"), "GPU-0000,GPU-0002", codes.OK, ""},
		{"one unit once", plan(gpu, 2, 4), allocate("GPU-0001::0", "GPU-0001::2"), "GPU-0001", codes.OK, ""},
		{"by index", byIndex, allocate("GPU-0002::1", "GPU-0001::0"), "1,2", codes.OK, ""},
		{"unknown device", plan(gpu, 2, 4), allocate("GPU-0001::9"), "", codes.NotFound, `nvidia.com/gpu has no device "GPU-0001::9"`},
		{"one known, one not", plan(gpu, 2, 4), allocate("GPU-0001::1", "GPU-0001"), "", codes.NotFound, `no device "GPU-0001"`},
		{"no device", plan(gpu, 2, 4), allocate(), "", codes.InvalidArgument, "no device requested"},
		{"no container", plan(gpu, 2, 4), &api.AllocateRequest{}, "", codes.InvalidArgument, "no container"},
		{"faulty unit", withFault(plan(gpu, 2, 4), "GPU-0001", "XID 79"), allocate("GPU-0001::0"), "", codes.Unavailable, "XID 79"},
		{"unit that is gone", gone, allocate("GPU-0001"), "", codes.Unavailable, "no longer on this node"},
		{"two shares where one is allowed", oneShare, allocate("GPU-0001::0", "GPU-0000::0"), "", codes.InvalidArgument, "a container may request 1, not 2"},
		{"two shares of one unit where one is allowed", oneShare, allocate("GPU-0001::0", "GPU-0001::1"), "", codes.InvalidArgument, "a container may request 1, not 2"},
		{"one share where one is allowed", oneShare, allocate("GPU-0001::0"), "GPU-0001", codes.OK, ""},
		{"strict spread on one unit", strict, allocate("GPU-0001::0", "GPU-0001::1"), "", codes.ResourceExhausted, "spread is strict"},
		{"strict spread on two units", strict, allocate("GPU-0001::0", "GPU-0000::1"), "GPU-0000,GPU-0001", codes.OK, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			client := dialPlugin(t, test.plan)
			response, err := client.Allocate(t.Context(), test.request)
			if status.Code(err) != test.code || (err != nil && !strings.Contains(err.Error(), test.message)) {
				t.Fatalf("got %v, want %s with %q", err, test.code, test.message)
			}
			if err != nil {
				return
			}
			want := []map[string]string{{"NVIDIA_VISIBLE_DEVICES": test.visible}}
			var got []map[string]string
			for _, container := range response.ContainerResponses {
				got = append(got, container.Envs)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestOneAnswerAContainer(t *testing.T) {
	client := dialPlugin(t, plan(gpu, 2, 4))
	response, err := client.Allocate(t.Context(), &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{
		{DevicesIds: []string{"GPU-0000::0"}}, {DevicesIds: []string{"GPU-0001::0"}},
	}})
	if err != nil || len(response.ContainerResponses) != 2 {
		t.Errorf("got %v, %v, want two answers", response, err)
	}
}

func TestPreferredAllocationNeverFails(t *testing.T) {
	client := dialPlugin(t, withFault(plan(gpu, 2, 2), "GPU-0001", "XID 79"))
	for _, test := range []struct {
		name      string
		available []string
		size      int32
		want      int
	}{
		{"enough", []string{"GPU-0000::0", "GPU-0000::1"}, 2, 2},
		{"unknown IDs only", []string{"x", "y", "z"}, 2, 2},
		{"faulty IDs only", []string{"GPU-0001::0"}, 1, 1},
		{"too few", []string{"GPU-0000::0"}, 3, 1},
		{"none", nil, 1, 0},
		{"negative size", []string{"GPU-0000::0"}, -1, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			response, err := client.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{
				ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: test.available, AllocationSize: test.size}},
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := len(response.ContainerResponses[0].DeviceIDs); got != test.want {
				t.Errorf("%d IDs, want %d", got, test.want)
			}
		})
	}
}
