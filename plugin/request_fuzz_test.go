package plugin

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// bareService serves three devices of two units without a socket. The second unit is faulty.
func bareService() service {
	entries := []Entry{}
	for _, id := range []string{"GPU-a::0", "GPU-a::1", "GPU-b"} {
		unit, _, _ := sharing.ParseDeviceID(id)
		entries = append(entries, Entry{Device: sharing.Device{ID: id, Unit: unit, Healthy: unit == "GPU-a", NUMANode: -1}, Index: "0", Phase: Offered})
	}
	resource := sharing.Resource{Name: "nvidia.com/gpu", Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID}
	s := &server{
		Options: Options{Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return time.Unix(1, 0) }},
		name:    resource.Name, refusedUnits: newRefusedUnits(), refusals: make(chan refusal, 1),
	}
	s.publish(newGeneration(resource, List{Entries: entries}, grantTerms{host: &grant.Host{}}, map[string]sharing.Health{"GPU-a": {}, "GPU-b": sharing.Faulty("XID 79")}, nil, nil))
	return service{server: s}
}

// encoded is the request in wire format.
func encoded(f *testing.F, request proto.Message) []byte {
	f.Helper()
	data, err := proto.Marshal(request)
	if err != nil {
		f.Fatal(err)
	}
	return data
}

// FuzzAllocate checks that any decodable request is answered with requested, usable devices, or with a code other
// than Internal or Unknown. The same request has the same answer.
func FuzzAllocate(f *testing.F) {
	for _, ids := range [][]string{nil, {"GPU-a::0"}, {"GPU-a::1", "GPU-a::0"}, {"GPU-a::0", "GPU-a::0"}, {"GPU-b"}, {"GPU-a::0", "GPU-b"}, {"GPU-c"}, {""}, {"\n\x1b[31m"}} {
		f.Add(encoded(f, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}, {DevicesIds: ids}}}))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var request api.AllocateRequest
		if proto.Unmarshal(data, &request) != nil {
			return // gRPC answers it.
		}
		s := bareService()
		response, err := s.Allocate(t.Context(), &request)
		if s.inFlight.Load() != 0 {
			t.Error("a call that has ended counts as under way")
		}
		again, errAgain := s.Allocate(t.Context(), &request)
		if diff := cmp.Diff(response, again, protocmp.Transform()); diff != "" || status.Code(err) != status.Code(errAgain) {
			t.Errorf("the second answer differs: %v, %v %s", err, errAgain, diff)
		}
		usable := len(request.ContainerRequests) > 0
		for _, c := range request.ContainerRequests {
			usable = usable && len(c.DevicesIds) > 0
			for _, id := range c.DevicesIds {
				usable = usable && (id == "GPU-a::0" || id == "GPU-a::1")
			}
		}
		switch code := status.Code(err); {
		case err == nil && (!usable || len(response.ContainerResponses) != len(request.ContainerRequests)):
			t.Errorf("granted %v as %v", &request, response)
		case err != nil && (usable || response != nil || code == codes.Internal || code == codes.Unknown):
			t.Errorf("%v is answered %v, %v", &request, response, err)
		}
	})
}

// FuzzPreferredAllocation checks that every request gets one response per container, with no more devices than
// requested, only offered ones, and each once.
func FuzzPreferredAllocation(f *testing.F) {
	all := []string{"GPU-a::0", "GPU-a::1", "GPU-b", "GPU-c"}
	for _, size := range []int32{0, 1, 2, 5, -1, 1 << 30, -1 << 31} {
		f.Add(encoded(f, &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: all, AllocationSize: size},
			{AvailableDeviceIDs: slices.Concat(all, all), MustIncludeDeviceIDs: all[1:], AllocationSize: size},
			{MustIncludeDeviceIDs: all, AllocationSize: size},
		}}))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var request api.PreferredAllocationRequest
		if proto.Unmarshal(data, &request) != nil {
			return
		}
		response, err := bareService().GetPreferredAllocation(t.Context(), &request)
		if err != nil || len(response.ContainerResponses) != len(request.ContainerRequests) {
			t.Fatalf("%v is answered %v, %v", &request, response, err)
		}
		for i, r := range request.ContainerRequests {
			ids := response.ContainerResponses[i].DeviceIDs
			if len(ids) > max(0, int(r.AllocationSize)) {
				t.Errorf("%d of %d: %q", len(ids), r.AllocationSize, ids)
			}
			seen := map[string]bool{}
			for _, id := range ids {
				if seen[id] || !slices.Contains(r.AvailableDeviceIDs, id) && !slices.Contains(r.MustIncludeDeviceIDs, id) {
					t.Errorf("%q has %q twice, or nobody offered it", ids, id)
				}
				seen[id] = true
			}
		}
	})
}

// FuzzOtherRequests checks that the two calls with empty requests give the same answer for any content.
func FuzzOtherRequests(f *testing.F) {
	f.Add(encoded(f, &api.PreStartContainerRequest{DevicesIds: []string{"GPU-a::0", "\x1b"}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		var empty api.Empty
		if proto.Unmarshal(data, &empty) == nil {
			options, err := bareService().GetDevicePluginOptions(t.Context(), &empty)
			if err != nil || options.PreStartRequired || !options.GetPreferredAllocationAvailable {
				t.Errorf("options %v, %v", options, err)
			}
		}
		var start api.PreStartContainerRequest
		if proto.Unmarshal(data, &start) == nil {
			if _, err := bareService().PreStartContainer(t.Context(), &start); status.Code(err) != codes.Unimplemented {
				t.Errorf("a call that was not asked for is answered %v", err)
			}
		}
	})
}
