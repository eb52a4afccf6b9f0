package mpsshare

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// node has one GPU, which is planned and listed in four MPS shares while shared is true, and otherwise not at
// all. Its daemons are never reported.
type node struct {
	*Manager
	shared  bool
	users   []string
	pending bool
	wanted  []string
	// units is the last request, states the answer of virgate mps; holders and unread are the kubelet's answer.
	units   []nodereport.MPSUnit
	states  []nodereport.MPSState
	holders []sharing.Allocation
	unread  bool
	// released are the released GPUs, closed the GPUs that virgate mps must keep closed; slow: it does not do so
	// yet.
	released, closed map[string]int
	slow             bool
}

func newNode() *node {
	n := &node{shared: true}
	gpus := []sharing.GPU{{UUID: "GPU-a"}}
	n.Manager = New(Options{
		Daemons: n,
		Inputs: func() (_ []sharing.GPU, plan sharing.Plan, planned bool) {
			if n.shared {
				unit := sharing.Unit{ID: "GPU-a", GPU: "GPU-a", MPS: sharing.MPS{Shares: 4}}
				plan.Resources = []sharing.Resource{{Name: "r", Units: []sharing.Unit{unit}}}
			}
			return gpus, plan, true
		},
		Lists: func() plugin.Status {
			if !n.shared {
				return plugin.Status{Served: true}
			}
			device := sharing.Device{ID: "GPU-a::0of4", Unit: "GPU-a"}
			listed := []plugin.Entry{{Device: device, Mode: sharing.MPSMode(4)}}
			return plugin.Status{Served: true, KubeletSeen: !n.unread, Holders: n.holders, Resources: []plugin.ResourceStatus{{Name: "r", Listed: listed}}}
		},
		ByDRA:              func() map[string]sharing.Unit { return map[string]sharing.Unit{} },
		Users:              func(context.Context, string) []string { return n.users },
		ComputeModePending: func(string) bool { return n.pending },
		Released:           func() map[string]int { return maps.Clone(n.released) },
		Resets:             func(string) int { return 0 },
		Changed:            func() {},
	})
	return n
}

func (n *node) Want(units []nodereport.MPSUnit) {
	n.wanted, n.units = nil, units
	for _, u := range units {
		n.wanted = append(n.wanted, u.ID)
	}
}

func (n *node) KeepClosed(released map[string]int) bool {
	n.closed = maps.Clone(released)
	return !n.slow
}

func (n *node) States() ([]nodereport.MPSState, bool) { return n.states, true }

func (*node) Watch(context.Context, func()) error { return nil }

// TestWaitsForTheGPU checks that no daemon is wanted while the GPU is used in another way or its compute mode is
// not restored, and that View gives the reason.
func TestWaitsForTheGPU(t *testing.T) {
	t.Parallel()
	n := newNode()
	for _, test := range []struct {
		users   []string
		pending bool
		waits   string
	}{
		{[]string{"process 42", "ns/pod"}, false, "in use by process 42"},
		{nil, true, "its compute mode is being set back"},
		{nil, false, ""},
	} {
		n.users, n.pending = test.users, test.pending
		again := n.follow(t.Context())
		if got := n.View().Waits["GPU-a"]; got != test.waits {
			t.Errorf("it waits for %q, want %q", got, test.waits)
		}
		if wanted := slices.Equal(n.wanted, []string{"GPU-a"}); wanted != (test.waits == "") || again == wanted {
			t.Errorf("%+v: wanted %q, looks again soon: %t", test, n.wanted, again)
		}
	}
}

// TestLeavesCommonMemory checks that virgate mps learns when a unit is free, if its clients may still have the
// /dev/shm of all units, and only then; and how much memory the unit gets.
func TestLeavesCommonMemory(t *testing.T) {
	t.Parallel()
	n := newNode()
	n.follow(t.Context())
	holder := []sharing.Allocation{{Resource: "r", Devices: []string{sharing.NewMPSDeviceID("GPU-a", 0, 4)}}}
	for _, test := range []struct {
		name           string
		common, unread bool
		holders        []sharing.Allocation
		vacant         bool
	}{
		{"held", true, false, holder, false},
		{"not known", true, true, nil, false},
		{"free", true, false, nil, true},
		{"its own", false, false, nil, false},
	} {
		n.states = []nodereport.MPSState{{ID: "GPU-a", Phase: nodereport.MPSReady, CommonMemory: test.common}}
		n.holders, n.unread = test.holders, test.unread
		n.follow(t.Context())
		if got := n.units[0]; got.Vacant != test.vacant || got.MemoryParts != 1 {
			t.Errorf("%s: %+v", test.name, got)
		}
	}
	gpus := []sharing.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Partitions: []sharing.Partition{{UUID: "MIG-a"}}}}
	if got := n.daemonFor(gpus, "MIG-a", 2, sharing.Unit{ID: "MIG-a", GPU: "GPU-b", MPS: sharing.MPS{Shares: 2}}, true).MemoryParts; got != 14 {
		t.Errorf("a partition on a node of two GPUs has a part of %d", got)
	}
	if got := n.daemonFor(gpus, "GPU-a", 2, sharing.Unit{ID: "GPU-a", GPU: "GPU-a", MPS: sharing.MPS{Shares: 2}}, true).MemoryParts; got != 2 {
		t.Errorf("one of two GPUs has a part of %d", got)
	}
}

// TestDoubt checks that a GPU whose daemon was wanted but never reported counts as busy for a while, as the
// daemon may still start.
func TestDoubt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		n.follow(t.Context())
		n.shared = false
		n.follow(t.Context())
		if len(n.wanted) > 0 || !n.View().Busy["GPU-a"] {
			t.Errorf("wanted %q, busy %v", n.wanted, n.View().Busy)
		}
		ctx, cancel := context.WithTimeout(t.Context(), doubt+waitInterval)
		defer cancel()
		began := time.Now()
		ended := time.Time{}
		n.Changed = func() {
			if !n.View().Busy["GPU-a"] {
				ended = time.Now()
			}
		}
		_ = n.Run(ctx) // It ends with ctx.
		if took := ended.Sub(began); took < doubt || took > doubt+waitInterval {
			t.Errorf("busy for %s, want %s", took, doubt)
		}
	})
}

// TestKeepsReleasedClosed checks that virgate mps gets the released GPUs once their daemons have ended, and that
// View lists them once it keeps them closed.
func TestKeepsReleasedClosed(t *testing.T) {
	t.Parallel()
	n := newNode()
	n.released = map[string]int{"GPU-a": 3}
	n.follow(t.Context())
	if len(n.closed) > 0 || n.View().Closed["GPU-a"] {
		t.Errorf("with a daemon, %v are to be closed, and %v are", n.closed, n.View().Closed)
	}
	n = newNode()
	n.shared, n.released, n.slow = false, map[string]int{"GPU-a": 3}, true
	if again := n.follow(t.Context()); !again || n.closed["GPU-a"] != 3 || n.View().Closed["GPU-a"] {
		t.Errorf("%v are to be closed, and %v are, looks again %t", n.closed, n.View().Closed, again)
	}
	n.slow = false
	if again := n.follow(t.Context()); again || !n.View().Closed["GPU-a"] {
		t.Errorf("closed, and %v are, looks again %t", n.View().Closed, again)
	}
}
