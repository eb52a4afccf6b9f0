package nvml_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestWatchTrouble lets one thing happen to a node and holds what the inventory
// then says: within a moment for what the driver tells by itself, or with the
// next pass; that a further pass changes nothing; and that the unit is healthy
// with the first pass after a reset, and no sooner.
func TestWatchTrouble(t *testing.T) {
	const whole = nvml.WholeBoard
	tests := []struct {
		name string
		node string
		do   func(*simnode.Node) error
		soon bool
		want map[string]string
	}{
		{
			"XID of a whole GPU", "dgx-a100",
			func(n *simnode.Node) error { return n.XID(3, 79, whole, whole) },
			true, map[string]string{"3": "XID 79"},
		},
		{
			"XID that is the application's", "dgx-a100",
			func(n *simnode.Node) error { return n.XID(3, 31, whole, whole) },
			true, nil,
		},
		{
			"XID of one partition", "dgx-a100+all-1g.5gb",
			func(n *simnode.Node) error { return n.XID(0, 94, 3, 0) },
			true, map[string]string{"0:2": "XID 94"},
		},
		{
			"XID of a compute instance beside another", "mixed+all-1c.2g.10gb",
			func(n *simnode.Node) error { return n.XID(1, 94, 2, 1) },
			true, map[string]string{"1:3": "XID 94"},
		},
		{
			"XID of a GPU instance with two partitions", "mixed+all-1c.2g.10gb",
			func(n *simnode.Node) error { return n.XID(1, 94, 2, whole) },
			true, map[string]string{"1:2": "XID 94", "1:3": "XID 94"},
		},
		{
			"XID of a whole GPU with partitions", "dgx-a100+all-balanced",
			func(n *simnode.Node) error { return n.XID(7, 79, whole, whole) },
			true, map[string]string{"7": "XID 79"},
		},
		{
			"XID of a partition that there is not", "dgx-a100+all-balanced",
			func(n *simnode.Node) error { return n.XID(7, 79, 99, 0) },
			true, nil,
		},
		{
			"XID of a partition of a GPU without MIG", "t4",
			func(n *simnode.Node) error { return n.XID(0, 79, 0, 0) },
			true, map[string]string{"0": "XID 79"},
		},
		{
			"memory error that could not be corrected", "a30x4",
			func(n *simnode.Node) error { return n.ECC(1, true) },
			true, map[string]string{"1": "double-bit ECC error"},
		},
		{
			"memory error that could be corrected", "a30x4",
			func(n *simnode.Node) error { return n.ECC(1, false) },
			true, nil,
		},
		{
			"lost", "dgx-h100",
			func(n *simnode.Node) error { return n.Lose(5) },
			true, map[string]string{"5": "lost"},
		},
		{
			"too hot", "dgx-h100",
			func(n *simnode.Node) error { return n.Temperature(5, 95) },
			false, map[string]string{"5": "temperature 95 °C above 90 °C"},
		},
		{
			"just not too hot", "dgx-h100",
			func(n *simnode.Node) error { return n.Temperature(5, 90) },
			false, nil,
		},
		{
			"memory query fails", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			false, map[string]string{"5": "memory query: UNKNOWN"},
		},
		{
			"MIG mode does not tell", "a30x4+all-balanced",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(1, "DeviceGetMigMode", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			false, map[string]string{"1": "cannot be read: UNKNOWN"},
		},
		{
			"the same fault again", "t4",
			func(n *simnode.Node) error { return errors.Join(n.ECC(0, true), n.ECC(0, true)) },
			true, map[string]string{"0": "double-bit ECC error"},
		},
		{
			"memory query says lost", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"temperature query says lost", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetTemperature", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"walk of the partitions says lost", "dgx-a100+all-balanced",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetGpuInstanceById", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"no memory of its own", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetMemoryInfo", simnode.Fault{Return: nvml.NotSupported})
				return err
			},
			false, nil,
		},
		{
			"memory row that waits for a reset", "a30x4",
			func(n *simnode.Node) error { return n.Repair(2) },
			false, map[string]string{"2": "row remapping waits for a reset"},
		},
		{
			"memory page that waits for a reset", "t4",
			func(n *simnode.Node) error { return n.Repair(0) },
			false, map[string]string{"0": "page retirement waits for a reset"},
		},
		{
			"repairs say lost", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetRemappedRows", simnode.Fault{Return: nvml.GPUIsLost})
				return err
			},
			false, map[string]string{"5": "lost"},
		},
		{
			"repairs do not tell", "dgx-h100",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(5, "DeviceGetRemappedRows", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			false, nil,
		},
		{
			"two faults", "t4",
			func(n *simnode.Node) error { return errors.Join(n.XID(0, 79, whole, whole), n.ECC(0, true)) },
			true, map[string]string{"0": "XID 79, double-bit ECC error"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sim := simulate(t, test.node)
				w := watch(t, sim)
				w.expect("at first", nil)
				must(t, test.do(sim))
				after(time.Second)
				if test.soon {
					w.expect("soon", test.want)
				}
				after(rescan)
				w.expect("after a pass", test.want)
				after(rescan)
				w.expect("after another pass", test.want)
				for unit := range test.want {
					must(t, sim.Heal(int(unit[0]-'0')))
				}
				synctest.Wait()
				w.expect("right after the reset", test.want)
				after(rescan)
				w.expect("a pass after the reset", nil)
			})
		})
	}
}
