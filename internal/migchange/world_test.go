package migchange

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// world is a node whose first GPU is partitioned. It keeps the driver and the journal when a program ends.
type world struct {
	t    *testing.T
	sim  *simnode.Node
	kept Journal
	// saves counts writes of the journal, writes the driver's calls that change
	// something.
	saves, writes int
	// held are units held by pods.
	held []string
	// dies is the write, of the driver or the journal, at which the program ends: before the write, or after it if
	// late. 0 is never. A dead program writes nothing more, and kill ends its context.
	dies, seen int
	late, dead bool
	kill       context.CancelFunc
	mu         sync.Mutex
	// saving fails with this.
	saving error
	clock  time.Time
	// gpus is how many of the node's GPUs are managed, 1 when zero.
	gpus int
}

func newWorld(t *testing.T, node string) *world {
	t.Helper()
	sim, err := simnode.New(node)
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, sim: sim, clock: time.Unix(1e9, 0)}
}

// newWorldIn is newWorld in a --sim-world.
func newWorldIn(t *testing.T, node, world string) *world {
	t.Helper()
	w := newWorld(t, node)
	w.enter(world)
	return w
}

func (w *world) enter(world string) {
	w.t.Helper()
	if err := w.sim.SetWorld(world); err != nil {
		w.t.Fatal(err)
	}
}

var errKilled = errors.New("killed")

// at is the world at a write, which SIGKILL may meet.
func (w *world) at(write func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seen++; w.seen == w.dies {
		defer w.kill()
		defer func() { w.dead = true }()
		if w.late {
			_ = write()
		}
		return errKilled
	}
	if w.dead {
		return errKilled
	}
	return write()
}

// journal is the kept journal, for use while a program runs.
func (w *world) journal() Journal {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.kept
}

// driverWrites is writes, for a test whose program runs.
func (w *world) driverWrites() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.writes
}

// Read and WriteOrForget are a state file.
func (w *world) Read(_ string, value any) (bool, error) {
	*value.(*Journal) = w.kept
	return true, nil
}

func (w *world) WriteOrForget(_ string, value any) error {
	return w.at(func() error {
		w.saves++
		if w.saving == nil {
			w.kept = value.(Journal)
		}
		return w.saving
	})
}

// Withdrawn and SetRefusals are a kubelet that lets go at once.
func (*world) Withdrawn(...string) bool      { return true }
func (*world) SetRefusals(map[string]string) {}
func (*world) RefreshHolders(...string)      {}

// driver is the simulated driver with the program's end in it.
type driver struct {
	*simnode.Node
	*world
}

func written[T any](w *world, write func() (T, error)) (value T, err error) {
	err = w.at(func() error {
		w.writes++
		value, err = write()
		return err
	})
	return value, err
}

func (d driver) DeviceSetMigMode(device nvml.Device, on bool) (nvml.Return, error) {
	return written(d.world, func() (nvml.Return, error) { return d.Node.DeviceSetMigMode(device, on) })
}

func (d driver) DeviceCreateGpuInstanceWithPlacement(device nvml.Device, profile int, at mig.Placement) (nvml.GPUInstance, error) {
	return written(d.world, func() (nvml.GPUInstance, error) {
		return d.Node.DeviceCreateGpuInstanceWithPlacement(device, profile, at)
	})
}

func (d driver) GpuInstanceDestroy(gi nvml.GPUInstance) error {
	_, err := written(d.world, func() (struct{}, error) { return struct{}{}, d.Node.GpuInstanceDestroy(gi) })
	return err
}

func (d driver) GpuInstanceCreateComputeInstance(gi nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	return written(d.world, func() (nvml.ComputeInstance, error) { return d.Node.GpuInstanceCreateComputeInstance(gi, profile) })
}

func (d driver) ComputeInstanceDestroy(ci nvml.ComputeInstance) error {
	_, err := written(d.world, func() (struct{}, error) { return struct{}{}, d.Node.ComputeInstanceDestroy(ci) })
	return err
}

// program is a Reconciler as in a fresh process.
func (w *world) program() *Reconciler {
	r := New(Options{Partitioner: nvml.NewPartitioner(driver{w.sim, w}, nil), Store: w, Devices: w, Logger: slog.New(slog.DiscardHandler)})
	r.Holders = func(context.Context) ([]sharing.Allocation, error) {
		return []sharing.Allocation{{Namespace: "default", Pod: "pod", Devices: w.held}}, nil
	}
	r.now = func() time.Time { return w.clock }
	return r
}

// run runs the program until it is killed or idle, and reports whether it lived. The clock skips pauses.
func (w *world) run(r *Reconciler, wanted sharing.MIGConfig, starting bool, rounds int) (lived bool) {
	w.t.Helper()
	ctx, kill := context.WithCancel(w.t.Context())
	defer kill()
	w.kill = kill
	for range rounds {
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			w.t.Fatal(err)
		}
		again := r.reconcileAndWait(ctx, gpus[:max(1, w.gpus)], wanted, starting)
		if w.dead {
			w.dead = false // Another program can run.
			return false
		}
		if again == 0 {
			return true
		}
		w.clock = w.clock.Add(time.Hour)
	}
	return true
}

// layout is how the first GPU is partitioned.
func (w *world) layout() mig.PlacedLayout {
	w.t.Helper()
	return w.migState().Layout()
}

// layouts is how all GPUs are partitioned.
func (w *world) layouts() (list []mig.PlacedLayout) {
	w.t.Helper()
	for _, gpu := range w.sim.GPUs() {
		state, err := nvml.NewPartitioner(w.sim, nil).State(context.Background(), gpu.UUID)
		if err != nil {
			w.t.Fatal(err)
		}
		list = append(list, state.Layout())
	}
	return list
}

func (w *world) migState() sharing.MIGState {
	w.t.Helper()
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		w.t.Fatal(err)
	}
	state, err := nvml.NewPartitioner(w.sim, nil).State(context.Background(), gpus[0].UUID)
	if err != nil {
		w.t.Fatal(err)
	}
	return state
}

// use has a process use each MIG device in processes, and a pod hold each one in pods.
func (w *world) use(processes []int, pods ...int) {
	w.t.Helper()
	for _, index := range processes {
		if err := w.sim.AddProcess(0, index, 4000+index, 1<<20); err != nil {
			w.t.Fatal(err)
		}
	}
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range gpus[0].Partitions {
		if slices.Contains(pods, p.Index) {
			w.held = append(w.held, p.UUID)
		}
	}
}

// inUse are the partitions that must survive.
func (w *world) inUse() []string {
	var list []string
	for _, instance := range w.migState().Instances {
		for _, c := range instance.Computes {
			if c.Busy || slices.Contains(w.held, c.UUID) {
				list = append(list, c.UUID)
			}
		}
	}
	return list
}

func (w *world) survive(busy []string) {
	w.t.Helper()
	there := partitionsOf(w.migState().Instances)
	for _, uuid := range busy {
		if !there[uuid] {
			w.t.Errorf("partition %s was in use and is gone", uuid)
		}
	}
}

func layoutNamed(name string) sharing.MIGConfig {
	return sharing.MIGConfig{Manage: true, Name: name, WhenBusy: sharing.WaitWhenBusy}
}

var errDisk = errors.New("disk full")

func parsed(t *testing.T, profile string) mig.Profile {
	t.Helper()
	p, err := mig.ParseProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// noRefresh is a reading of the GPUs without news; meanwhile something else happens.
func noRefresh(meanwhile func()) func(context.Context) error {
	return func(context.Context) error {
		meanwhile()
		return nil
	}
}
