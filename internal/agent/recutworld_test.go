package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// world is a node whose first board is cut, with what outlives the program: the
// driver and the journal.
type world struct {
	t    *testing.T
	sim  *simnode.Node
	kept sharing.CutJournal
	// saves counts writes of the journal, writes the driver's calls that change
	// something.
	saves, writes int
	// held are the units that pods hold.
	held []string
	// dies is the write, of the driver or the journal, at which the program ends;
	// it does so before the write, or after when late. 0 is never.
	dies, seen int
	late       bool
	// saving fails with this.
	saving error
	clock  time.Time
}

func newWorld(t *testing.T, node string) *world {
	t.Helper()
	sim, err := simnode.New(node)
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, sim: sim, clock: time.Unix(1e9, 0)}
}

// killed ends the program, as SIGKILL does.
type killed struct{}

// at is the world at a write.
func (w *world) at(write func() error) error {
	w.seen++
	if w.seen == w.dies && !w.late {
		panic(killed{})
	}
	err := write()
	if w.seen == w.dies {
		panic(killed{})
	}
	return err
}

func (w *world) Load() (sharing.CutJournal, error) { return w.kept, nil }

func (w *world) Save(journal sharing.CutJournal) error {
	return w.at(func() error {
		w.saves++
		if w.saving == nil {
			w.kept = journal
		}
		return w.saving
	})
}

// Withdrawn, Close and Reopen are a kubelet that lets go at once.
func (*world) Withdrawn(...string) bool { return true }
func (*world) Close(string, ...string)  {}
func (*world) Reopen(...string)         {}
func (*world) Remind(...string)         {}

// driver is the simulated one with the world's end in it.
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

// program is a repartitioner as a fresh process has it.
func (w *world) program() *repartitioner {
	r := newRepartitioner(nvml.NewPartitioner(driver{w.sim, w}, nil), w, w, slog.New(slog.DiscardHandler))
	r.holders = func(context.Context) ([]sharing.Allocation, error) {
		return []sharing.Allocation{{Namespace: "default", Pod: "pod", Devices: w.held}}, nil
	}
	r.now = func() time.Time { return w.clock }
	return r
}

// lives runs the program until it is killed or has nothing to do for a while,
// and says whether it lived. The clock runs so that no pause matters.
func (w *world) lives(r *repartitioner, wish sharing.Repartition, starting bool, rounds int) (lived bool) {
	w.t.Helper()
	defer func() {
		if end := recover(); end != nil {
			if _, expected := end.(killed); !expected {
				panic(end)
			}
			lived = false
		}
	}()
	for range rounds {
		gpus, err := nvml.Scan(w.sim)
		if err != nil {
			w.t.Fatal(err)
		}
		if again := r.round(w.t.Context(), gpus[:1], wish, starting); again == 0 {
			return true
		}
		w.clock = w.clock.Add(time.Hour)
	}
	return true
}

// arrangement is how the first board is cut.
func (w *world) arrangement() sharing.Arrangement {
	w.t.Helper()
	return w.cut().Arrangement()
}

func (w *world) cut() sharing.Cut {
	w.t.Helper()
	gpus, err := nvml.Scan(w.sim)
	if err != nil {
		w.t.Fatal(err)
	}
	cut, err := nvml.NewPartitioner(w.sim, nil).Cut(context.Background(), gpus[0].UUID)
	if err != nil {
		w.t.Fatal(err)
	}
	return cut
}

// use lets a process use the MIG devices of those indices, and pods hold the
// others named.
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
	for _, instance := range w.cut().Instances {
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
	there := uuids(w.cut())
	for _, uuid := range busy {
		if !there[uuid] {
			w.t.Errorf("partition %s was in use and is gone", uuid)
		}
	}
}

func layoutNamed(name string) sharing.Repartition {
	return sharing.Repartition{Manage: true, Name: name, WhenBusy: sharing.Wait}
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

// noRefresh is a reading of the GPUs that shows nothing new; meanwhile something
// else happens.
func noRefresh(meanwhile func()) func(context.Context) error {
	return func(context.Context) error {
		meanwhile()
		return nil
	}
}
