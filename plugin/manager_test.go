package plugin_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

func TestEmptyPlan(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(sharing.Plan{})
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	b.manager.Apply(sharing.Plan{Faults: plan(gpu, 2, 1).Faults})
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[gpu].Connected && k.Resources[gpu].Capacity == 0 })
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
}

func TestUnitFaultTakesAllReplicas(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	b.manager.Apply(withFault(plan(gpu, 2, 4), "GPU-0001", "XID 79"))
	b.shows(gpu, 8, 4)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
}

func TestRename(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 1))
	b.shows(gpu, 2, 2)
	held := b.mustPod("p", gpu, 1)
	b.manager.Apply(plan(gpu+".shared", 2, 3))
	b.shows(gpu, 1, 1)
	b.shows(gpu+".shared", 3, 3)
	if _, err := b.kubelet.RestartContainer(b.ctx, "test", "p", "main"); err != nil {
		t.Errorf("container of %v: %v", held, err)
	}
	if err := b.kubelet.DeletePod("test", "p"); err != nil {
		t.Fatal(err)
	}
	b.shows(gpu+".shared", 6, 6)
	b.await(func(k simkubelet.Snapshot) bool { return !k.Resources[gpu].Connected })
}

func TestStopIsQuick(t *testing.T) {
	for _, test := range []struct {
		name   string
		silent bool
	}{{"with a stream", false}, {"silent kubelet", true}} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.kubelet.SetSilent(test.silent)
			b.manager.Apply(plan(gpu, 8, 10))
			b.await(func(k simkubelet.Snapshot) bool {
				r := k.Resources[gpu]
				return r.Registrations > 0 && (test.silent || r.Allocatable == 80)
			})
			start := time.Now()
			b.stop()
			if took := time.Since(start); took > time.Second {
				t.Errorf("took %s", took)
			}
			left, err := filepath.Glob(filepath.Join(b.dir, "virgate-*"))
			if err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	shared := plan(gpu, 2, 4)
	shared.Resources[0].OneShareOnly = true
	spread := plan(gpu, 1, 4)
	spread.Resources[0].Policy, spread.Resources[0].SpreadStrict = sharing.Spread, true
	exclusive := plan(gpu, 2, 1)
	exclusive.Resources[0].OneShareOnly = true
	for _, test := range []struct {
		name  string
		plan  sharing.Plan
		count int
		want  string
	}{
		{"one share only", shared, 2, "failRequestsGreaterThanOne"},
		{"one share", shared, 1, ""},
		{"several exclusive", exclusive, 2, ""},
		{"strict spread", spread, 2, "distinct GPUs"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.manager.Apply(test.plan)
			b.await(func(k simkubelet.Snapshot) bool {
				return k.Resources[gpu].Allocatable == len(test.plan.Resources[0].Devices)
			})
			_, err := b.pod("p", gpu, test.count)
			switch {
			case test.want == "" && err != nil:
				t.Error(err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestAwaitStopped(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	brief, cancel := context.WithTimeout(b.ctx, 50*time.Millisecond)
	defer cancel()
	if err := b.manager.AwaitStopped(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stopped while it serves: %v", err)
	}
	b.manager.Apply(sharing.Plan{})
	if err := b.manager.AwaitStopped(b.ctx); err != nil {
		t.Error(err)
	}
	if r := b.kubelet.Snapshot().Resources[gpu]; r.Capacity != 0 {
		t.Errorf("capacity %d", r.Capacity)
	}
}
