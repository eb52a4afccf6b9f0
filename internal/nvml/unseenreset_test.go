package nvml_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestWatchResetBetweenLooks resets a board after the last look at it, and lets
// something happen for which the next look gets new handles of all boards. The
// handle from before is the only trace of the reset.
func TestWatchResetBetweenLooks(t *testing.T) {
	tests := []struct {
		name string
		// meanwhile happens after the reset of board 2, if there is one.
		meanwhile func(*testing.T, *simnode.Node)
		reset     bool
		// want are the faults at last, by the number that the board had.
		want map[string]string
	}{
		{"nothing", func(*testing.T, *simnode.Node) {}, true, map[string]string{}},
		{"a board is pulled", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }, true, map[string]string{"3": "lost"}},
		{"a board is pulled, without a reset", func(t *testing.T, sim *simnode.Node) { must(t, sim.Remove(3)) }, false,
			map[string]string{"2": "XID 79", "3": "lost"}},
		{"a board is plugged in", func(t *testing.T, sim *simnode.Node) {
			_, err := sim.Add("t4")
			must(t, err)
		}, true, map[string]string{}},
		{"a board is exchanged", exchange, true, map[string]string{"0": "lost"}},
		{"a board is exchanged, without a reset", exchange, false, map[string]string{"0": "lost", "2": "XID 79"}},
		{"the boards cannot be listed", unlisted, true, map[string]string{}},
		{"the boards could not be listed before it", func(t *testing.T, sim *simnode.Node) {
			unlisted(t, sim)
			end := sim.Script("EventSetWait", simnode.Fault{Delay: time.Second})
			after(5*time.Second + 100*time.Millisecond) // The driver is being closed.
			end()
			must(t, sim.Heal(2))
		}, false, map[string]string{}},
		{"the boards cannot be listed, without a reset", unlisted, false, map[string]string{"2": "XID 79"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a30x4")
				w := watch(t, sim)
				before, _ := w.Inventory()
				must(t, sim.XID(2, 79, nvml.WholeBoard, nvml.WholeBoard))
				after(25 * time.Second)
				w.expect("before", map[string]string{"2": "XID 79"})
				if test.reset {
					must(t, sim.Heal(2))
				}
				test.meanwhile(t, sim)
				after(time.Minute)
				gpus, err := w.Inventory()
				must(t, err)
				got := map[string]string{}
				for ordinal, uuid := range uuids(before) {
					for _, gpu := range gpus {
						if gpu.UUID == uuid && gpu.Fault != "" {
							got[fmt.Sprint(ordinal)] = gpu.Fault
						}
					}
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("faults (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func unlisted(_ *testing.T, sim *simnode.Node) {
	sim.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown, Times: 1})
}

// exchange leaves the number of boards as it was.
func exchange(t *testing.T, sim *simnode.Node) {
	must(t, sim.Remove(0))
	_, err := sim.Add("t4")
	must(t, err)
}
