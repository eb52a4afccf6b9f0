package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// TestDriverReadErrors has each call that lists the board fail, at several
// moments of a change, also with codes by which a driver says that there is
// nothing. What is in use survives, and when the driver works again the board
// comes to its layout.
func TestDriverReadErrors(t *testing.T) {
	calls := []string{
		"Init", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetPciInfo", "DeviceGetMigMode",
		"DeviceGetGpuInstanceProfileInfo", "DeviceGetGpuInstancePossiblePlacements", "DeviceGetGpuInstances", "GpuInstanceGetInfo",
		"GpuInstanceGetComputeInstanceProfileInfo", "GpuInstanceGetComputeInstances", "ComputeInstanceGetInfo",
		"DeviceGetMaxMigDeviceCount", "DeviceGetMigDeviceHandleByIndex", "DeviceGetGpuInstanceId", "DeviceGetComputeInstanceId",
		"DeviceGetGpuInstanceById", "GpuInstanceGetComputeInstanceById", "DeviceGetComputeRunningProcesses",
		"DeviceGetGraphicsRunningProcesses", "DeviceGetMPSComputeRunningProcesses",
	}
	codes := returnCodes(t)
	skips := []int{0, 17}
	if raceDetector {
		codes, skips = []nvml.Return{nvml.NotFound}, skips[1:2]
	}
	c := recuts[1]
	wish := layoutNamed(c.layout)
	reference := newWorld(t, c.node)
	reference.use(c.processes)
	reference.lives(reference.program(), wish, false, 20)
	wanted := reference.arrangement()
	for _, call := range calls {
		t.Run(call, func(t *testing.T) {
			for _, code := range codes {
				for _, skip := range skips {
					for _, times := range []int{1, 0} {
						w := newWorld(t, c.node)
						w.use(c.processes)
						busy := w.inUse()
						gpus, err := nvml.Scan(w.sim)
						if err != nil {
							t.Fatal(err)
						}
						r := w.program()
						end := w.sim.Script(call, simnode.Fault{Return: code, Skip: skip, Times: times})
						for range 3 {
							w.clock = w.clock.Add(r.round(t.Context(), gpus, wish, false))
						}
						end()
						w.survive(busy)
						if code == nvml.NoPermission {
							r = w.program() // With more privileges.
						}
						w.lives(r, wish, false, 20)
						w.survive(busy)
						if diff := cmp.Diff(wanted, w.arrangement()); diff != "" || len(w.kept.Underway) != 0 {
							t.Errorf("%s, skip %d, times %d: journal %+v, in the end (-want +got):\n%s", code, skip, times, w.kept.Underway, diff)
						}
					}
				}
			}
		})
	}
}

// TestForeignPartitionsInUse holds that a change in the journal which can neither
// be finished nor undone, because somebody has cut the board otherwise meanwhile
// and uses that, is given up: the layout is reached around what is in use.
func TestForeignPartitionsInUse(t *testing.T) {
	w, wish := newWorld(t, "a100-40+all-balanced"), layoutNamed("all-1g.5gb")
	w.use([]int{0})
	busy := w.inUse()
	small := func(start int) mig.Placed {
		return mig.Placed{Profile: parsed(t, "1g.5gb"), Placement: mig.Placement{Start: start, Size: 1}}
	}
	w.kept.Underway = []sharing.Recut{{
		GPU: w.gpu(), Before: sharing.Arrangement{MIG: true, Partitions: []mig.Placed{small(0)}},
		After: sharing.Arrangement{MIG: true, Partitions: []mig.Placed{small(0), small(1)}},
	}}
	r := w.program()
	w.lives(r, wish, true, 5)
	w.lives(r, wish, false, 20)
	w.survive(busy)
	if got := w.state(r); got.State != sharing.LayoutBlocked || len(w.kept.Underway) != 0 || len(w.arrangement().Partitions) != 6 {
		t.Errorf("%s (%s), journal %+v, board %v", got.State, got.Reason, w.kept.Underway, w.arrangement())
	}
}
