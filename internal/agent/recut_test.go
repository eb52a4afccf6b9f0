package agent

import (
	"fmt"
	"reflect"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// recuts are changes of a board, with what of it is in use.
var recuts = []struct {
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

// TestRecut holds that the layout is reached as far as what is in use allows,
// and that wishing for it again writes nothing.
func TestRecut(t *testing.T) {
	for _, c := range recuts {
		t.Run(c.node+" to "+c.layout, func(t *testing.T) {
			w := newWorld(t, c.node)
			w.use(c.processes, c.pods...)
			busy, wish := w.inUse(), layoutNamed(c.layout)
			r := w.program()
			if !w.lives(r, wish, false, 20) {
				t.Fatal("killed by nobody")
			}
			w.survive(busy)
			state := (*r.status.Load())[0]
			if blocked := len(busy) > 0; blocked != (state.State == sharing.LayoutBlocked) && state.State != sharing.LayoutApplied {
				t.Errorf("state %s (%s) with %d partitions in use", state.State, state.Reason, len(busy))
			}
			if len(w.kept.Underway) != 0 {
				t.Errorf("journal %v, want it empty", w.kept)
			}
			writes, saves := w.writes, w.saves
			if writes == 0 {
				t.Error("nothing was cut")
			}
			w.lives(r, wish, false, 5)
			w.lives(w.program(), wish, true, 5)
			w.lives(w.program(), wish, false, 5)
			if w.writes != writes || w.saves != saves {
				t.Errorf("%d writes of the driver and %d of the journal for the same wish again", w.writes-writes, w.saves-saves)
			}
			// When everything is free the layout is complete.
			w.held = nil
			for _, index := range c.processes {
				if err := w.sim.RemoveProcess(0, index, 4000+index); err != nil {
					t.Fatal(err)
				}
			}
			w.lives(r, wish, false, 20)
			if state := (*r.status.Load())[0]; state.State != sharing.LayoutApplied || state.Reason != "" {
				t.Errorf("state %s (%s) with everything free", state.State, state.Reason)
			}
		})
	}
}

// TestKilled ends the program at each write, of the driver and of the journal,
// before it and after it, and starts another: before that one would register,
// the board has the wanted layout or the old one. Reads change nothing, so that
// being killed at one is being killed before the next write.
func TestKilled(t *testing.T) {
	cases := recuts
	if raceDetector {
		cases = recuts[3:6]
	}
	for _, c := range cases {
		t.Run(c.node+" to "+c.layout, func(t *testing.T) {
			for _, late := range []bool{false, true} {
				for dies := 1; ; dies++ {
					w := newWorld(t, c.node)
					w.use(c.processes, c.pods...)
					busy, wish := w.inUse(), layoutNamed(c.layout)
					reference := newWorld(t, c.node)
					reference.use(c.processes, c.pods...)
					stages := []sharing.Arrangement{reference.arrangement()}
					reference.lives(reference.program(), wish, false, 20)
					stages = append(stages, reference.arrangement())

					w.dies, w.late = dies, late
					if w.lives(w.program(), wish, false, 20) {
						break
					}
					w.dies = 0
					w.survive(busy)
					r := w.program()
					w.lives(r, sharing.Repartition{}, true, 20)
					if len(w.kept.Underway) != 0 {
						t.Fatalf("killed at write %d (late %t): journal %v after a start", dies, late, w.kept)
					}
					if now := w.arrangement(); !contains(stages, now) {
						t.Errorf("killed at write %d (late %t): %v, neither the old nor the wanted layout", dies, late, now)
					}
					w.survive(busy)
					w.lives(r, wish, false, 20)
					if diff := cmp.Diff(stages[1], w.arrangement()); diff != "" {
						t.Errorf("killed at write %d (late %t): in the end (-want +got):\n%s", dies, late, diff)
					}
					w.survive(busy)
				}
			}
		})
	}
}

func contains(list []sharing.Arrangement, one sharing.Arrangement) bool {
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

// TestDriverErrors has each write fail with each code, once or until further
// notice. What is in use survives; after one error the board has the old layout
// or the wanted one, and when the driver works again the wanted one.
func TestDriverErrors(t *testing.T) {
	calls := []string{
		"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceDestroy",
		"GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy",
	}
	codes := returnCodes(t)
	// The others differ in nothing that an error is handled by.
	cases := recuts[1:5]
	if raceDetector {
		cases, codes = recuts[3:5], []nvml.Return{nvml.NoPermission, nvml.Timeout, nvml.ResetRequired, nvml.InUse}
	}
	for _, c := range cases {
		begin := func(t *testing.T) *world {
			w := newWorld(t, c.node)
			w.use(c.processes, c.pods...)
			return w
		}
		for _, call := range calls {
			t.Run(c.node+" to "+c.layout+"/"+call, func(t *testing.T) {
				// The clock is not the world's: pauses between tries cost nothing.
				synctest.Test(t, func(t *testing.T) {
					reference, wish := begin(t), layoutNamed(c.layout)
					reference.lives(reference.program(), wish, false, 20)
					for _, code := range codes {
						for _, times := range []int{1, 0} {
							for _, skip := range []int{0, 2} {
								driverError(t, begin(t), wish, reference.arrangement(), call, simnode.Fault{Return: code, Times: times, Skip: skip})
							}
						}
					}
				})
			})
		}
	}
}

func driverError(t *testing.T, w *world, wish sharing.Repartition, wanted sharing.Arrangement, call string, fault simnode.Fault) {
	t.Helper()
	busy, before := w.inUse(), w.arrangement()
	what := fmt.Sprintf("%s fails with %s, skip %d, times %d", call, fault.Return, fault.Skip, fault.Times)
	end := w.sim.Script(call, fault)
	r := w.program()
	w.lives(r, wish, false, 1)
	w.survive(busy)
	if now := w.arrangement(); fault.Times == 1 && !contains([]sharing.Arrangement{before, wanted}, now) {
		t.Errorf("%s: %v, neither the old nor the wanted layout", what, now)
	}
	w.lives(r, wish, false, 3)
	w.survive(busy)
	end()
	if fault.Return == nvml.NoPermission {
		r = w.program() // With more privileges.
	}
	w.lives(r, wish, false, 20)
	w.survive(busy)
	if diff := cmp.Diff(wanted, w.arrangement()); diff != "" {
		t.Errorf("%s: in the end (-want +got):\n%s", what, diff)
	}
	if len(w.kept.Underway) != 0 {
		t.Errorf("%s: journal %v", what, w.kept)
	}
}
