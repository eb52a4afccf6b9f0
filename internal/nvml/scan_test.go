package nvml_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestScanErrors holds what of a node is still found when something fails.
func TestScanErrors(t *testing.T) {
	tests := []struct {
		name   string
		script func(*simnode.Node) error
		// want are the indices of the GPUs found.
		want []int
		err  nvml.Return
		says string
	}{
		{
			"no driver",
			func(n *simnode.Node) error { n.Script("Init", simnode.Fault{Return: nvml.DriverNotLoaded}); return nil },
			nil, nvml.DriverNotLoaded, "open the driver",
		},
		{
			"no list",
			func(n *simnode.Node) error {
				n.Script("DeviceGetCount", simnode.Fault{Return: nvml.Unknown})
				return nil
			},
			nil, nvml.Unknown, "list the GPUs",
		},
		{
			"a dead board",
			func(n *simnode.Node) error { return n.Lose(2) },
			[]int{0, 1, 3}, nvml.GPUIsLost, "read GPU 2: nvml: DeviceGetHandleByIndex(2)",
		},
		{
			"a board without UUID",
			func(n *simnode.Node) error {
				_, err := n.ScriptGPU(0, "DeviceGetUUID", simnode.Fault{Return: nvml.Unknown})
				return err
			},
			[]int{1, 2, 3}, nvml.Unknown, "read GPU 0: nvml: DeviceGetUUID",
		},
		{
			"facts that nobody needs",
			func(n *simnode.Node) error {
				for _, call := range []string{
					"DeviceGetMinorNumber", "DeviceGetNumaNodeId", "DeviceGetArchitecture",
					"DeviceGetCudaComputeCapability", "DeviceGetTemperature",
				} {
					n.Script(call, simnode.Fault{Return: nvml.NoPermission})
				}
				return nil
			},
			[]int{0, 1, 2, 3}, nvml.Success, "",
		},
		{
			"a driver that cannot be closed",
			func(n *simnode.Node) error { n.Script("Shutdown", simnode.Fault{Return: nvml.Unknown}); return nil },
			[]int{0, 1, 2, 3}, nvml.Unknown, "close the driver",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			sim := simulate(t, "a30x4")
			must(t, test.script(sim))
			gpus, err := nvml.Scan(sim)
			var got []int
			for _, gpu := range gpus {
				got = append(got, gpu.Index)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("GPUs %v, want %v", got, test.want)
			}
			switch {
			case test.err == nvml.Success:
				if err != nil {
					t.Error(err)
				}
			case !errors.Is(err, test.err) || !strings.Contains(err.Error(), test.says):
				t.Errorf("error %v, want %s and %q", err, test.err, test.says)
			}
		})
	}
}
