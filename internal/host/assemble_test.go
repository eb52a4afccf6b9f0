package host

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// made are the device nodes that the host has.
func made(paths ...string) map[string]bool {
	nodes := map[string]bool{}
	for _, path := range paths {
		nodes[path] = true
	}
	return nodes
}

func TestAssemble(t *testing.T) {
	cut := sharing.GPU{UUID: "GPU-1", Index: 1, Minor: 4, MIG: true, Partitions: []sharing.Partition{{UUID: "MIG-a", GI: 2, CI: 1}}}
	hidden := cut
	hidden.Minor = -1
	table := files{minors: map[capability]int{{4, 2, -1}: 30, {4, 2, 1}: 32}}
	const noNode = "the driver does not tell its device node"
	const noTable = "the device nodes of partitions are not known: there is no table"
	const notInTable = "the device nodes of GPU instance 2 and compute instance 1 are not known: /proc/driver/nvidia-caps/mig-minors does not list them"
	tests := []struct {
		name      string
		grants    sharing.Grants
		gpu       sharing.GPU
		files     files
		entries   entries
		nodes     map[string][]string
		obstacles map[string]string
	}{
		{"a board", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: 7}, files{}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, nil},
		{"a board without node", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: -1}, files{}, entries{},
			map[string][]string{"GPU-0": nil}, map[string]string{"GPU-0": noNode}},
		{"that needs none", sharing.Grants{}, sharing.GPU{UUID: "GPU-0", Minor: -1}, files{}, entries{},
			map[string][]string{"GPU-0": nil}, nil},
		{"a partition", sharing.Grants{DeviceNodes: true}, cut, table, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap32"}}, nil},
		{"a partition of a board without node", by(sharing.DriverMounts), hidden, table, entries{},
			map[string][]string{"GPU-1": nil, "MIG-a": nil}, map[string]string{"MIG-a": noNode}},
		{"a partition without table", by(sharing.DriverMounts), cut, files{minorsErr: "there is no table"}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": nil}, map[string]string{"MIG-a": noTable}},
		{"a partition without compute instance in the table", by(sharing.DriverMounts), cut,
			files{minors: map[capability]int{{4, 2, -1}: 30}}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": nil}, map[string]string{"MIG-a": notInTable}},
		{"a partition without GPU instance in the table", by(sharing.DriverMounts), cut,
			files{minors: map[capability]int{{4, 2, 1}: 32}}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": nil}, map[string]string{"MIG-a": notInTable}},
		{"no driver", by(sharing.DriverMounts), cut, files{minors: table.minors, noDriver: "no driver"}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap32"}},
			map[string]string{"MIG-a": "no driver"}},
		{"a board whose node is not made", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: 7}, files{nodes: made("/dev/nvidia1")}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, map[string]string{"GPU-0": "there is no /driver/dev/nvidia7"}},
		{"one whose node is made", sharing.Grants{DeviceNodes: true}, sharing.GPU{UUID: "GPU-0", Minor: 7}, files{nodes: made("/dev/nvidia7")}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, nil},
		{"a board that needs no node", by(sharing.Envvar), sharing.GPU{UUID: "GPU-0", Minor: 7}, files{nodes: made()}, entries{},
			map[string][]string{"GPU-0": {"/dev/nvidia7"}}, nil},
		{"a partition whose capability is not made", by(sharing.DriverMounts), cut,
			files{minors: table.minors, nodes: made("/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30")}, entries{},
			map[string][]string{"GPU-1": {"/dev/nvidia4"}, "MIG-a": {"/dev/nvidia4", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap32"}},
			map[string]string{"MIG-a": "there is no /driver/dev/nvidia-caps/nvidia-cap32"}},
		{"an entry by UUID only", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0"}, files{}, entries{names: map[string]bool{plugin.CDIName("gpu", "GPU-0"): true}},
			map[string][]string{"GPU-0": {"/dev/nvidia0"}}, map[string]string{"GPU-0": "it has no CDI entry: none is written yet"}},
		{"an entry by index only", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0"}, files{}, entries{names: map[string]bool{plugin.CDIName("gpu", "0"): true}, problem: "driver is out"},
			map[string][]string{"GPU-0": {"/dev/nvidia0"}}, map[string]string{"GPU-0": "it has no CDI entry: driver is out"}},
		{"both entries", by(sharing.CDICRI), sharing.GPU{UUID: "GPU-0"}, files{}, entries{names: map[string]bool{plugin.CDIName("gpu", "GPU-0"): true, plugin.CDIName("gpu", "0"): true}},
			map[string][]string{"GPU-0": {"/dev/nvidia0"}}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := assemble(test.grants, "/driver", []sharing.GPU{test.gpu}, test.files, test.entries)
			if got.DevRoot != "/driver" {
				t.Errorf("the nodes are below %q", got.DevRoot)
			}
			if diff := cmp.Diff(test.nodes, got.Nodes); diff != "" {
				t.Errorf("nodes (-want +got):\n%s", diff)
			}
			if len(got.Obstacles) > 0 || len(test.obstacles) > 0 {
				if diff := cmp.Diff(test.obstacles, got.Obstacles); diff != "" {
					t.Errorf("obstacles (-want +got):\n%s", diff)
				}
			}
		})
	}
}
