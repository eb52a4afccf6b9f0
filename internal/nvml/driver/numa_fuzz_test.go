package driver

import (
	"testing"
	"testing/fstest"
)

// FuzzMachine holds that whatever the kernel's files say the NUMA node is one or
// -1, and that a machine is refused for a reason that is known.
func FuzzMachine(f *testing.F) {
	for _, text := range []string{"0\n", "1", "-1\n", "-2", "99999999999999999999", "+1", "0x1", "", "tegra234", "TEGRA"} {
		f.Add(text, text)
	}
	f.Fuzz(func(t *testing.T, node, family string) {
		machine := fstest.MapFS{
			"sys/bus/pci/devices/0000:3b:00.0/numa_node": {Data: []byte(node)},
			"sys/devices/soc0/family":                    {Data: []byte(family)},
		}
		if n := numaNode(machine, address{bus: 0x3b}); n < -1 {
			t.Errorf("%q is node %d", node, n)
		}
		if err := platform(machine); err != nil && err != errTegra { //nolint:errorlint // it is returned as it is
			t.Errorf("%q: %v", family, err)
		}
	})
}
