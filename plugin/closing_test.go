package plugin_test

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
)

// TestClose holds what a closed unit's devices answer, listed or not, and that
// others are granted.
func TestClose(t *testing.T) {
	client, manager := dialManager(t, plan(gpu, 2, 2))
	manager.Close("is being re-cut", "GPU-0001", "MIG-gone")
	for _, test := range []struct {
		ids     []string
		code    codes.Code
		message string
	}{
		{[]string{"GPU-0001::0"}, codes.FailedPrecondition, "nvidia.com/gpu: device GPU-0001::0 is being re-cut"},
		{[]string{"GPU-0000::0", "GPU-0001::1"}, codes.FailedPrecondition, "GPU-0001::1 is being re-cut"},
		{[]string{"MIG-gone"}, codes.FailedPrecondition, "MIG-gone is being re-cut"},
		{[]string{"GPU-0000::0"}, codes.OK, ""},
		{[]string{"MIG-other"}, codes.NotFound, "no device"},
	} {
		_, err := client.Allocate(t.Context(), allocate(test.ids...))
		if status.Code(err) != test.code || err != nil && !strings.Contains(err.Error(), test.message) {
			t.Errorf("%v: %v, want %s %q", test.ids, err, test.code, test.message)
		}
	}
	manager.Reopen("GPU-0001")
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::0")); err != nil {
		t.Errorf("after Reopen: %v", err)
	}
	if _, err := client.Allocate(t.Context(), allocate("MIG-gone")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a unit that was not reopened: %v", err)
	}
}

// TestRetiringDeviceIsServed holds that a device which the list has Unhealthy
// because it is to leave is granted all the same: the kubelet chose it before it
// knew. A fault or a cut of its unit counts for it as for any other.
func TestRetiringDeviceIsServed(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Timing.Quiet = time.Hour })
	b.manager.Apply(plan(gpu, 2, 3))
	b.shows(gpu, 6, 6)
	b.manager.Apply(plan(gpu, 2, 2))
	b.shows(gpu, 6, 4)
	client := dialSocket(t, b.dir)
	if got := granted(t, client, "GPU-0001::2").Envs["NVIDIA_VISIBLE_DEVICES"]; got != "GPU-0001" {
		t.Errorf("granted %q", got)
	}
	b.manager.Close("is being re-cut", "GPU-0001")
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::2")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("of a closed unit: %v", err)
	}
	b.manager.Reopen("GPU-0001")
	b.manager.Apply(withFault(plan(gpu, 2, 2), "GPU-0001", "XID 79"))
	b.shows(gpu, 6, 2)
	if _, err := client.Allocate(t.Context(), allocate("GPU-0001::2")); status.Code(err) != codes.Unavailable {
		t.Errorf("of a faulty unit: %v", err)
	}
}

// TestCloseIsAtomic holds that no Allocate which begins after Close is granted,
// whatever goes on meanwhile.
func TestCloseIsAtomic(t *testing.T) {
	client, manager := dialManager(t, plan(gpu, 1, 4))
	var closed atomic.Bool
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for refused := 0; refused < 20 && t.Context().Err() == nil; {
				was := closed.Load()
				_, err := client.Allocate(t.Context(), allocate("GPU-0000::1"))
				if was && err == nil {
					t.Error("granted after Close")
					return
				}
				if err != nil {
					refused++
				}
			}
		})
	}
	manager.Close("is being re-cut", "GPU-0000")
	closed.Store(true)
	callers.Wait()
}

// TestWithdrawn holds that a unit is withdrawn when no list has it any more and
// not before, also while a pod holds it.
func TestWithdrawn(t *testing.T) {
	b := newBench(t, nil)
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
	if b.manager.Withdrawn("GPU-0001") || b.manager.Withdrawn("GPU-7", "GPU-0000") || !b.manager.Withdrawn("GPU-7") || !b.manager.Withdrawn() {
		t.Error("withdrawn is not what no list has")
	}
	pod := simkubelet.Pod{Namespace: "default", Name: "both", Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpu: 2}}}}
	if _, err := b.kubelet.AddPod(b.ctx, pod); err != nil {
		t.Fatal(err)
	}
	b.manager.Apply(plan(gpu, 1, 1))
	// The kubelet knows of the smaller list when it has been taken up for sure.
	awaitStatus(t, b, "the unit leaves", func() bool { return b.manager.Status().Resources[0].Leaving == 1 })
	if b.manager.Withdrawn("GPU-0001") {
		t.Error("a unit that a pod holds is withdrawn")
	}
	if err := b.kubelet.DeletePod("default", "both"); err != nil {
		t.Fatal(err)
	}
	awaitStatus(t, b, "a free unit is withdrawn", func() bool { return b.manager.Withdrawn("GPU-0001") })
	if got := b.kubelet.Snapshot().Resources[gpu]; got.Capacity > 2 {
		t.Errorf("capacity %d", got.Capacity)
	}
}
