package migchange

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// cutter is a program that runs, on a GPU without a MIG layout.
func (w *world) cutter(ctx context.Context, r *Reconciler) (waitingRequest func(request PartitionRequest) error, ended <-chan struct{}) {
	r.Inputs = func() ([]sharing.GPU, sharing.MIGConfig, error) {
		gpus, err := nvml.Scan(w.sim)
		return gpus, sharing.MIGConfig{Manage: true}, err
	}
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	return func(request PartitionRequest) error {
		request.GPU = w.sim.GPUs()[0].UUID
		if request.Keep == nil {
			request.Keep = func() []mig.Partition { return nil }
		}
		return r.CreatePartition(ctx, request)
	}, done
}

func placed(t *testing.T, profile string, start, size int) mig.Partition {
	return mig.Partition{Profile: parsed(t, profile), Placement: mig.Placement{Start: start, Size: size}}
}

func (w *world) has(want ...mig.Partition) {
	w.t.Helper()
	if got := w.layout().Partitions; !slices.Equal(got, want) {
		w.t.Errorf("the GPU has %v, want %v", got, want)
	}
}

// TestCreatePartition makes room for one partition after another: used and kept partitions stay, and idle ones
// where possible.
func TestCreatePartition(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "h100")
	ctx, cancel := context.WithCancel(t.Context())
	waitingRequest, ended := w.cutter(ctx, w.program())
	defer func() { cancel(); <-ended }()
	wants := func(want string, p *mig.Partition, keep ...mig.Partition) {
		t.Helper()
		err := waitingRequest(PartitionRequest{Partition: p, Keep: func() []mig.Partition { return keep }})
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
		if underway := w.journal().Underway; len(underway) != 0 {
			t.Errorf("the journal has %v", underway)
		}
	}
	small, big, left := placed(t, "1g.10gb", 4, 1), placed(t, "3g.40gb", 4, 4), placed(t, "2g.20gb", 0, 2)
	wants("", &small)
	wants("", &left)
	w.has(left, small)
	writes := w.driverWrites()
	if wants("", &left); w.driverWrites() != writes {
		t.Error("what is there is made again")
	}
	wants("1g.10gb at 4:1 is in the way and in use", &big, small)
	wants("2g.20gb at 0:2 is in the way and in use", nil, left)
	wants("", &big, left, big)
	w.has(left, big)
	w.use([]int{0, 1})
	wants("in the way and in use", nil)
	other := placed(t, "1g.10gb", 0, 1)
	wants("in the way and in use", &other)
	w.has(left, big)
	for device := range 2 {
		_ = w.sim.RemoveProcess(0, device, 4000+device)
	}
	wants("", nil)
	if w.layout().MIG {
		t.Error("the GPU is not whole")
	}
	if err := w.sim.AddProcess(0, -1, 4711, 1<<20); err != nil {
		t.Fatal(err)
	}
	wants("in use as a whole by a process", &small)
}

// TestCutKeepsWhatClaimsHave checks that idle partitions without a claim are destroyed first.
func TestCutKeepsWhatClaimsHave(t *testing.T) {
	t.Parallel()
	g, ok := mig.GeometryOf(0x2330)
	if !ok {
		t.Fatal("no geometry")
	}
	var state sharing.MIGState
	state.Geometry, state.Enabled = g, true
	var seven []mig.Partition
	for i := range 7 {
		p := placed(t, "1g.10gb", i, 1)
		seven = append(seven, p)
		state.Instances = append(state.Instances, mig.Instance{GI: i, Profile: p.Profile, Placement: p.Placement, Computes: []mig.Compute{{Slices: 1}}})
	}
	// The last slot has no slice of its own, so one of the other partitions must go.
	want := placed(t, "1g.20gb", 6, 2)
	for kept := range 6 {
		request := PartitionRequest{Partition: &want, Keep: func() []mig.Partition { return seven[:kept+1] }}
		target, err := request.target(state, "")
		if err != nil || !slices.Equal(target.Partitions, append(slices.Clone(seven[:6]), want)) {
			t.Errorf("%v, %v", target, err)
		}
	}
	request := PartitionRequest{Partition: &want, Keep: func() []mig.Partition { return seven }}
	if _, err := request.target(state, ""); !errors.Is(err, mig.ErrInUse) {
		t.Errorf("%v", err)
	}
}

// TestCutRefuses checks which requests are refused before anything is changed.
func TestCutRefuses(t *testing.T) {
	t.Parallel()
	small := placed(t, "1g.10gb", 4, 1)
	for name, test := range map[string]struct {
		change func(w *world, r *Reconciler)
		want   string
	}{
		"holders unknown": {func(_ *world, r *Reconciler) { r.Holders = blind }, "cannot be read"},
		"held as a whole": {func(w *world, _ *Reconciler) { w.held = []string{w.sim.GPUs()[0].UUID} }, "in use as a whole by default/pod"},
		"no state file":   {func(w *world, _ *Reconciler) { w.saving = errDisk }, "disk full"},
		"not permitted":   {func(w *world, _ *Reconciler) { w.enter("unprivileged") }, "not permitted"},
		"processes hidden": {func(_ *world, r *Reconciler) {
			partitioner := r.Partitioner.(*nvml.Partitioner)
			partitioner.ProcessesHidden = true
		}, "unknown, because the driver lists no processes"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "h100")
			r := w.program()
			test.change(w, r)
			ctx, cancel := context.WithCancel(t.Context())
			waitingRequest, ended := w.cutter(ctx, r)
			defer func() { cancel(); <-ended }()
			if err := r.CreatePartition(t.Context(), PartitionRequest{GPU: "GPU-other", Partition: &small}); !errors.Is(err, errReleased) {
				t.Error(err)
			}
			if err := waitingRequest(PartitionRequest{Partition: &small}); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if writes := w.driverWrites(); writes != 0 {
				t.Errorf("%d calls that change the GPU", writes)
			}
		})
	}
}

// TestCutIsGivenUp checks that a request can be cancelled while it waits for another change of the GPU.
func TestCutIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "h100")
		answer := make(chan struct{})
		w.sim.InjectFault("DeviceSetMigMode", simnode.Fault{Return: nvml.Success, Until: answer, Times: 1})
		r := w.program()
		ctx, cancel := context.WithCancel(t.Context())
		waitingRequest, ended := w.cutter(ctx, r)
		defer func() { cancel(); <-ended }()
		small, other := placed(t, "1g.10gb", 4, 1), placed(t, "1g.10gb", 5, 1)
		first := make(chan error, 1)
		go func() { first <- waitingRequest(PartitionRequest{Partition: &small}) }()
		synctest.Wait()
		if !r.Changing(w.sim.GPUs()[0].UUID) {
			t.Fatal("nothing begins")
		}
		gaveUp, giveUp := context.WithCancel(t.Context())
		giveUp()
		if err := r.CreatePartition(gaveUp, PartitionRequest{GPU: w.sim.GPUs()[0].UUID, Partition: &other}); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		close(answer)
		if err := <-first; err != nil {
			t.Error(err)
		}
		w.has(small)
	})
}

// TestBlocked checks that no change begins while Blocked gives a reason, that the status shows the reason, and
// that the change is made afterwards.
func TestBlocked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "h100")
		r, layout := w.program(), "all-1g.10gb"
		var blocked atomic.Bool
		blocked.Store(true)
		r.now, r.Blocked = time.Now, func(string) string {
			if blocked.Load() {
				return "GPU 1 is released"
			}
			return ""
		}
		ctx, cancel := context.WithCancel(t.Context())
		waitingRequest, ended := w.cutter(ctx, r)
		small := placed(t, "1g.10gb", 4, 1)
		if err := waitingRequest(PartitionRequest{Partition: &small}); !errors.Is(err, errBlocked) {
			t.Error(err)
		}
		cancel()
		<-ended
		r.Inputs = func() ([]sharing.GPU, sharing.MIGConfig, error) {
			gpus, err := nvml.Scan(w.sim)
			return gpus, layoutNamed(layout), err
		}
		ctx, cancel = context.WithCancel(t.Context())
		ran := make(chan struct{})
		go func() { defer close(ran); r.Run(ctx) }()
		defer func() { cancel(); <-ran }()
		wait(time.Minute)
		if states(r) != "pending" || r.Status()[0].Reason != "waits: GPU 1 is released" || w.driverWrites() != 0 {
			t.Errorf("%s, %+v, %d calls that change the GPU", states(r), r.Status(), w.driverWrites())
		}
		blocked.Store(false)
		wait(10 * time.Second)
		if states(r) != "applied" {
			t.Errorf("afterwards %s, %+v", states(r), r.Status())
		}
	})
}

// TestCutIsKilled ends the program at each of its writes. The next run finishes or undoes the change, and then
// the same request succeeds.
func TestCutIsKilled(t *testing.T) {
	t.Parallel()
	small, big := placed(t, "1g.10gb", 4, 1), placed(t, "3g.40gb", 4, 4)
	for dies := 1; dies < 20; dies++ {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprint(dies, late), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, "h100")
				ctx, cancel := context.WithCancel(t.Context())
				waitingRequest, ended := w.cutter(ctx, w.program())
				if err := waitingRequest(PartitionRequest{Partition: &small}); err != nil {
					t.Fatal(err)
				}
				cancel()
				<-ended
				ctx, w.kill = context.WithCancel(t.Context())
				w.seen, w.dies, w.late = 0, dies, late
				waitingRequest, ended = w.cutter(ctx, w.program())
				err := waitingRequest(PartitionRequest{Partition: &big})
				w.kill()
				<-ended
				if !w.dead && err != nil {
					t.Fatal(err)
				}
				w.dead, w.dies = false, 0
				ctx, cancel = context.WithCancel(t.Context())
				r := w.program()
				w.run(r, sharing.MIGConfig{Manage: true}, true, 5)
				waitingRequest, ended = w.cutter(ctx, r)
				defer func() { cancel(); <-ended }()
				if err := waitingRequest(PartitionRequest{Partition: &big}); err != nil {
					t.Error(err)
				}
				w.has(big)
			})
		}
	}
}
