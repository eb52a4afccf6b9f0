package driver

import (
	"errors"
	"testing"
	"testing/fstest"
)

func TestPlatform(t *testing.T) {
	content := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	tests := []struct {
		name    string
		machine fstest.MapFS
		want    error
	}{
		{"a server", fstest.MapFS{"dev/nvidia0": file(), "sys/devices/soc0/family": content("Graviton\n")}, nil},
		{"WSL", fstest.MapFS{"dev/dxg": file()}, errWSL},
		{"Tegra by its release file", fstest.MapFS{"etc/nv_tegra_release": file()}, errTegra},
		{"Tegra by its processor", fstest.MapFS{"sys/devices/soc0/family": content("Tegra\n")}, errTegra},
		{"Tegra, an older kernel", fstest.MapFS{"sys/devices/soc0/family": content("tegra234")}, errTegra},
		{"a processor that is unlike Tegra", fstest.MapFS{"sys/devices/soc0/family": content("NoTegra")}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if err := platform(test.machine); !errors.Is(err, test.want) {
				t.Errorf("%v, want %v", err, test.want)
			}
		})
	}
}

func TestNUMANode(t *testing.T) {
	machine := fstest.MapFS{}
	for bus, node := range map[string]string{
		"0000:3b:00.0": "1\n", "0000:af:1f.0": "0", "10000:01:00.0": "3\n", "0000:01:00.0": "-1\n", "0000:02:00.0": "?", "0000:04:00.0": "-2",
	} {
		machine["sys/bus/pci/devices/"+bus+"/numa_node"] = &fstest.MapFile{Data: []byte(node)}
	}
	tests := []struct {
		name string
		at   address
		want int
	}{
		{"a node", address{0, 0x3b, 0}, 1},
		{"node 0, a device number", address{0, 0xaf, 0x1f}, 0},
		{"a domain of more than four digits", address{0x10000, 1, 0}, 3},
		{"no node", address{0, 1, 0}, -1},
		{"an impossible node", address{0, 4, 0}, -1},
		{"unreadable", address{0, 2, 0}, -1},
		{"absent", address{0, 3, 0}, -1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := numaNode(machine, test.at); got != test.want {
				t.Errorf("node %d of %s, want %d", got, test.at, test.want)
			}
		})
	}
	if got, want := (address{0x10000, 0x3b, 2}).String(), "00010000:3B:02.0"; got != want {
		t.Errorf("address %q, want %q", got, want)
	}
}
