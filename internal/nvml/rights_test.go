package nvml_test

import (
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// unprivileged is the node for a program without the right to monitor MIG. With hidden
// its driver lists no MIG devices either, as was seen where the container lacks their
// device nodes (dra-driver-nvidia-gpu#787).
func unprivileged(t *testing.T, name string, hidden bool) nvml.Library {
	t.Helper()
	sim := simulate(t, name)
	must(t, sim.SetWorld("unprivileged"))
	if !hidden {
		return sim
	}
	return answering(sim, failing("DeviceGetMigDeviceHandleByIndex", nvml.NotFound, nil))
}

// TestUnprivileged checks that calls refused for lack of privilege are no fault of a GPU. Whole GPUs are served
// as usual, and partitions with the profile from their name; only their placement is unknown.
func TestUnprivileged(t *testing.T) {
	for _, node := range []string{"a100-40+all-balanced", "h100+all-1g.10gb", "dgx-a100"} {
		t.Run(node, func(t *testing.T) {
			want, err := nvml.Scan(simulate(t, node))
			must(t, err)
			got, err := nvml.Scan(unprivileged(t, node, false))
			must(t, err)
			for i := range want {
				if got[i].Denied != want[i].MIG {
					t.Errorf("GPU %d with MIG %t: denied %t", i, want[i].MIG, got[i].Denied)
				}
				if want[i].MIG {
					want[i].Denied, want[i].Memory = true, 0
				}
				for j := range want[i].Partitions {
					want[i].Partitions[j].Placement = mig.Placement{}
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the GPUs (-want +got):\n%s", diff)
			}
			use, err := nvml.NewMeter(unprivileged(t, node, false)).Read(t.Context())
			must(t, err)
			if len(use) != len(want) {
				t.Fatalf("the use of %d GPUs of %d", len(use), len(want))
			}
			if units := max(1, len(want[0].Partitions)); len(use[0].Units) != units {
				t.Errorf("the use of %d units, want %d", len(use[0].Units), units)
			}
		})
	}
	t.Run("MIG devices that are not listed", func(t *testing.T) {
		got, err := nvml.Scan(unprivileged(t, "a100-40+all-balanced", true))
		must(t, err)
		if len(got[0].Partitions) > 0 || !got[0].Denied || !got[0].Health.Healthy() {
			t.Errorf("got %+v", got[0])
		}
	})
}

// TestPrivilegeTaken checks that a container that loses its device nodes, as after a reload of systemd
// (nvidia-container-toolkit#48), still serves the GPUs: NO_PERMISSION from any call is no fault. The inventory
// shows that access is denied.
func TestPrivilegeTaken(t *testing.T) {
	for _, method := range []string{
		"DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetMigMode", "DeviceGetMigDeviceHandleByIndex", "DeviceGetGpuInstanceId",
		"DeviceGetMemoryInfo", "DeviceGetGpuInstanceById", "ComputeInstanceGetInfo",
	} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a100-40+all-balanced")
				var taken atomic.Bool
				node := watch(t, answering(sim, func(call nvml.Call, answer any, err error) (any, error) {
					if !taken.Load() || call.Method != method && call.Method != "DeviceGetMemoryInfo" {
						return answer, err
					}
					return reflect.Zero(call.Answer).Interface(), &nvml.Error{Call: call.String(), Return: nvml.NoPermission}
				}))
				synctest.Wait()
				before, err := node.Inventory()
				must(t, err)
				taken.Store(true)
				pass(2 * time.Minute)
				synctest.Wait()
				after, err := node.Inventory()
				must(t, err)
				if !after[0].Denied {
					t.Error("nobody is told")
				}
				if len(after[0].Partitions) != len(before[0].Partitions) {
					t.Errorf("%d partitions, before %d", len(after[0].Partitions), len(before[0].Partitions))
				}
				for _, unit := range node.Health().Units {
					if unit.Reason != "" {
						t.Errorf("%s: %s", unit.Unit, unit.Reason)
					}
				}
				taken.Store(false)
				pass(time.Minute)
				synctest.Wait()
				given, err := node.Inventory()
				must(t, err)
				if given[0].Denied {
					t.Error("denied when the privilege is back")
				}
			})
		})
	}
}

// TestWithheldEvents checks that a GPU is shown as degraded if the driver withholds its partitions' events.
func TestWithheldEvents(t *testing.T) {
	for name, world := range map[string]string{"with the right": "", "without the right": "unprivileged"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, "a100-40+all-balanced")
				must(t, sim.SetWorld(world))
				node := watch(t, sim)
				synctest.Wait()
				monitors := node.Health().Monitors
				if len(monitors) != 1 || strings.Contains(monitors[0].Degraded, "SYS_ADMIN") != (name == "without the right") {
					t.Errorf("%+v", monitors)
				}
			})
		})
	}
}
