package cdi

import (
	"fmt"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/sharing"
)

func TestComplete(t *testing.T) {
	board, partition := unit{id: "GPU-0"}, unit{id: "MIG-0", partition: &sharing.Partition{}}
	const noBoard, noCapabilities = "no node of the board in /host/dev", "%d of 2 nodes of its capabilities in /host/dev/nvidia-caps"
	entry := func(paths ...string) specs.Device {
		var d specs.Device
		for _, path := range paths {
			d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, &specs.DeviceNode{Path: path})
		}
		return d
	}
	const gi, ci = "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"
	for _, test := range []struct {
		name    string
		unit    unit
		entries []specs.Device
		want    string
	}{
		{"no entry", board, nil, ""},
		{"a board", board, []specs.Device{entry("/dev/dri/card1", "/dev/nvidia12")}, ""},
		{"nothing", board, []specs.Device{entry()}, noBoard},
		{"other nodes", board, []specs.Device{entry("/dev/nvidiactl", "/dev/nvidia", "/dev/nvidia-uvm", "/dev/dri/card1")}, noBoard},
		{"the second entry", board, []specs.Device{entry("/dev/nvidia0"), entry()}, noBoard},
		{"a partition", partition, []specs.Device{entry("/dev/nvidia0", gi, ci)}, ""},
		{"one capability", partition, []specs.Device{entry("/dev/nvidia0", gi)}, fmt.Sprintf(noCapabilities, 1)},
		{"no capability", partition, []specs.Device{entry("/dev/nvidia0", "/dev/nvidia1")}, fmt.Sprintf(noCapabilities, 0)},
		{"capabilities of no board", partition, []specs.Device{entry(gi, ci)}, noBoard},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			if err := complete(test.unit, test.entries, "/host/dev"); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
