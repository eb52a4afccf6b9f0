package plugin_test

import (
	"context"
	"fmt"
	"go/parser"
	"go/token"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// stuck is a store and a log that, once stopped, do not answer until they are
// freed.
type stuck struct {
	slog.Handler
	stopped atomic.Bool
	freed   chan struct{}
	// saved and logged receive when a call hangs.
	saved, logged chan struct{}
}

func (s *stuck) wait(hit chan struct{}) {
	if s.stopped.Load() {
		select {
		case hit <- struct{}{}:
		default:
		}
		<-s.freed
	}
}

func (s *stuck) Enabled(context.Context, slog.Level) bool { return true }
func (s *stuck) WithAttrs([]slog.Attr) slog.Handler       { return s }

func (s *stuck) Handle(context.Context, slog.Record) error {
	s.wait(s.logged)
	return nil
}

func (s *stuck) Load() (plugin.Lists, error) { return nil, nil }

func (s *stuck) Save(plugin.Lists) error {
	s.wait(s.saved)
	return nil
}

// TestAllocateWaitsForNobody has the log and the store hang: no grant and no refusal waits for them.
func TestAllocateWaitsForNobody(t *testing.T) {
	s := &stuck{Handler: slog.DiscardHandler, freed: make(chan struct{}), saved: make(chan struct{}, 1), logged: make(chan struct{}, 1)}
	defer close(s.freed)
	client, manager := dialOptions(t, plugin.Options{Logger: slog.New(s), Store: s}, plan(gpu, 2, 2))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := client.Allocate(ctx, allocate("GPU-0001::0")); err != nil {
		t.Fatal(err)
	}
	s.stopped.Store(true)
	// More refusals than can wait for the log.
	for range 200 {
		if _, err := client.Allocate(ctx, allocate("GPU-0009::0")); status.Code(err) != codes.NotFound {
			t.Fatalf("error is %v", err)
		}
	}
	manager.SetHost(grant.Host{})
	manager.Apply(by(plan(gpu, 3, 2), sharing.CDICRI))
	for _, hit := range []chan struct{}{s.logged, s.saved} {
		select {
		case <-hit:
		case <-ctx.Done():
			t.Fatal("nothing hangs")
		}
	}
	for range 20 {
		if _, err := client.Allocate(ctx, allocate("GPU-0001::0")); err != nil {
			t.Fatal(err)
		}
	}
}

// TestGrantsTouchNothing checks that the code of a grant imports nothing for I/O or locks.
func TestGrantsTouchNothing(t *testing.T) {
	allowed := map[string]bool{}
	for _, path := range []string{
		"crypto/sha256", "encoding/hex", "path", "slices", "strconv", "strings", "time",
		"google.golang.org/grpc/codes", "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1",
		"github.com/virgate/virgate/plugin/grant", "github.com/virgate/virgate/sharing",
	} {
		allowed[path] = true
	}
	for _, name := range []string{"allocate.go", "grant/grant.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil || !allowed[path] {
				t.Errorf("%s imports %s", name, spec.Path.Value)
			}
		}
	}
}

// by is the plan with these strategies.
func by(p sharing.Plan, strategies ...sharing.DeviceListStrategy) sharing.Plan {
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
	ctx, cancel := context.WithTimeout(t.Context(), patience)
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

// TestUnknownNodeIsRefused checks that a container is not started without the
// device that it was promised.
func TestUnknownNodeIsRefused(t *testing.T) {
	for _, grants := range []sharing.Grants{
		{DeviceNodes: true},
		{Strategies: []sharing.DeviceListStrategy{sharing.DriverMounts}},
	} {
		p := plan(gpu, 2, 1)
		p.Grants = grants
		client, manager := dialManager(t, p)
		_, err := client.Allocate(t.Context(), allocate("GPU-0001"))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "device GPU-0001 must not be used: its device node is not known") {
			t.Errorf("%+v: error is %v", grants, err)
		}
		manager.SetHost(grant.Host{Nodes: map[string][]string{"GPU-0001": {"/dev/nvidia1"}}, DevRoot: "/driver/"})
		awaitGrant(t, client, "GPU-0001", func(r *api.ContainerAllocateResponse) bool {
			return len(r.Devices) == 1 && r.Devices[0].HostPath == "/driver/dev/nvidia1" && r.Devices[0].ContainerPath == "/dev/nvidia1"
		})
	}
}

// TestHostSendsNoList checks that a change that affects only grants sends no list.
func TestHostSendsNoList(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 2))
	b.shows(gpu, 4, 4)
	before := b.kubelet.Snapshot().Resources[gpu]
	b.manager.SetHost(grant.Host{ControlNodes: []string{"/dev/nvidiactl"}})
	b.manager.Apply(by(plan(gpu, 2, 2), sharing.CDICRI))
	b.manager.Apply(plan(gpu, 3, 2)) // Something that does need one.
	b.shows(gpu, 6, 6)
	after := b.kubelet.Snapshot().Resources[gpu]
	if after.Lists != before.Lists+1 || after.StreamsOpened != 1 {
		t.Errorf("%d lists more and %d streams", after.Lists-before.Lists, after.StreamsOpened)
	}
}

// TestDroppedResourceIsGrantedAsThePlanSays checks that a dropped resource is granted by the strategies of the
// current plan.
func TestDroppedResourceIsGrantedAsThePlanSays(t *testing.T) {
	p := plan(gpu, 2, 1)
	client, manager := dialManager(t, p)
	manager.Apply(by(sharing.Plan{Health: p.Health}, sharing.CDICRI))
	awaitGrant(t, client, "GPU-0001", func(r *api.ContainerAllocateResponse) bool {
		return len(r.CdiDevices) == 1 && r.CdiDevices[0].Name == "k8s.device-plugin.nvidia.com/gpu=GPU-0001" && len(r.Envs) == 0
	})
}

// TestOneShareOnlyIsForShares checks that FailRequestsGreaterThanOne does not apply to whole GPUs.
func TestOneShareOnlyIsForShares(t *testing.T) {
	p := plan(gpu, 2, 1)
	p.Resources[0].FailRequestsGreaterThanOne = true
	if got := granted(t, dialPlugin(t, p), "GPU-0000", "GPU-0001").Envs["NVIDIA_VISIBLE_DEVICES"]; got != "GPU-0000,GPU-0001" {
		t.Errorf("granted %q", got)
	}
}

func TestAllocate(t *testing.T) {
	oneShare := plan(gpu, 2, 4)
	oneShare.Resources[0].FailRequestsGreaterThanOne = true
	strict := plan(gpu, 2, 4)
	strict.Resources[0].SpreadStrict = true
	gone := plan(gpu, 2, 1)
	delete(gone.Health, "GPU-0001")
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

// mpsPlan has GPUs of 40 GiB in so many shares by MPS.
func mpsPlan(units, shares int, several bool) sharing.Plan {
	p := plan(gpu, units, shares)
	p.Grants.MPSRoot = "/run/nvidia/mps"
	for i := range p.Resources[0].Units {
		u := &p.Resources[0].Units[i]
		u.Memory, u.MPS = 40<<30, sharing.MPS{Shares: shares, Several: several}
	}
	for i := range p.Resources[0].Devices {
		d := &p.Resources[0].Devices[i]
		d.ID = sharing.NewMPSDeviceID(d.Unit, i%shares, shares)
	}
	return p
}

func TestAllocateMPS(t *testing.T) {
	by := func(p sharing.Plan, strategies ...sharing.DeviceListStrategy) sharing.Plan {
		p.Grants.Strategies = strategies
		return p
	}
	unknown := mpsPlan(1, 3, false)
	unknown.Resources[0].Units[0].Memory = 0
	env := func(percentage, memory, visible string) map[string]string {
		e := map[string]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage}
		if memory != "" {
			e["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = memory
		}
		if visible != "" {
			e["NVIDIA_VISIBLE_DEVICES"] = visible
		}
		return e
	}
	for _, test := range []struct {
		name    string
		plan    sharing.Plan
		ids     []string
		want    map[string]string
		code    codes.Code
		message string
	}{
		{"one of three", mpsPlan(2, 3, false), []string{"GPU-0001::2of3"}, env("33", "0=13653M", "GPU-0001"), codes.OK, ""},
		{"two of three", mpsPlan(2, 3, true), []string{"GPU-0001::2of3", "GPU-0001::0of3"}, env("66", "0=27306M", "GPU-0001"), codes.OK, ""},
		{"all", mpsPlan(2, 3, true), []string{"GPU-0001::2of3", "GPU-0001::0of3", "GPU-0001::1of3"}, env("100", "0=40960M", "GPU-0001"), codes.OK, ""},
		{"unknown memory", unknown, []string{"GPU-0000::0of3"}, env("33", "", "GPU-0000"), codes.OK, ""},
		{"by CDI alone", by(mpsPlan(1, 4, false), sharing.CDICRI), []string{"GPU-0000::0of4"}, env("25", "0=10240M", ""), codes.OK, ""},
		{"two where one is allowed", mpsPlan(2, 4, false), []string{"GPU-0001::0of4", "GPU-0001::1of4"}, nil, codes.InvalidArgument, "a container may request 1, not 2 (sharing.mps.failRequestsGreaterThanOne is set"},
		{"two GPUs", mpsPlan(2, 4, true), []string{"GPU-0000::0of4", "GPU-0001::1of4"}, nil, codes.ResourceExhausted, "a container's shares are all of one GPU, and none has 2 free"},
		{"no daemon", mpsPlan(2, 4, false).MarkModeUnavailable(map[string]string{"GPU-0000": "MPS daemon: starting"}), []string{"GPU-0000::0of4"}, nil, codes.Unavailable, "device GPU-0000::0of4 must not be used: MPS daemon: starting"},
	} {
		t.Run(test.name, func(t *testing.T) {
			response, err := dialPlugin(t, test.plan).Allocate(t.Context(), allocate(test.ids...))
			if status.Code(err) != test.code || (err != nil && !strings.Contains(err.Error(), test.message)) {
				t.Fatalf("got %v, want %s with %q", err, test.code, test.message)
			}
			if err != nil {
				return
			}
			got := response.ContainerResponses[0]
			unit, _, _ := sharing.ParseDeviceID(test.ids[0])
			test.want["CUDA_MPS_PIPE_DIRECTORY"] = "/mps/" + unit + "/pipe"
			if diff := cmp.Diff(test.want, got.Envs); diff != "" {
				t.Error(diff)
			}
			var mounts []string
			for _, m := range got.Mounts {
				mounts = append(mounts, fmt.Sprintf("%s at %s, read-only: %t", m.HostPath, m.ContainerPath, m.ReadOnly))
			}
			of := "/run/nvidia/mps/" + unit
			want := []string{of + "/pipe at /mps/" + unit + "/pipe, read-only: true", of + "/shm at /dev/shm, read-only: false"}
			if diff := cmp.Diff(want, mounts); diff != "" {
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
