package plugin_test

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// TestCallsAreCounted checks that each call is counted once, by its result.
func TestCallsAreCounted(t *testing.T) {
	oneShare := plan(gpu, 2, 4)
	oneShare.Resources[0].FailRequestsGreaterThanOne = true
	strict := plan(gpu, 2, 4)
	strict.Resources[0].SpreadStrict = true
	for _, test := range []struct {
		name     string
		refused  plugin.RefusalReason // empty when it is granted
		sameUnit uint64
		call     func(t *testing.T) plugin.ResourceStatus
	}{
		{name: "granted", call: allocating(plan(gpu, 2, 4), "GPU-0001::0", "GPU-0000::0")},
		{name: "granted twice the same unit", sameUnit: 1, call: allocating(plan(gpu, 2, 4), "GPU-0001::0", "GPU-0001::1", "GPU-0001::2")},
		{name: "unknown", refused: plugin.UnknownDevice, call: allocating(plan(gpu, 2, 4), "GPU-0001::9")},
		{name: "faulty", refused: plugin.UnhealthyDevice, call: allocating(withFault(plan(gpu, 2, 4), "GPU-0001", "XID 79"), "GPU-0001::0")},
		{name: "two shares", refused: plugin.TooMany, call: allocating(oneShare, "GPU-0001::0", "GPU-0000::0")},
		{name: "no spread", refused: plugin.SameUnit, call: allocating(strict, "GPU-0001::0", "GPU-0001::1")},
		{name: "nothing", refused: plugin.Internal, call: allocating(plan(gpu, 2, 4))},
		{name: "being cut", refused: plugin.MIGChange, call: func(t *testing.T) plugin.ResourceStatus {
			client, manager := dialManager(t, plan(gpu, 2, 4))
			manager.SetRefusals(plugin.MIGChange, map[string]string{"GPU-0001": "is being cut"})
			_, _ = client.Allocate(t.Context(), allocate("GPU-0001::0"))
			return manager.Status().Resources[0]
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			status := test.call(t)
			want := map[plugin.RefusalReason]uint64{}
			for _, reason := range plugin.RefusalReasons() {
				want[reason] = 0
			}
			granted := uint64(1)
			if test.refused != "" {
				granted, want[test.refused] = 0, 1
			}
			if diff := cmp.Diff(want, status.Refused); diff != "" {
				t.Errorf("refused (-want +got):\n%s", diff)
			}
			if status.Granted != granted || status.SameUnit != test.sameUnit {
				t.Errorf("%d granted, %d on one unit; want %d, %d", status.Granted, status.SameUnit, granted, test.sameUnit)
			}
		})
	}
}

// allocating asks a plugin with the plan for the devices, and returns its status.
func allocating(p sharing.Plan, ids ...string) func(*testing.T) plugin.ResourceStatus {
	return func(t *testing.T) plugin.ResourceStatus {
		client, manager := dialManager(t, p)
		_, _ = client.Allocate(t.Context(), allocate(ids...))
		return manager.Status().Resources[0]
	}
}

// callTimes counts the calls that were measured.
type callTimes struct{ granted, refused, preferred, stopped callCount }

type callCount struct{ atomic.Int64 }

func (c *callCount) Observe(seconds float64) {
	if seconds >= 0 {
		c.Add(1)
	}
}

func (c *callTimes) Start(string) plugin.CallObservers {
	return plugin.CallObservers{Granted: &c.granted, Refused: &c.refused, Preferred: &c.preferred}
}

func (c *callTimes) Stop(string) { c.stopped.Add(1) }

// TestCallsAreMeasured checks that each call is measured once, by its result.
func TestCallsAreMeasured(t *testing.T) {
	var times callTimes
	options := plugin.Options{Logger: slog.New(slog.DiscardHandler), Timing: plugin.Timing{StopAfter: time.Millisecond, RemovalDelay: time.Millisecond}}
	client, manager := dialOptions(t, options, plan(gpu, 2, 4), func(m *plugin.Manager) { m.SetCallMetrics(&times) })
	_, _ = client.Allocate(t.Context(), allocate("GPU-0001::0"))
	for range 2 {
		_, _ = client.Allocate(t.Context(), allocate("GPU-0001::9"))
	}
	for range 3 {
		_, _ = client.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{})
	}
	got := []int64{times.granted.Load(), times.refused.Load(), times.preferred.Load(), times.stopped.Load()}
	if diff := cmp.Diff([]int64{1, 2, 3, 0}, got); diff != "" {
		t.Errorf("granted, refused, preferred, stopped: %s", diff)
	}
	if manager.Status().Resources[0].Granted != 1 {
		t.Errorf("status %+v", manager.Status())
	}
}

// TestStatusLists checks that the status shows the list.
func TestStatusLists(t *testing.T) {
	_, manager := dialManager(t, plan(gpu, 2, 4))
	status := manager.Status().Resources[0]
	if len(status.Listed) != 8 || status.Listed[0].Unit != "GPU-0000" || !status.Listed[0].Healthy {
		t.Errorf("listed %+v", status.Listed)
	}
}

// TestSetRefusals checks the refusals for a refused unit's devices, listed or not, and that others are granted.
func TestSetRefusals(t *testing.T) {
	client, manager := dialManager(t, plan(gpu, 2, 2))
	manager.SetRefusals(plugin.MIGChange, map[string]string{"GPU-0001": "is being repartitioned", "MIG-gone": "is being repartitioned"})
	manager.SetRefusals(plugin.ByDRA, map[string]string{"GPU-0001": "is offered by DRA", "MIG-dra": "is offered by DRA"})
	for _, test := range []struct {
		ids     []string
		code    codes.Code
		message string
	}{
		{[]string{"GPU-0001::0"}, codes.FailedPrecondition, "nvidia.com/gpu: device GPU-0001::0 is being repartitioned"},
		{[]string{"GPU-0000::0", "GPU-0001::1"}, codes.FailedPrecondition, "GPU-0001::1 is being repartitioned"},
		{[]string{"MIG-gone"}, codes.FailedPrecondition, "MIG-gone is being repartitioned"},
		{[]string{"MIG-dra"}, codes.FailedPrecondition, "MIG-dra is offered by DRA"},
		{[]string{"GPU-0000::0"}, codes.OK, ""},
		{[]string{"MIG-other"}, codes.NotFound, "no device"},
	} {
		_, err := client.Allocate(t.Context(), allocate(test.ids...))
		if status.Code(err) != test.code || err != nil && !strings.Contains(err.Error(), test.message) {
			t.Errorf("%v: %v, want %s %q", test.ids, err, test.code, test.message)
		}
	}
	manager.SetRefusals(plugin.MIGChange, map[string]string{"MIG-gone": "is being repartitioned"})
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::0")); err == nil || !strings.Contains(err.Error(), "is offered by DRA") {
		t.Errorf("lifted for one of two reasons: %v", err)
	}
	manager.SetRefusals(plugin.ByDRA, nil)
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::0")); err != nil {
		t.Errorf("lifted: %v", err)
	}
	if _, err := client.Allocate(t.Context(), allocate("MIG-gone")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a unit that was not reopened: %v", err)
	}
}

// TestRetiringDeviceIsServed checks that a device that is Unhealthy only because it will be removed is still
// granted, as the kubelet may have chosen it before. A fault or a repartition of its unit still refuses it.
func TestRetiringDeviceIsServed(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Timing.RemovalDelay = time.Hour })
	b.manager.Apply(plan(gpu, 2, 3))
	b.shows(gpu, 6, 6)
	b.manager.Apply(plan(gpu, 2, 2))
	b.shows(gpu, 6, 4)
	client := dialSocket(t, b.dir)
	if got := granted(t, client, "GPU-0001::2").Envs["NVIDIA_VISIBLE_DEVICES"]; got != "GPU-0001" {
		t.Errorf("granted %q", got)
	}
	b.manager.SetRefusals(plugin.MIGChange, map[string]string{"GPU-0001": "is being repartitioned"})
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::2")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("of a closed unit: %v", err)
	}
	b.manager.SetRefusals(plugin.MIGChange, nil)
	b.manager.Apply(withFault(plan(gpu, 2, 2), "GPU-0001", "XID 79"))
	b.shows(gpu, 6, 2)
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::2")); status.Code(err) != codes.Unavailable {
		t.Errorf("of a faulty unit: %v", err)
	}
}

// TestSetRefusalsIsAtomic checks that no Allocate that begins after SetRefusals is granted, whatever happens
// meanwhile.
func TestSetRefusalsIsAtomic(t *testing.T) {
	client, manager := dialManager(t, plan(gpu, 1, 4))
	var closed atomic.Bool
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for refused := 0; refused < 20 && t.Context().Err() == nil; {
				was := closed.Load()
				_, err := client.Allocate(t.Context(), allocate("GPU-0000::1"))
				if was && err == nil {
					t.Error("granted after SetRefusals")
					return
				}
				if err != nil {
					refused++
				}
			}
		})
	}
	manager.SetRefusals(plugin.MIGChange, map[string]string{"GPU-0000": "is being repartitioned"})
	closed.Store(true)
	callers.Wait()
}

// TestWithdrawn checks that a unit is withdrawn once no pod can use it, and not while a pod holds it.
func TestWithdrawn(t *testing.T) {
	kubelet := &looking{seen: make(chan struct{}, 1)}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Timing.RemovalDelay, options.Kubelet = time.Hour, kubelet
	})
	kubelet.direct = direct{b.kubelet}
	if !b.manager.Withdrawn("GPU-0001") {
		t.Error("something is listed before there is a plan")
	}
	b.manager.Apply(plan(gpu, 2, 1))
	if b.manager.Withdrawn("GPU-0001") {
		t.Error("a plan that has not been taken up counts")
	}
	if err := b.kubelet.Await(b.ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 2 }); err != nil {
		t.Fatal(err)
	}
	// The kubelet may have the list a moment before the status shows it.
	awaitStatus(t, b, "the plan is taken up", func() bool { return b.manager.Status().Served })
	if b.manager.Withdrawn("GPU-0001") || b.manager.Withdrawn("GPU-7", "GPU-0000") || !b.manager.Withdrawn("GPU-7") || !b.manager.Withdrawn() {
		t.Error("withdrawn is not what no list has")
	}
	pod := simkubelet.Pod{Namespace: "default", Name: "both", Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpu: 2}}}}
	if _, err := b.kubelet.AddPod(b.ctx, pod); err != nil {
		t.Fatal(err)
	}
	// The manager must see the pod first: a grant without one may belong to a pod that is still starting.
	select {
	case <-kubelet.seen:
	case <-b.ctx.Done():
		t.Fatal("the kubelet is not read after a grant")
	}
	excluded := plan(gpu, 1, 1)
	excluded.Health["GPU-0001"] = sharing.Health{}
	b.manager.Apply(excluded)
	b.shows(gpu, 2, 1)
	if b.manager.Withdrawn("GPU-0001") {
		t.Error("a unit that a pod holds is withdrawn")
	}
	if err := b.kubelet.DeletePod("default", "both"); err != nil {
		t.Fatal(err)
	}
	awaitStatus(t, b, "a free unit is withdrawn", func() bool { return b.manager.Withdrawn("GPU-0001") })
	client := dialSocket(t, b.dir)
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a withdrawn unit's device, which is still listed, is answered %v", err)
	}
	if got := b.kubelet.Snapshot().Resources[gpu]; got.Capacity != 2 {
		t.Errorf("capacity %d", got.Capacity)
	}
}

// TestWithdrawnUnseen checks that nothing is withdrawn while holders cannot be read.
func TestWithdrawnUnseen(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = blind{} })
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 2, 1)
	awaitServed(t, b)
	if b.manager.Withdrawn("GPU-0001") {
		t.Error("withdrawn without a look at holders")
	}
}

// socketOf is the only plugin's socket in the folder of the client's manager.
func socketOf(t *testing.T, dir string) string {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(dir, "virgate-*.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets %q, %v", sockets, err)
	}
	return sockets[0]
}

// TestIdleClientsKeepNobodyOut checks that idle connections that fill the socket delay other clients by only a
// few seconds, and that the kubelet keeps its stream.
func TestIdleClientsKeepNobodyOut(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	registered := b.kubelet.Snapshot().Resources[gpu].Registrations
	for i := range 6 {
		connection, err := net.Dial("unix", socketOf(t, b.dir))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = connection.Close() })
		if i%2 == 0 { // A client that is silent, and one that greets and is silent then.
			_, _ = io.WriteString(connection, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
		}
	}
	response, err := dialSocket(t, b.dir).Allocate(t.Context(), allocate("GPU-0000::0"))
	if err != nil || len(response.ContainerResponses) != 1 {
		t.Errorf("who comes later is answered %v, %v", response, err)
	}
	b.mustPod("pod", gpu, 1)
	if r := b.kubelet.Snapshot().Resources[gpu]; r.Registrations != registered || r.Streams != 1 || !r.Connected {
		t.Errorf("the kubelet lost its stream: %+v", r)
	}
}

// TestLongRequest checks that a request for the longest list is answered, and that one with many unknown IDs
// costs little more than its bytes.
func TestLongRequest(t *testing.T) {
	client := dialPlugin(t, plan(gpu, 2, 4))
	if _, err := client.Allocate(t.Context(), allocate(make([]string, 1<<20)...)); status.Code(err) != codes.NotFound {
		t.Errorf("a million devices that do not exist are answered %v", err)
	}
	available := make([]string, 50_000)
	for i := range available {
		available[i] = fmt.Sprintf("GPU-00000000-0000-0000-0000-000000000000::%d", i)
	}
	response, err := client.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: available, MustIncludeDeviceIDs: available[:100], AllocationSize: 100},
	}})
	if err != nil || len(response.ContainerResponses[0].DeviceIDs) != 100 {
		t.Errorf("a long list is answered %v", err)
	}
}
