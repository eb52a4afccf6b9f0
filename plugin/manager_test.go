package plugin_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

type (
	simkubeletOptions  = simkubelet.Options
	simkubeletSnapshot = simkubelet.Snapshot
)

// bench is a manager and a simulated kubelet on one directory.
type bench struct {
	t       *testing.T
	ctx     context.Context
	dir     string
	kubelet *simkubelet.Kubelet
	manager *plugin.Manager
	// stop ends the manager and waits for it.
	stop func()
}

// newBench starts both; the test fails at its end if the contract was broken.
func newBench(t *testing.T, change func(*simkubelet.Options, *plugin.Options)) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "vg") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	kubeletOptions := simkubelet.Options{Dir: dir}
	pluginOptions := plugin.Options{
		Dir: dir, Logger: slog.New(slog.DiscardHandler),
		Timing: plugin.Timing{Quiet: 50 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 50 * time.Millisecond},
	}
	b := &bench{t: t, dir: dir}
	if change != nil {
		change(&kubeletOptions, &pluginOptions)
	}
	b.kubelet = simkubelet.New(kubeletOptions)
	if pluginOptions.Kubelet == nil {
		pluginOptions.Kubelet = direct{b.kubelet}
	}
	b.manager = plugin.NewManager(pluginOptions)

	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	b.ctx = ctx
	var running sync.WaitGroup
	running.Go(func() { _ = b.kubelet.Run(ctx) })
	managed, stopManager := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.manager.Run(managed)
	}()
	b.stop = func() { stopManager(); <-ended }
	t.Cleanup(func() {
		b.stop()
		cancel()
		running.Wait()
		for _, violation := range b.kubelet.Violations() {
			t.Errorf("kubelet's contract broken: %s", violation)
		}
	})
	return b
}

// succeed runs another manager on the same directory until the test ends.
func (b *bench) succeed(options plugin.Options) *plugin.Manager {
	options.Dir, options.Logger = b.dir, slog.New(slog.DiscardHandler)
	options.Timing = plugin.Timing{Quiet: 50 * time.Millisecond, StopAfter: 50 * time.Millisecond}
	manager := plugin.NewManager(options)
	ctx, cancel := context.WithCancel(b.ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	b.t.Cleanup(func() { cancel(); running.Wait() })
	return manager
}

// direct asks the simulated kubelet without a socket.
type direct struct{ *simkubelet.Kubelet }

func (d direct) Held(context.Context) ([]sharing.Allocation, error) {
	var held []sharing.Allocation
	for _, pod := range d.Snapshot().Pods {
		for _, container := range pod.Containers {
			for _, grant := range container.Grants {
				held = append(held, sharing.Allocation{
					Namespace: pod.Namespace, Pod: pod.Name, Container: container.Name, Resource: grant.Resource, Devices: grant.Devices,
				})
			}
		}
	}
	return held, nil
}

func (d direct) Applied(context.Context) (map[string][]string, error) {
	applied := map[string][]string{}
	for name, r := range d.Snapshot().Resources {
		for _, device := range r.Devices {
			if device.Healthy {
				applied[name] = append(applied[name], device.ID)
			}
		}
	}
	return applied, nil
}

func (d direct) Serving(_ context.Context, resource string) (bool, error) {
	return d.Snapshot().Resources[resource].Allocatable > 0, nil
}

// await waits for a state of the kubelet.
func (b *bench) await(wanted func(simkubelet.Snapshot) bool) {
	b.t.Helper()
	if err := b.kubelet.Await(b.ctx, wanted); err != nil {
		b.t.Fatal(err)
	}
}

// shows waits until the kubelet has so many devices, and so many of them
// allocatable.
func (b *bench) shows(resource string, capacity, allocatable int) {
	b.t.Helper()
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[resource]
		return r.Connected && r.Capacity == capacity && r.Allocatable == allocatable
	})
}

func (b *bench) pod(name, resource string, count int) (simkubelet.PodStatus, error) {
	return b.kubelet.AddPod(b.ctx, simkubelet.Pod{
		Namespace: "test", Name: name,
		Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{resource: count}}},
	})
}

func (b *bench) mustPod(name, resource string, count int) []string {
	b.t.Helper()
	status, err := b.pod(name, resource, count)
	if err != nil {
		b.t.Fatal(err)
	}
	return status.Containers[0].Devices(resource)
}

// plan is one resource of so many units with so many replicas.
func plan(name string, units, replicas int) sharing.Plan {
	p := sharing.Plan{Faults: map[string]string{}}
	r := sharing.Resource{Name: name, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID}
	for u := range units {
		id := fmt.Sprintf("GPU-%04d", u)
		p.Faults[id] = ""
		r.Units = append(r.Units, sharing.Unit{ID: id, GPU: id, Index: fmt.Sprint(u), Replicas: replicas, NUMANode: -1})
		for n := range replicas {
			d := sharing.Device{ID: id, Unit: id, Healthy: true, NUMANode: -1}
			if replicas > 1 {
				d.ID = sharing.NewDeviceID(id, n)
			}
			r.Devices = append(r.Devices, d)
		}
	}
	p.Resources = []sharing.Resource{r}
	return p
}

// withFault marks a unit of the plan.
func withFault(p sharing.Plan, unit, fault string) sharing.Plan {
	p.Faults[unit] = fault
	for r := range p.Resources {
		for i, d := range p.Resources[r].Devices {
			if d.Unit == unit {
				p.Resources[r].Devices[i].Healthy = false
			}
		}
	}
	return p
}

const gpu = "nvidia.com/gpu"

func TestResizeKeepsTheStream(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 8, 10))
	b.shows(gpu, 80, 80)
	held := b.mustPod("p", gpu, 2)
	for _, replicas := range []int{20, 2, 4, 3, 10} {
		b.manager.Apply(plan(gpu, 8, replicas))
		b.shows(gpu, 8*replicas, 8*replicas)
	}
	r := b.kubelet.Snapshot().Resources[gpu]
	if r.StreamsOpened != 1 || r.Registrations != 1 {
		t.Errorf("%d streams and %d registrations, want 1 and 1", r.StreamsOpened, r.Registrations)
	}
	if len(held) != 2 {
		t.Errorf("held %v", held)
	}
}

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

func TestLostStreamIsRegisteredAgain(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	for range 5 {
		opened := b.kubelet.Snapshot().Resources[gpu].StreamsOpened
		start := time.Now()
		b.kubelet.DropStream(gpu)
		b.await(func(k simkubelet.Snapshot) bool {
			return k.Resources[gpu].StreamsOpened > opened && k.Resources[gpu].Allocatable == 8
		})
		t.Logf("back after %s", time.Since(start))
	}
}

func TestKubeletRestart(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	b.mustPod("p", gpu, 2)
	for range 3 {
		if err := b.kubelet.Restart(b.ctx); err != nil {
			t.Fatal(err)
		}
		b.shows(gpu, 8, 8)
	}
}

func TestSocketDeleted(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	first := b.kubelet.Snapshot().Resources[gpu].Socket
	if err := os.Remove(filepath.Join(b.dir, filepath.Base(first))); err != nil {
		t.Fatal(err)
	}
	b.mustPod("p", gpu, 1) // The open stream does not need the file.
	b.kubelet.DropStream(gpu)
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[gpu]
		return r.Allocatable == 8 && r.Socket != first
	})
}

// TestSocketWipedWhileRegistering: the kubelet would dial the old path for 10 s.
func TestSocketWipedWhileRegistering(t *testing.T) {
	b := newBench(t, nil)
	b.kubelet.SetSilent(true)
	b.manager.Apply(plan(gpu, 1, 1))
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations == 1 })
	sockets, err := filepath.Glob(filepath.Join(b.dir, "virgate-*"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets %v, %v", sockets, err)
	}
	if err := os.Remove(sockets[0]); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.ctx, 8*time.Second)
	defer cancel()
	if err := b.kubelet.Await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations == 2 }); err != nil {
		t.Error(err)
	}
}

// TestSecondStreamStartsOver lets the kubelet connect to the socket twice.
func TestSecondStreamStartsOver(t *testing.T) {
	b := newBench(t, func(options *simkubelet.Options, _ *plugin.Options) { options.AllowOverlap = true })
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	first := b.kubelet.Snapshot().Resources[gpu].Socket
	connection, err := grpc.NewClient("unix:"+filepath.Join(b.dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	_, err = api.NewRegistrationClient(connection).Register(b.ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: filepath.Base(first), ResourceName: gpu,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[gpu]
		return r.Socket != first && r.Streams == 1 && r.Allocatable == 2 && r.Connected
	})
	b.mustPod("p", gpu, 1)
}

// blind is a kubelet that cannot be read.
type blind struct{}

var errBlind = errors.New("not to be read")

func (blind) Held(context.Context) ([]sharing.Allocation, error)   { return nil, errBlind }
func (blind) Applied(context.Context) (map[string][]string, error) { return nil, errBlind }
func (blind) Serving(context.Context, string) (bool, error)        { return false, errBlind }

func TestBlindManagerKeepsWhatItGranted(t *testing.T) {
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = blind{} })
	b.manager.Apply(plan(gpu, 1, 4))
	b.shows(gpu, 4, 4)
	held := b.mustPod("p", gpu, 3)
	b.manager.Apply(withFault(plan(gpu, 1, 4), "GPU-0000", "XID 79")) // Another generation.
	b.shows(gpu, 4, 0)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 4, 3)
	for _, d := range b.kubelet.Snapshot().Resources[gpu].Devices {
		if slices.Contains(held, d.ID) != d.Healthy {
			t.Errorf("%s: Healthy %t, held are %v", d.ID, d.Healthy, held)
		}
	}
}

func TestKubeletRefuses(t *testing.T) {
	b := newBench(t, nil)
	b.kubelet.RefuseRegister(3)
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 1, 1)
}

func TestKubeletAbsentAtStart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dp")
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = manager.Run(ctx) })
	manager.Apply(plan(gpu, 1, 2))
	kubelet := simkubelet.New(simkubelet.Options{Dir: dir})
	running.Go(func() { _ = kubelet.Run(ctx) })
	if err := kubelet.Await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 2 }); err != nil {
		t.Error(err)
	}
	if n := kubelet.Snapshot().Resources[gpu].Registrations; n != 1 {
		t.Errorf("%d registrations, want 1", n)
	}
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

func TestPolicyChangeSendsNoList(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	lists := b.kubelet.Snapshot().Resources[gpu].Lists
	packed := plan(gpu, 2, 4)
	packed.Resources[0].Policy = sharing.Packed
	b.manager.Apply(packed)
	for !b.manager.Status().Served {
		runtime.Gosched()
	}
	var units []string
	for i := range 2 {
		id := b.mustPod(fmt.Sprint("p", i), gpu, 1)[0]
		unit, _, _ := sharing.ParseDeviceID(id)
		units = append(units, unit)
	}
	if units[0] != units[1] {
		t.Errorf("packed put pods on %v", units)
	}
	if n := b.kubelet.Snapshot().Resources[gpu].Lists; n != lists {
		t.Errorf("%d lists, want %d", n, lists)
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
