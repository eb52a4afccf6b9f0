package nvml_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// TestFatalSurvivesRestart lets one program keep what it saw and another one
// take it over, on a node to which something may have happened in between.
func TestFatalSurvivesRestart(t *testing.T) {
	fatal := map[string]string{"0": "XID 79", "1:0": "XID 95"}
	tests := []struct {
		name string
		// between is what happens to what was kept, and to the new node.
		between func(*testing.T, *memory, *simnode.Node)
		boot    string
		want    map[string]string
	}{
		{"the same boot", func(*testing.T, *memory, *simnode.Node) {}, "first", fatal},
		{"another boot", func(*testing.T, *memory, *simnode.Node) {}, "second", nil},
		{"an unknown boot", func(*testing.T, *memory, *simnode.Node) {}, "", fatal},
		{"another driver", func(_ *testing.T, m *memory, _ *simnode.Node) {
			for i := range m.kept {
				m.kept[i].Driver = "570.00"
			}
		}, "first", nil},
		{"a partition that is no more", func(t *testing.T, _ *memory, sim *simnode.Node) {
			must(t, sim.Init())
			must(t, sim.DestroyComputeInstance(1, 1, 0))
			must(t, sim.Shutdown())
		}, "first", map[string]string{"0": "XID 79"}},
		{"a board that is no more", func(t *testing.T, _ *memory, sim *simnode.Node) { must(t, sim.Remove(0)) },
			"first", map[string]string{"0:0": "XID 95"}},
		{"nothing can be read", func(_ *testing.T, m *memory, _ *simnode.Node) { m.kept, m.err = nil, errors.New("disk") }, "first", nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			store := &memory{}
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4+all-balanced")
				w := watchWith(t, sim, nvml.Options{Store: store, Boot: "first"})
				must(t, sim.XID(2, 79, nvml.WholeBoard, nvml.WholeBoard))
				synctest.Wait()
				must(t, sim.Heal(2))
				after(time.Minute)
				must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
				must(t, sim.XID(1, 95, 1, 0))
				must(t, sim.XID(3, 94, nvml.WholeBoard, nvml.WholeBoard))
				synctest.Wait()
				if store.saves > 0 {
					t.Fatalf("saved %d times before it serves the node", store.saves)
				}
				must(t, w.TakeOver(context.Background()))
				if store.saves != 1 || len(store.kept) != 2 {
					t.Fatalf("saved %d times, %+v", store.saves, store.kept)
				}
				after(time.Minute)
				if store.saves != 1 {
					t.Errorf("saved %d times without news", store.saves)
				}
			})
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4+all-balanced")
				test.between(t, store, sim)
				w := watchWith(t, sim, nvml.Options{Store: store, Boot: test.boot})
				w.expect("before it takes over", nil)
				must(t, w.TakeOver(context.Background()))
				w.expect("when it has taken over", test.want)
				after(time.Hour)
				w.expect("an hour later", test.want)
				if store.err == nil && len(store.kept) != len(test.want) {
					t.Errorf("kept %+v", store.kept)
				}
			})
		})
	}
}

// TestFatalBeforeTheDriver holds that what was kept waits for its board, also
// over another restart, and is over when the board has been away.
func TestFatalBeforeTheDriver(t *testing.T) {
	gpus, err := nvml.Scan(simulate(t, "a30x4"))
	must(t, err)
	kept := []sharing.FatalHealth{
		{GPU: gpus[0].UUID, Unit: gpus[0].UUID, Reasons: []string{"XID 79"}, Since: time.Unix(1, 0).UTC()},
		{GPU: gpus[2].UUID, Unit: gpus[2].UUID, Reasons: []string{"XID 48"}, Since: time.Unix(2, 0).UTC()},
		{GPU: gpus[3].UUID, Unit: gpus[3].UUID, Reasons: []string{"XID 48"}, Since: time.Unix(2, 0).UTC()},
	}
	slices.SortFunc(kept, func(a, b sharing.FatalHealth) int { return strings.Compare(a.Unit, b.Unit) })
	synctest.Test(t, func(t *testing.T) {
		sim, store := simulate(t, "a30x4"), &memory{kept: kept}
		must(t, sim.Lose(2))
		_, err := sim.ScriptGPU(3, "DeviceGetUUID", simnode.Fault{Return: nvml.Unknown, Times: 1})
		must(t, err)
		end := sim.Script("Init", simnode.Fault{Return: nvml.LibraryNotFound})
		w := watchWith(t, sim, nvml.Options{Store: store})
		must(t, w.TakeOver(context.Background()))
		if _, err := w.Inventory(); !errors.Is(err, nvml.LibraryNotFound) {
			t.Errorf("taken over without a driver: %v", err)
		}
		if diff := cmp.Diff(kept, store.kept); diff != "" {
			t.Errorf("without a driver it keeps (-want +got):\n%s", diff)
		}
		end()
		after(2 * time.Second)
		w.expect("with the driver", map[string]string{"0": "XID 79"})
		after(rescan)
		w.expect("when the last board can be read", map[string]string{"0": "XID 79", "3": "XID 48"})
		if since := w.Health().Units[0].Since; !since.Equal(time.Unix(1, 0)) {
			t.Errorf("unhealthy since %v, want since it was found", since)
		}
		must(t, sim.Heal(2))
		after(time.Minute)
		w.expect("when the lost board is back", map[string]string{"0": "XID 79", "3": "XID 48"})
	})
}

// TestStoreFails holds that it is tried again, and takes nothing away.
func TestStoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim, store := simulate(t, "t4"), &memory{err: errors.New("disk full")}
		w := watchWith(t, sim, nvml.Options{Store: store})
		must(t, w.TakeOver(context.Background()))
		must(t, sim.XID(0, 79, nvml.WholeBoard, nvml.WholeBoard))
		after(time.Minute)
		w.expect("unkept", map[string]string{"0": "XID 79"})
		store.fail(nil)
		after(11 * time.Second)
		if len(store.kept) != 1 {
			t.Errorf("kept %+v", store.kept)
		}
	})
}

// TestTakeOverBeforeTheFirstLook holds that it makes nothing of GPUs that were
// not read yet.
func TestTakeOverBeforeTheFirstLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		sim.Script("Init", simnode.Fault{Delay: time.Second})
		w := watchWith(t, sim, nvml.Options{Store: &memory{}})
		must(t, w.TakeOver(context.Background()))
		if gpus, err := w.Inventory(); gpus != nil || !errors.Is(err, nvml.ErrNotReady) {
			t.Errorf("Inventory() = %v, %v, want none and ErrNotReady", gpus, err)
		}
		after(2 * time.Second)
		w.expect("after the first look", nil)
		if w.changes != 1 {
			t.Errorf("changed was called %d times, want once", w.changes)
		}
	})
}
