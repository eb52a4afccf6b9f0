package migchange

import (
	"fmt"
	"reflect"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

// layoutChanges are changes of a GPU, with the partitions in use.
var layoutChanges = []struct {
	node, layout    string
	processes, pods []int
}{
	{"a100-40+all-balanced", "all-1g.5gb", nil, nil},
	{"a100-40+all-balanced", "all-1g.5gb", []int{0}, nil},
	{"a100-40+all-1g.5gb", "all-balanced", nil, []int{6}},
	{"a30+all-1g.6gb", "all-2g.12gb", []int{0}, []int{1}},
	{"h100", "all-balanced", nil, nil},
	{"h100+all-1g.10gb", "all-disabled", nil, nil},
	{"h100+all-3g.40gb", "all-1c.3g.40gb", nil, []int{1}},
	{"h100+all-1c.2g.20gb", "all-2g.20gb", []int{0}, nil},
}

// TestChange checks that the layout is reached as far as the partitions in use allow, and that asking for it
// again writes nothing.
func TestChange(t *testing.T) {
	t.Parallel()
	for _, c := range layoutChanges {
		t.Run(c.node+" to "+c.layout, func(t *testing.T) {
			w := newWorld(t, c.node)
			w.use(c.processes, c.pods...)
			busy, wanted := w.inUse(), layoutNamed(c.layout)
			r := w.program()
			if !w.run(r, wanted, false, 20) {
				t.Fatal("killed by nobody")
			}
			w.survive(busy)
			state := r.Status()[0]
			if blocked := len(busy) > 0; blocked != (state.State == nodereport.LayoutBlocked) && state.State != nodereport.LayoutApplied {
				t.Errorf("state %s (%s) with %d partitions in use", state.State, state.Reason, len(busy))
			}
			if len(w.kept.Underway) != 0 {
				t.Errorf("journal %v, want it empty", w.kept)
			}
			writes, saves := w.writes, w.saves
			if writes == 0 {
				t.Error("nothing was changed")
			}
			w.run(r, wanted, false, 5)
			w.run(w.program(), wanted, true, 5)
			w.run(w.program(), wanted, false, 5)
			if w.writes != writes || w.saves != saves {
				t.Errorf("%d writes of the driver and %d of the journal for the same wanted again", w.writes-writes, w.saves-saves)
			}
			// When everything is free, the layout is complete.
			w.held = nil
			for _, index := range c.processes {
				if err := w.sim.RemoveProcess(0, index, 4000+index); err != nil {
					t.Fatal(err)
				}
			}
			w.run(r, wanted, false, 20)
			if state := r.Status()[0]; state.State != nodereport.LayoutApplied || state.Reason != "" {
				t.Errorf("state %s (%s) with everything free", state.State, state.Reason)
			}
		})
	}
}

// few reports whether exhaustive tests play only some of their cases: in make test, and with the race detector.
// make test-race plays all of them without it.
func few() bool { return raceDetector || testing.Short() }

// TestKilled ends the program before and after each write of the driver and of the journal, and starts another.
// Before that one registers, the GPU has the wanted layout or the old one. Reads change nothing, so a kill at a
// read equals a kill before the next write.
func TestKilled(t *testing.T) {
	t.Parallel()
	cases := layoutChanges
	if few() { // One change goes through all of this code.
		cases = layoutChanges[3:4]
	}
	for _, c := range cases {
		t.Run(c.node+" to "+c.layout, func(t *testing.T) {
			t.Parallel()
			for _, late := range []bool{false, true} {
				for dies := 1; ; dies++ {
					w := newWorld(t, c.node)
					w.use(c.processes, c.pods...)
					busy, wanted := w.inUse(), layoutNamed(c.layout)
					reference := newWorld(t, c.node)
					reference.use(c.processes, c.pods...)
					stages := []mig.PlacedLayout{reference.layout()}
					reference.run(reference.program(), wanted, false, 20)
					stages = append(stages, reference.layout())

					w.dies, w.late = dies, late
					if w.run(w.program(), wanted, false, 20) {
						break
					}
					w.dies = 0
					w.survive(busy)
					r := w.program()
					w.run(r, sharing.MIGConfig{}, true, 20)
					if len(w.kept.Underway) != 0 {
						t.Fatalf("killed at write %d (late %t): journal %v after a start", dies, late, w.kept)
					}
					if now := w.layout(); !contains(stages, now) {
						t.Errorf("killed at write %d (late %t): %v, neither the old nor the wanted layout", dies, late, now)
					}
					w.survive(busy)
					w.run(r, wanted, false, 20)
					if diff := cmp.Diff(stages[1], w.layout()); diff != "" {
						t.Errorf("killed at write %d (late %t): in the end (-want +got):\n%s", dies, late, diff)
					}
					w.survive(busy)
				}
			}
		})
	}
}

func contains(list []mig.PlacedLayout, one mig.PlacedLayout) bool {
	for _, a := range list {
		if reflect.DeepEqual(a, one) {
			return true
		}
	}
	return false
}

// returnCodes are all codes with which a call can fail.
func returnCodes(t *testing.T) []nvml.Return {
	t.Helper()
	var codes []nvml.Return
	for code := nvml.Success + 1; code <= nvml.Unknown; code++ {
		if known, ok := nvml.ParseReturn(code.String()); ok && known == code {
			codes = append(codes, code)
		}
	}
	if len(codes) < 24 {
		t.Fatalf("only %d codes", len(codes))
	}
	return codes
}

// TestDriverErrors has each write fail with each code, once or until further notice. Partitions in use survive.
// After one error the GPU has the old layout or the wanted one, and the wanted one when the driver works again.
func TestDriverErrors(t *testing.T) {
	t.Parallel()
	calls := []string{
		"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
		"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy",
	}
	codes := returnCodes(t)
	// The other cases handle errors in the same way.
	cases := layoutChanges[1:5]
	if few() {
		cases, codes = layoutChanges[3:5], []nvml.Return{nvml.NoPermission, nvml.Timeout, nvml.ResetRequired, nvml.InUse}
	}
	for _, c := range cases {
		begin := func(t *testing.T) *world {
			w := newWorld(t, c.node)
			w.use(c.processes, c.pods...)
			return w
		}
		for _, call := range calls {
			t.Run(c.node+" to "+c.layout+"/"+call, func(t *testing.T) {
				t.Parallel()
				// The clock is simulated, not the world's, so pauses between tries cost nothing.
				synctest.Test(t, func(t *testing.T) {
					reference, wanted := begin(t), layoutNamed(c.layout)
					reference.run(reference.program(), wanted, false, 20)
					for i, code := range codes {
						for _, fault := range someFaults(i, 2) {
							fault.Return = code
							driverError(t, begin(t), wanted, reference.layout(), call, fault)
						}
					}
				})
			})
		}
	}
}

// someFaults are the first or a later call, failing once or always: all four with LONG=1,
// else one of them, another for each i.
func someFaults(i, later int) []simnode.Fault {
	all := []simnode.Fault{{Times: 1}, {Skip: later}, {Times: 1, Skip: later}, {}}
	if !repeat.All() {
		return all[i%4 : i%4+1]
	}
	return all
}

func driverError(t *testing.T, w *world, wanted sharing.MIGConfig, layout mig.PlacedLayout, call string, fault simnode.Fault) {
	t.Helper()
	busy, before := w.inUse(), w.layout()
	what := fmt.Sprintf("%s fails with %s, skip %d, times %d", call, fault.Return, fault.Skip, fault.Times)
	end := w.sim.InjectFault(call, fault)
	r := w.program()
	w.run(r, wanted, false, 1)
	w.survive(busy)
	if now := w.layout(); fault.Times == 1 && !contains([]mig.PlacedLayout{before, layout}, now) {
		t.Errorf("%s: %v, neither the old nor the wanted layout", what, now)
	}
	w.run(r, wanted, false, 3)
	w.survive(busy)
	end()
	if fault.Return == nvml.NoPermission {
		r = w.program() // With more privileges.
	}
	w.run(r, wanted, false, 20)
	w.survive(busy)
	if diff := cmp.Diff(layout, w.layout()); diff != "" {
		t.Errorf("%s: in the end (-want +got):\n%s", what, diff)
	}
	if len(w.kept.Underway) != 0 {
		t.Errorf("%s: journal %v", what, w.kept)
	}
}

// TestDriverReadErrors has each call that lists the GPU fail, at several moments of a change, also with codes by
// which a driver reports an empty list. Partitions in use survive, and when the driver works again the GPU
// reaches its layout.
func TestDriverReadErrors(t *testing.T) {
	t.Parallel()
	calls := []string{
		"Init", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetPciInfo", "DeviceGetMigMode",
		"DeviceGetGpuInstanceProfileInfo", "DeviceGetGpuInstancePossiblePlacements", "DeviceGetGpuInstances", "GpuInstanceGetInfo",
		"GpuInstanceGetComputeInstanceProfileInfo", "GpuInstanceGetComputeInstances", "ComputeInstanceGetInfo",
		"DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex", "DeviceGetGpuInstanceId", "DeviceGetComputeInstanceId",
		"DeviceGetGpuInstanceById", "GpuInstanceGetComputeInstanceById", "DeviceGetComputeRunningProcesses",
		"DeviceGetGraphicsRunningProcesses", "DeviceGetMPSComputeRunningProcesses",
	}
	codes := returnCodes(t)
	if few() {
		codes = []nvml.Return{nvml.NotFound}
	}
	c := layoutChanges[1]
	wanted := layoutNamed(c.layout)
	reference := newWorld(t, c.node)
	reference.use(c.processes)
	reference.run(reference.program(), wanted, false, 20)
	layout := reference.layout()
	for _, call := range calls {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			for i, code := range codes {
				for _, fault := range someFaults(i, 17) {
					w := newWorld(t, c.node)
					w.use(c.processes)
					busy := w.inUse()
					gpus, err := nvml.Scan(w.sim)
					if err != nil {
						t.Fatal(err)
					}
					r := w.program()
					fault.Return = code
					end := w.sim.InjectFault(call, fault)
					for range 3 {
						w.clock = w.clock.Add(r.reconcileAndWait(t.Context(), gpus, wanted, false))
					}
					end()
					w.survive(busy)
					if code == nvml.NoPermission {
						r = w.program() // With more privileges.
					}
					w.run(r, wanted, false, 20)
					w.survive(busy)
					if diff := cmp.Diff(layout, w.layout()); diff != "" || len(w.kept.Underway) != 0 {
						t.Errorf("%+v: journal %+v, in the end (-want +got):\n%s", fault, w.kept.Underway, diff)
					}
				}
			}
		})
	}
}

// TestForeignPartitionsInUse checks that a change in the journal is given up if it can be neither finished nor
// undone, because another program's partitions are in the way and in use. The layout is reached around them.
func TestForeignPartitionsInUse(t *testing.T) {
	t.Parallel()
	w, wanted := newWorld(t, "a100-40+all-balanced"), layoutNamed("all-1g.5gb")
	w.use([]int{0})
	busy := w.inUse()
	small := func(start int) mig.Partition {
		return mig.Partition{Profile: parsed(t, "1g.5gb"), Placement: mig.Placement{Start: start, Size: 1}}
	}
	w.kept.Underway = []Record{{
		GPU: w.gpu(), Before: mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{small(0)}},
		After: mig.PlacedLayout{MIG: true, Partitions: []mig.Partition{small(0), small(1)}},
	}}
	r := w.program()
	w.run(r, wanted, true, 5)
	w.run(r, wanted, false, 20)
	w.survive(busy)
	if got := w.state(r); got.State != nodereport.LayoutBlocked || len(w.kept.Underway) != 0 || len(w.layout().Partitions) != 6 {
		t.Errorf("%s (%s), journal %+v, GPU %v", got.State, got.Reason, w.kept.Underway, w.layout())
	}
}
