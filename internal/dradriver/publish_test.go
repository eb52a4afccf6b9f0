package dradriver

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/test/bufconn"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/simdra"
	"github.com/virgate/virgate/test/await"
)

const (
	nodeName   = "n1"
	driverName = "gpu.virgate.github.io"
	poolName   = nodeName + "/" + driverName
)

// fakeAPI is an API server for one test. It fails the test if it is misused.
type fakeAPI struct {
	*simdra.API

	t *testing.T
}

func newFakeAPI(t *testing.T) *fakeAPI {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	api, err := simdra.NewAPI(ctx, driverName, nodeName, t.Errorf)
	if err != nil {
		t.Fatal(err)
	}
	return &fakeAPI{api, t}
}

// until waits for the condition.
func (f *fakeAPI) until(what string, condition func() bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 2*time.Minute)
	defer cancel()
	if f.Until(ctx, condition) != nil {
		f.Do(func() { f.t.Fatalf("%s: never; writes %q, %d lists, %d watches", what, f.Writes, f.Lists, f.Watches) })
	}
}

// watched waits until the driver has a watch.
func (f *fakeAPI) watched() {
	f.t.Helper()
	f.until("watch", func() bool { return f.Watches > 0 })
}

// put stores the slice, like another client.
func (f *fakeAPI) put(slice resourceapi.ResourceSlice) { f.Do(func() { f.Store(slice) }) }

var quiet = slog.New(slog.DiscardHandler)

// patience is how long anything may take on a busy machine.
func patience() <-chan time.Time { return time.NewTimer(await.Patience).C }

// quick makes the driver fast; these tests are not about timing.
func quick(d *Driver) {
	d.timing.pace, d.timing.settle, d.timing.spread, d.timing.beat = time.Millisecond, time.Millisecond, time.Millisecond, 20*time.Millisecond
	d.timing.retry = wait.Backoff{Duration: time.Millisecond, Factor: 2, Jitter: 1, Steps: 10, Cap: 20 * time.Millisecond}
}

// run starts a driver, which ends with the test or when the function is called.
func run(t *testing.T, options Options) (*Driver, func()) {
	t.Helper()
	return runWith(t, options, func(*Driver) {})
}

func runWith(t *testing.T, options Options, change func(*Driver)) (*Driver, func()) {
	t.Helper()
	options.Driver, options.Node, options.Logger = driverName, nodeName, quiet
	if options.Dir == "" {
		options.Dir, options.RegistryDir = t.TempDir(), t.TempDir()
	}
	d, err := New(options)
	if err != nil {
		t.Fatal(err)
	}
	quick(d)
	change(d)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return d, stop
}

// pool has a slice for each list of devices: "name", "name!" for a faulty device, "name*" for a shared one, and
// "+name" for a set of counters.
func pool(devices ...string) []resourceapi.ResourceSlice {
	node := nodeName
	var all []resourceapi.ResourceSlice
	for i, list := range devices {
		slice := resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s", i, driverName, nodeName)}}
		slice.Spec = resourceapi.ResourceSliceSpec{
			Driver: driverName, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: poolName, Generation: 1, ResourceSliceCount: int64(len(devices))},
		}
		for name := range strings.FieldsSeq(list) {
			one := *resource.NewQuantity(1, resource.DecimalSI)
			if set, ok := strings.CutPrefix(name, "+"); ok {
				slice.Spec.SharedCounters = append(slice.Spec.SharedCounters, resourceapi.CounterSet{Name: set, Counters: map[string]resourceapi.Counter{"units": {Value: one}}})
				continue
			}
			device := resourceapi.Device{
				Name:     strings.TrimRight(name, "!*"),
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("1024Mi")}},
			}
			if strings.Contains(name, "!") {
				device.Taints = []resourceapi.DeviceTaint{{Key: driverName + "/fault", Value: "xid-79", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			}
			if strings.Contains(name, "*") {
				device.AllowMultipleAllocations = new(true)
				device.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "set", Counters: map[string]resourceapi.Counter{"units": {Value: one}}}}
			}
			slice.Spec.Devices = append(slice.Spec.Devices, device)
		}
		all = append(all, slice)
	}
	return all
}

// has lists the API server's slices as "generation/count device! device".
func (f *fakeAPI) has() []string {
	var all []string
	for _, slice := range f.Sorted() {
		text := fmt.Sprintf("%d/%d", slice.Spec.Pool.Generation, slice.Spec.Pool.ResourceSliceCount)
		for _, set := range slice.Spec.SharedCounters {
			text += " +" + set.Name
		}
		for _, device := range slice.Spec.Devices {
			text += " " + device.Name
			if len(device.Taints) > 0 {
				text += "!"
			}
			if device.AllowMultipleAllocations != nil {
				text += "*"
			}
		}
		all = append(all, text)
	}
	return all
}

func (f *fakeAPI) awaits(want ...string) {
	f.t.Helper()
	f.until(fmt.Sprintf("%q", want), func() bool { return slices.Equal(f.has(), want) })
}

// wrote returns the writes since the last call. Call it when the driver is idle.
func (f *fakeAPI) wrote() (writes []string) {
	f.Do(func() { writes, f.Writes = f.Writes, nil })
	return writes
}

func TestPublish(t *testing.T) {
	f := newFakeAPI(t)
	d, _ := run(t, Options{Config: f.Config()})
	for _, step := range []struct {
		name   string
		offer  []resourceapi.ResourceSlice
		has    []string
		writes []string
	}{
		{"the first", pool("a b", "c d"), []string{"1/2 a b", "1/2 c d"}, []string{"POST 00000@1", "POST 00001@1"}},
		{"a fault is one write", pool("a! b", "c d"), []string{"1/2 a! b", "1/2 c d"}, []string{"PUT 00000@1"}},
		{"its end too", pool("a b", "c d"), []string{"1/2 a b", "1/2 c d"}, []string{"PUT 00000@1"}},
		{"another order is a change", pool("b a", "c d"), []string{"1/2 b a", "1/2 c d"}, []string{"PUT 00000@1"}},
		{"two slices are a new generation", pool("a b", "c d e"), []string{"2/2 a b", "2/2 c d e"}, []string{"PUT 00000@2", "PUT 00001@2"}},
		{"so is one more slice", pool("a b", "c d e", "f"), []string{"3/3 a b", "3/3 c d e", "3/3 f"}, []string{"PUT 00000@3", "PUT 00001@3", "POST 00002@3"}},
		{"what is gone goes first", pool("a b"), []string{"3/1 a b"}, []string{"DELETE 00001", "DELETE 00002", "PUT 00000@3"}},
		{"nothing is a slice as well", pool(""), []string{"3/1"}, []string{"PUT 00000@3"}},
	} {
		d.Publish(step.offer)
		d.Publish(step.offer)
		f.awaits(step.has...)
		if diff := cmp.Diff(step.writes, f.wrote()); diff != "" {
			t.Errorf("%s (-want +wrote):\n%s", step.name, diff)
		}
	}
	var owner []metav1.OwnerReference
	f.Do(func() {
		if f.Opened != 1 {
			t.Errorf("%d watches for 8 changes", f.Opened)
		}
		owner = f.Slices["00000-"+driverName+"-"+nodeName].OwnerReferences
	})
	if want := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: "node-uid", Controller: new(true)}}; !cmp.Equal(owner, want) {
		t.Errorf("owners: %v", owner)
	}
}

// TestUrgent checks which publications are sent at once, and which not at all.
func TestUrgent(t *testing.T) {
	d, err := New(Options{Driver: driverName, Node: nodeName, Config: newFakeAPI(t).Config(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		offer       string
		wake, fault bool
	}{
		{"a b", true, false},
		{"a b", false, false},
		{"a b c", true, false},
		{"a! b c", true, true},
		{"a! b", true, true}, // The fault was not sent yet.
	} {
		d.Publish(pool(step.offer))
		if wake := len(d.wake) == 1; wake != step.wake || d.urgent != step.fault {
			t.Errorf("%s: wake %t, urgent %t", step.offer, wake, d.urgent)
		}
		if len(d.wake) == 1 {
			<-d.wake
		}
	}
}

// TestKnown checks that the driver knows all slices after each look, so that its own writes are no news, and that
// it does not modify its input.
func TestKnown(t *testing.T) {
	f := newFakeAPI(t)
	f.Without = func(spec *resourceapi.ResourceSliceSpec) { spec.SharedCounters = nil }
	d, err := New(Options{Driver: driverName, Node: nodeName, Config: f.Config(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	p := publisher{Driver: d, known: map[string]string{}, unwatch: func() {}}
	defer func() { p.unwatch() }()
	d.Publish([]resourceapi.ResourceSlice{}) // It is no offer.
	if err := p.look(t.Context()); err != nil || f.Lists != 0 {
		t.Errorf("%d lists, error %v", f.Lists, err)
	}
	for _, offer := range [][]string{{"a", "b", "c"}, {"a", "d"}, {"+set", "a*"}, {"a"}} {
		offered := pool(offer...)
		d.Publish(offered)
		if err := p.look(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		for name, slice := range f.Slices {
			want[name] = slice.ResourceVersion
		}
		if diff := cmp.Diff(want, p.known); diff != "" {
			t.Errorf("%v: versions (-want +known):\n%s", offer, diff)
		}
		if diff := cmp.Diff(pool(offer...), offered); diff != "" {
			t.Errorf("%v: what was given is another thing now:\n%s", offer, diff)
		}
		f.Wipe("00001")
	}
}

// TestKnows checks which events are already known.
func TestKnows(t *testing.T) {
	p := publisher{known: map[string]string{"a": "7"}}
	for _, test := range []struct {
		kind          watch.EventType
		name, version string
		want          bool
	}{
		{watch.Added, "a", "7", true},
		{watch.Modified, "a", "7", true},
		{watch.Modified, "a", "8", false},
		{watch.Deleted, "a", "8", false},
		{watch.Added, "b", "8", false},
		{watch.Deleted, "b", "8", true},
	} {
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: test.name, ResourceVersion: test.version}}
		if got := p.knows(watch.Event{Type: test.kind, Object: slice}); got != test.want {
			t.Errorf("%v: %t", test, got)
		}
	}
}

// TestPace checks that a fault does not wait, and that an earlier change is in the same write.
func TestPace(t *testing.T) { synctest.Test(t, testPace) }

func testPace(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	listener := bufconn.Listen(64 << 10)
	api, err := simdra.ServeAPI(ctx, listener, driverName, nodeName, t.Errorf)
	if err != nil {
		t.Fatal(err)
	}
	f, config := &fakeAPI{api, t}, api.Config()
	config.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	d, err := New(Options{Driver: driverName, Node: nodeName, Logger: quiet, Config: config})
	if err != nil {
		t.Fatal(err)
	}
	quick(d)
	d.timing.pace = 24 * time.Hour
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { d.publish(ctx) }) // Run has sockets, too, for which synctest.Wait would wait.
	d.Publish(pool("a b"))
	f.awaits("1/1 a b")
	f.watched()
	f.wrote()
	d.Publish(pool("a b c"))
	synctest.Wait()
	d.Publish(pool("a b! c"))
	f.awaits("1/1 a b! c")
	if want, wrote := []string{"PUT 00000@1"}, f.wrote(); !slices.Equal(want, wrote) {
		t.Errorf("wrote %q", wrote)
	}
	d.Publish(pool("a b! c d"))  // It waits: its one device with a taint had it.
	d.Publish(pool("a! b! c d")) // It does not.
	f.awaits("1/1 a! b! c d")
	if want, wrote := []string{"PUT 00000@1"}, f.wrote(); !slices.Equal(want, wrote) {
		t.Errorf("wrote %q", wrote)
	}
}

// TestTakesOver checks that a successor finds the slices and writes none, and that a taint keeps its time.
func TestTakesOver(t *testing.T) {
	f := newFakeAPI(t)
	d, stop := run(t, Options{Config: f.Config()})
	d.Publish(pool("a! b", "c d"))
	f.awaits("1/2 a! b", "1/2 c d")
	f.watched()
	stop()
	f.wrote()
	since := f.Slices["00000-"+driverName+"-"+nodeName].Spec.Devices[0].Taints[0].TimeAdded.Time
	d, _ = run(t, Options{Config: f.Config()})
	d.Publish(pool("a! b", "c d"))
	f.watched()
	if wrote := f.wrote(); wrote != nil {
		t.Errorf("the successor wrote %q", wrote)
	}
	d.Publish(pool("a! b!", "c d"))
	f.awaits("1/2 a! b!", "1/2 c d")
	devices := f.Slices["00000-"+driverName+"-"+nodeName].Spec.Devices
	if !devices[0].Taints[0].TimeAdded.Time.Equal(since) || devices[1].Taints[0].TimeAdded.Time.Equal(since) {
		t.Errorf("taints: %v and %v", devices[0].Taints, devices[1].Taints)
	}
}

// TestRestores checks that changes by others are undone, at once and each time.
func TestRestores(t *testing.T) {
	f := newFakeAPI(t)
	d, _ := run(t, Options{Config: f.Config()})
	want := pool("a b", "c d")
	d.Publish(want)
	f.awaits("1/2 a b", "1/2 c d")
	f.watched()

	f.Wipe("0") // As the kubelet does when it starts.
	f.awaits("1/2 a b", "1/2 c d")
	f.Wipe("00001") // As much of it as is seen before the rest.
	f.until("whole again", func() bool { return len(f.Slices) == 2 })
	f.awaits("2/2 a b", "2/2 c d")

	f.Do(func() { // Someone edits one.
		slice := f.Slices[want[1].Name]
		slice.Spec = *slice.Spec.DeepCopy()
		slice.Spec.Devices[0].Name = "z"
		f.Store(slice)
	})
	f.awaits("2/2 a b", "2/2 c d")
	stray := pool("x")[0]
	stray.Name = "stray" // One that an earlier version has named otherwise.
	f.put(stray)
	f.awaits("2/2 a b", "2/2 c d")

	f.Do(func() { f.NodeUID = "another" }) // The Node is made anew, and its slices are collected.
	f.Wipe("0")
	f.awaits("1/2 a b", "1/2 c d")
	for _, slice := range f.Slices {
		if got := slice.OwnerReferences[0].UID; got != "another" {
			t.Errorf("%s belongs to node %s", slice.Name, got)
		}
	}
}

// TestAPIAway checks that the driver survives any failure of the API server, and reports it.
func TestAPIAway(t *testing.T) {
	f := newFakeAPI(t)
	f.Away = true
	d, _ := run(t, Options{Config: f.Config(), Changed: func() { f.Do(func() {}) }})
	d.Publish(pool("a"))
	f.until("said", func() bool { return problem(d) == "list ResourceSlices: refused by the simulation" })
	f.Do(func() { f.Away = false; f.NodeUID = "" })
	f.until("said", func() bool { return problem(d) == "read node n1: refused by the simulation" })
	f.Do(func() { f.NodeUID = "node-uid" })
	f.awaits("1/1 a")
	f.until("said", func() bool {
		state := d.State()
		wrote := !state.Written.IsZero() && state.WriteFailures >= 2
		state.Written, state.WriteFailures = time.Time{}, 0
		return wrote && reflect.DeepEqual(state, dra.DriverState{Slices: 1, Writes: 1})
	})

	f.watched() // A watch is cut, and changes made meanwhile are seen.
	opened := f.Opened
	f.Do(func() { f.Away = true; f.CutWatches() })
	f.until("cut", func() bool { return f.Watches == 0 })
	f.Wipe("0")
	f.Do(func() { f.Away = false; f.Forgotten = f.Version() })
	f.awaits("1/1 a")
	f.until("watched anew", func() bool { return f.Opened > opened && f.Watches > 0 })
	f.Wipe("0")
	f.awaits("1/1 a")
}

// TestForeign checks that slices of another program with the driver's name are left alone.
func TestForeign(t *testing.T) {
	f := newFakeAPI(t)
	foreign := pool("theirs")[0]
	foreign.Name, foreign.Spec.Pool.Name = "00000-"+driverName+"-n1-x7k2p", nodeName
	f.put(foreign)
	d, _ := run(t, Options{Config: f.Config(), Changed: func() { f.Do(func() {}) }})
	d.Publish(pool("a"))
	f.until("refused", func() bool {
		return strings.Contains(problem(d), "another program publishes this driver's devices on this node: ResourceSlice 00000-"+driverName+"-n1-x7k2p, pool n1")
	})
	if wrote := f.wrote(); wrote != nil {
		t.Errorf("wrote %q", wrote)
	}
	f.Wipe("00000")
	f.awaits("1/1 a")
}

// problem is the driver's first problem.
func problem(d *Driver) string {
	return strings.Join(d.State().Problems[:min(1, len(d.State().Problems))], "")
}

// TestDropped checks that the driver reports fields that an API server drops, with features turned off, and does
// not write them forever.
func TestDropped(t *testing.T) {
	f := newFakeAPI(t)
	f.Without = func(spec *resourceapi.ResourceSliceSpec) {
		spec.SharedCounters = nil
		for i := range spec.Devices {
			spec.Devices[i].AllowMultipleAllocations, spec.Devices[i].ConsumesCounters = nil, nil
		}
	}
	d, _ := run(t, Options{Config: f.Config(), Changed: func() { f.Do(func() {}) }})
	d.Publish(pool("+set", "a* b"))
	f.until("said", func() bool { return d.State().Without == dra.Features{Counters: true, Shares: true} })
	f.awaits("1/2", "1/2 a b")
	f.watched()
	f.wrote()
	stray := pool("x")[0]
	stray.Name = "stray" // A look that finds everything else as it can be.
	f.put(stray)
	f.awaits("1/2", "1/2 a b")
	if want, wrote := []string{"DELETE stray"}, f.wrote(); !slices.Equal(want, wrote) {
		t.Errorf("wrote %q", wrote)
	}
	d.Publish(pool("a b")) // A list without these fields must not clear it.
	f.awaits("1/1 a b")
	if got := d.State().Without; got != (dra.Features{Counters: true, Shares: true}) {
		t.Errorf("dropped: %+v", got)
	}
}
