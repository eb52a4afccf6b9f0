package plugin_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// apiServer has the numbers that the scheduler sees.
type apiServer struct {
	bench *bench
	mu    sync.Mutex
	// calls are the announcements, with the kubelet's numbers at that time.
	calls []call
	// answer receives the result of the next call; without it, calls succeed at once. A call ignores its context,
	// like a request that hangs.
	answer chan error
	asked  chan struct{}
	now    time.Time
	goesOn bool
	// calling counts the calls that have not returned; there must be at most one.
	calling atomic.Int32
}

type call struct{ announced, kubelet map[string]string }

func (a *apiServer) Announce(_ context.Context, capacity, allocatable map[string]int) map[string]bool {
	if a.calling.Add(1) > 1 {
		a.bench.t.Error("announced beside another announcement")
	}
	defer a.calling.Add(-1)
	made, written := call{map[string]string{}, map[string]string{}}, map[string]bool{}
	snapshot := a.bench.kubelet.Snapshot()
	for name := range capacity {
		made.announced[name] = fmt.Sprint(allocatable[name], " of ", capacity[name])
		written[name] = true
		made.kubelet[name] = fmt.Sprint(snapshot.Resources[name].Allocatable, " of ", snapshot.Resources[name].Capacity)
	}
	a.mu.Lock()
	a.calls = append(a.calls, made)
	answer := a.answer
	a.mu.Unlock()
	if answer != nil {
		a.asked <- struct{}{}
		if <-answer != nil {
			return nil
		}
	}
	return written
}

// clock hardly moves until goOn is called.
func (a *apiServer) clock() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.goesOn {
		return time.Now()
	}
	a.now = a.now.Add(time.Microsecond)
	return a.now
}

func (a *apiServer) goOn() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.goesOn = true
}

// stop has the clock stand still again.
func (a *apiServer) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.goesOn, a.now = false, time.Now()
}

// hang has the next calls wait for answer.
func (a *apiServer) hang(t *testing.T) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answer, a.asked = make(chan error), make(chan struct{}, 16)
	t.Cleanup(func() { close(a.answer) })
}

func (a *apiServer) seen() []call {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]call(nil), a.calls...)
}

// ofEight is a plan of some of eight healthy units.
func ofEight(units int) sharing.Plan {
	p := plan(gpu, units, 1)
	p.Health = plan(gpu, 8, 1).Health
	return p
}

func newAnnouncedBench(t *testing.T, still bool) (*bench, *apiServer) {
	a := &apiServer{now: time.Now()}
	b := newBench(t, func(_ *simkubelet.Options, o *plugin.Options) {
		if o.Announcer = a; still {
			o.Now = a.clock
		}
	})
	a.bench = b
	t.Cleanup(a.goOn)
	b.manager.Apply(plan(gpu, 8, 1))
	b.shows(gpu, 8, 8)
	awaitStatus(t, b, "the first list is applied", func() bool {
		resources := b.manager.Status().Resources
		return len(resources) > 0 && resources[0].Applied
	})
	return b, a
}

func (a *apiServer) await(t *testing.T, what string, so func(calls []call) bool) {
	t.Helper()
	err := await.Condition(t.Context().Done(), func() error {
		if calls := a.seen(); !so(calls) {
			return fmt.Errorf("announced %v", calls)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func last(announced string) func([]call) bool {
	return func(calls []call) bool {
		return len(calls) > 0 && calls[len(calls)-1].announced[gpu] == announced
	}
}

// TestAnnounce checks that fewer devices are announced before the kubelet has them, and more afterwards.
func TestAnnounce(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, false)
	a.await(t, "the first list is announced", last("8 of 8"))
	b.manager.Apply(ofEight(4))
	b.shows(gpu, 4, 4)
	a.await(t, "what is left is announced", last("4 of 4"))
	b.manager.Apply(ofEight(6))
	b.shows(gpu, 6, 6)
	a.await(t, "the raise is announced", last("6 of 6"))
	kubelet := map[string]string{}
	for _, c := range a.seen() {
		if _, again := kubelet[c.announced[gpu]]; !again {
			kubelet[c.announced[gpu]] = c.kubelet[gpu]
		}
	}
	// Virgate reads in PodResources which devices are healthy, and not when the kubelet drops the others.
	if kubelet["4 of 4"] == "4 of 8" {
		kubelet["4 of 4"] = "4 of 4"
	}
	if want := map[string]string{"8 of 8": "8 of 8", "4 of 8": "8 of 8", "4 of 4": "4 of 4", "6 of 6": "6 of 6"}; !maps.Equal(kubelet, want) {
		t.Errorf("announced, and what the kubelet had then: %v, want %v", kubelet, want)
	}
}

// TestAnnouncedFirst checks that a list with fewer devices waits for its announcement and for pods bound just
// before it. Meanwhile the old list is served and does not count as applied.
func TestAnnouncedFirst(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, true)
	a.await(t, "the first list is announced", last("8 of 8"))
	a.hang(t)
	b.manager.Apply(ofEight(4))
	<-a.asked
	awaitServed(t, b)
	if r := b.manager.Status().Resources[0]; r.Healthy != 8 || r.Applied {
		t.Errorf("before the announcement the list has %d healthy devices, applied %t", r.Healthy, r.Applied)
	}
	b.mustPod("bound-just-before", gpu, 2)
	a.answer <- nil
	a.goOn()
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 4 })
}

// TestAnnouncedLate checks that a list is sent even if the API server refuses or does not answer in time.
func TestAnnouncedLate(t *testing.T) {
	t.Parallel()
	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		b, a := newAnnouncedBench(t, true)
		a.await(t, "the first list is announced", last("8 of 8"))
		a.hang(t)
		b.manager.Apply(ofEight(4))
		<-a.asked
		a.answer <- errors.New("forbidden")
		b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 4 })
	})
	t.Run("hangs", func(t *testing.T) {
		t.Parallel()
		b, a := newAnnouncedBench(t, false)
		a.await(t, "the first list is announced", last("8 of 8"))
		a.hang(t)
		b.manager.Apply(ofEight(4))
		<-a.asked
		b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 4 })
	})
}

// TestFaultIsNotAnnouncedFirst checks that a fault reaches the kubelet while the API server hangs, even if a list
// is waiting.
func TestFaultIsNotAnnouncedFirst(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, true)
	a.await(t, "the first list is announced", last("8 of 8"))
	a.hang(t)
	b.manager.Apply(ofEight(6))
	<-a.asked
	b.manager.Apply(withFault(ofEight(6), "GPU-0000", "XID 79"))
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 5 })
}

// TestAnnouncedTogether checks that simultaneous changes are announced together, and that a change that is undone
// is announced as undone and never sent.
func TestAnnouncedTogether(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, true)
	two := func(units int) sharing.Plan {
		p, other := ofEight(units), plan("nvidia.com/other", 8, 1)
		for i := range other.Resources[0].Units {
			u, d := &other.Resources[0].Units[i], &other.Resources[0].Devices[i]
			u.ID, u.GPU, d.ID, d.Unit = "O"+u.ID, "O"+u.GPU, "O"+d.ID, "O"+d.Unit
			p.Health[u.ID] = sharing.Health{}
		}
		other.Resources[0].Units, other.Resources[0].Devices = other.Resources[0].Units[:units], other.Resources[0].Devices[:units]
		p.Resources = append(p.Resources, other.Resources...)
		return p
	}
	b.manager.Apply(two(8))
	b.shows("nvidia.com/other", 8, 8)
	a.await(t, "the other resource is announced", func(calls []call) bool {
		return calls[len(calls)-1].announced["nvidia.com/other"] == "8 of 8"
	})
	a.hang(t)
	b.manager.Apply(two(4))
	<-a.asked
	calls := a.seen()
	if got := calls[len(calls)-1].announced; got[gpu] != "4 of 8" || got["nvidia.com/other"] != "4 of 8" {
		t.Errorf("announced %v", got)
	}
	b.manager.Apply(two(8))
	awaitServed(t, b)
	a.answer <- nil
	<-a.asked
	a.answer <- nil
	a.await(t, "the old number is announced again", last("8 of 8"))
	if lists := b.manager.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists were sent", lists)
	}
}

// TestSwitchToMPSIsAnnounced checks that a unit whose daemon is not ready counts as switched, not as faulty: its
// list waits.
func TestSwitchToMPSIsAnnounced(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, true)
	a.await(t, "the first list is announced", last("8 of 8"))
	a.hang(t)
	p, notReady := plan(gpu, 8, 2), map[string]string{}
	for i := range p.Resources[0].Units {
		unit := &p.Resources[0].Units[i]
		unit.MPS.Shares = 2
		notReady[unit.ID] = "its MPS daemon is not ready"
	}
	for i := range p.Resources[0].Devices {
		device := &p.Resources[0].Devices[i]
		device.ID = sharing.NewMPSDeviceID(device.Unit, i%2, 2)
	}
	b.manager.Apply(p.MarkModeUnavailable(notReady))
	<-a.asked
	awaitServed(t, b)
	if healthy := b.manager.Status().Resources[0].Healthy; healthy != 8 {
		t.Errorf("before the announcement the list has %d healthy devices", healthy)
	}
}

// TestWaitingIsNotWithdrawn checks that a unit is not withdrawn while a waiting list has it.
func TestWaitingIsNotWithdrawn(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, true)
	all := plan(gpu, 8, 1)
	b.manager.Apply(ofEight(4))
	a.goOn()
	b.shows(gpu, 4, 4)
	a.await(t, "four are announced", last("4 of 4"))
	a.stop()
	a.hang(t)
	another, shared := ofEight(1), plan(gpu, 4, 2)
	another.Resources[0].Units, another.Resources[0].Devices = all.Resources[0].Units[4:5], all.Resources[0].Devices[4:5]
	shared.Health = all.Health
	b.manager.Apply(another)
	<-a.asked
	awaitServed(t, b)
	if b.manager.Withdrawn("GPU-0004") {
		t.Error("withdrawn, although a list that waits offers it")
	}
}

// TestEndIsAnnounced checks that the end is announced before the kubelet loses the devices, and that pods bound
// before still get theirs.
func TestEndIsAnnounced(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, true)
	a.await(t, "the first list is announced", last("8 of 8"))
	a.hang(t)
	ended := make(chan struct{})
	go func() { b.stop(); close(ended) }()
	<-a.asked
	calls := a.seen()
	if got, want := calls[len(calls)-1], (call{map[string]string{gpu: "0 of 8"}, map[string]string{gpu: "8 of 8"}}); !maps.Equal(got.announced, want.announced) || !maps.Equal(got.kubelet, want.kubelet) {
		t.Errorf("announced %v while the kubelet had %v, want %v", got.announced, got.kubelet, want)
	}
	b.mustPod("bound-just-before", gpu, 2)
	a.answer <- nil
	b.mustPod("on-its-way", gpu, 2)
	a.goOn()
	<-ended
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 0 })
}

// TestEndWithoutAPIServer checks that the program ends even if the API server refuses the announcement.
func TestEndWithoutAPIServer(t *testing.T) {
	t.Parallel()
	b, a := newAnnouncedBench(t, false)
	a.await(t, "the first list is announced", last("8 of 8"))
	a.hang(t)
	ended := make(chan struct{})
	go func() { b.stop(); close(ended) }()
	<-a.asked
	a.answer <- errors.New("forbidden")
	<-ended
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 0 })
}

// TestStartIsAnnounced checks that the last run's devices are announced as gone once the next run may serve,
// before it has a plan, and as present once the kubelet has them again. A hanging API server delays no list.
func TestStartIsAnnounced(t *testing.T) {
	t.Parallel()
	a := &apiServer{now: time.Now()}
	store := &memory{}
	b := newBench(t, func(_ *simkubelet.Options, o *plugin.Options) { o.Store = store })
	a.bench = b
	b.manager.Apply(plan(gpu, 8, 1))
	b.shows(gpu, 8, 8)
	b.stop()
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 0 })

	ctx, cancel := context.WithCancel(b.ctx)
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	a.hang(t)
	next := plugin.NewManager(plugin.Options{
		Dir: b.dir, Kubelet: direct{b.kubelet}, Store: store, Announcer: a, Logger: slog.New(slog.DiscardHandler),
		Timing: plugin.Timing{StreamTimeout: time.Hour, VerifyAfter: time.Hour},
	})
	next.TakeOver(b.ctx)
	<-a.asked
	next.Apply(plan(gpu, 8, 1))
	running.Go(func() { _ = next.Run(ctx) })
	b.shows(gpu, 8, 8)
	b.manager = next
	awaitStatus(t, b, "the list is applied", func() bool {
		resources := next.Status().Resources
		return len(resources) > 0 && resources[0].Applied
	})
	b.mustPod("meanwhile", gpu, 1) // By now the second announcement would have begun.
	a.answer <- nil
	<-a.asked
	a.answer <- nil
	a.await(t, "both are announced", func(calls []call) bool { return len(calls) == 2 })
	for i, want := range []string{"0 of 8", "8 of 8"} {
		if got := a.seen()[i]; got.announced[gpu] != want || got.kubelet[gpu] != want {
			t.Errorf("announced %v while the kubelet had %v, want %s", got.announced, got.kubelet, want)
		}
	}
}
