package simnode_test

import (
	"errors"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
)

// TestActiveLinks checks how many links of a GPU are active, and where they lead.
func TestActiveLinks(t *testing.T) {
	for _, test := range []struct {
		node          string
		links, active int
		end           nvml.Return
	}{
		{"dgx-a100", 12, 12, nvml.InvalidArgument},
		{"dgx-h100", 18, 18, nvml.InvalidArgument},
		{"h100x1", 18, 0, nvml.InvalidArgument},
		{"t4", 0, 0, nvml.NotSupported},
	} {
		t.Run(test.node, func(t *testing.T) {
			node := open(t, test.node)
			device, err := node.DeviceGetHandleByIndex(0)
			must(t, err)
			active := 0
			for link := range test.links {
				on, err := node.DeviceGetNvLinkState(device, link)
				must(t, err)
				remote, err := node.DeviceGetNvLinkRemotePciInfo(device, link)
				if on != (err == nil) || on != (remote.BusID != "") {
					t.Errorf("link %d: active %t, leads to %q, %v", link, on, remote.BusID, err)
				}
				if on {
					active++
				}
			}
			if active != test.active {
				t.Errorf("%d links are active, want %d", active, test.active)
			}
			for _, link := range []int{-1, test.links} {
				if _, err := node.DeviceGetNvLinkState(device, link); !errors.Is(err, test.end) {
					t.Errorf("link %d: %v, want %s", link, err, test.end)
				}
			}
		})
	}
}

func TestTopology(t *testing.T) {
	node := open(t, "dgx-a100")
	level := func(a, b int) nvml.TopologyLevel {
		from, err := node.DeviceGetHandleByIndex(a)
		must(t, err)
		to, err := node.DeviceGetHandleByIndex(b)
		must(t, err)
		level, err := node.DeviceGetTopologyCommonAncestor(from, to)
		must(t, err)
		return level
	}
	for _, test := range []struct {
		a, b int
		want nvml.TopologyLevel
	}{{0, 0, nvml.TopologyInternal}, {0, 3, nvml.TopologyNode}, {3, 4, nvml.TopologySystem}} {
		if got := level(test.a, test.b); got != test.want {
			t.Errorf("GPUs %d and %d: level %s, want %s", test.a, test.b, got, test.want)
		}
	}
}

// TestRepair checks that a GPU reports a repair like its architecture does, and that a reset completes it.
func TestRepair(t *testing.T) {
	for name, ofRows := range map[string]bool{"a30": true, "t4": false} {
		t.Run(name, func(t *testing.T) {
			node := open(t, name)
			waits := func() bool {
				device, err := node.DeviceGetHandleByIndex(0)
				must(t, err)
				rows, rowsErr := node.DeviceGetRemappedRows(device)
				pages, pagesErr := node.DeviceGetRetiredPagesPendingStatus(device)
				if errors.Is(rowsErr, nvml.NotSupported) == ofRows || errors.Is(pagesErr, nvml.NotSupported) != ofRows {
					t.Errorf("rows %v, pages %v", rowsErr, pagesErr)
				}
				return rows.Pending || pages
			}
			if waits() {
				t.Error("waits at first")
			}
			must(t, node.Do("repair", map[string]string{"gpu": "0"}))
			if !waits() {
				t.Error("does not wait")
			}
			must(t, node.Heal(0))
			if waits() {
				t.Error("waits after a reset")
			}
		})
	}
}
