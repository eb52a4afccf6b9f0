package soak

import (
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// What the model says is itself tested on nodes that are right but for one
// thing.

const (
	first, second, third = "MIG-1", "MIG-2", "MIG-3"
	board0, board3       = "GPU-0", "GPU-3"
)

// right is a node with one board cut in two and one board shared by two, of
// which a pod holds a share; the other boards are excluded.
func right() rest {
	devices := func(ids ...string) simkubelet.Resource {
		r := simkubelet.Resource{Connected: true, Streams: 1}
		for _, id := range ids {
			r.Devices = append(r.Devices, simkubelet.Device{ID: id, Healthy: true})
		}
		return r
	}
	return rest{
		wish: wish{
			layout: "all-3g.40gb", excluded: []int{1, 2, 4},
			shares: []share{{resource: gpuName, replicas: 2}},
		},
		conditions: make([]condition, boards),
		boards: []simnode.Board{
			{UUID: board0, MIG: true, Partitions: []simnode.Partition{{UUID: first, Profile: "3g.40gb"}, {UUID: second, Profile: "3g.40gb"}}},
			{UUID: "GPU-1", MIG: true, Partitions: []simnode.Partition{{UUID: "MIG-4", Profile: "3g.40gb"}, {UUID: "MIG-5", Profile: "3g.40gb"}}},
			{UUID: "GPU-2", MIG: true, Partitions: []simnode.Partition{{UUID: "MIG-6", Profile: "3g.40gb"}, {UUID: "MIG-7", Profile: "3g.40gb"}}},
			{UUID: board3},
			{UUID: "GPU-4"},
		},
		kubelet: simkubelet.Snapshot{
			Resources: map[string]simkubelet.Resource{
				"nvidia.com/mig-3g.40gb": devices(first, second),
				gpuName:                  devices(board3+"::0", board3+"::1"),
			},
			Pods: []simkubelet.PodStatus{{Containers: []simkubelet.ContainerStatus{{
				Grants: []simkubelet.Grant{{Resource: gpuName, Devices: []string{board3 + "::1"}}},
			}}}},
		},
	}
}

// with changes the devices of a resource.
func (r rest) with(resource string, change func([]simkubelet.Device) []simkubelet.Device) rest {
	next := r.kubelet.Resources[resource]
	next.Devices = change(slices.Clone(next.Devices))
	r.kubelet.Resources[resource] = next
	return r
}

func TestJudge(t *testing.T) {
	sick := func(at int) func([]simkubelet.Device) []simkubelet.Device {
		return func(devices []simkubelet.Device) []simkubelet.Device {
			devices[at].Healthy = false
			return devices
		}
	}
	without := func(at int) func([]simkubelet.Device) []simkubelet.Device {
		return func(devices []simkubelet.Device) []simkubelet.Device { return slices.Delete(devices, at, at+1) }
	}
	plus := func(id string, healthy bool) func([]simkubelet.Device) []simkubelet.Device {
		return func(devices []simkubelet.Device) []simkubelet.Device {
			return append(devices, simkubelet.Device{ID: id, Healthy: healthy})
		}
	}
	const parts = "nvidia.com/mig-3g.40gb"
	tests := []struct {
		name   string
		change func(r rest) rest
		// want is in what is complained of; empty for nothing.
		want string
	}{
		{"all right", func(r rest) rest { return r }, ""},
		{"a free share is Unhealthy", func(r rest) rest { return r.with(gpuName, sick(0)) }, "invariant 3: GPU-3 has 1 Healthy"},
		{"a held share is Unhealthy", func(r rest) rest { return r.with(gpuName, sick(1)) }, "invariant 5: GPU-3::1"},
		{"a held share is not listed", func(r rest) rest { return r.with(gpuName, without(1)) }, "invariant 5: a pod holds GPU-3::1"},
		{"a share too many", func(r rest) rest { return r.with(gpuName, plus("GPU-3::2", false)) }, "GPU-3 has 3 devices"},
		{"alone and shared", func(r rest) rest { return r.with(gpuName, plus(board3, true)) }, "GPU-3 is still listed"},
		{"an excluded board is offered", func(r rest) rest { return r.with(gpuName, plus("GPU-4", true)) }, "invariant 3: GPU-4"},
		{"an excluded board is on its way", func(r rest) rest { return r.with(gpuName, plus("GPU-4", false)) }, "GPU-4 of nvidia.com/gpu is still on its way out"},
		{"a board and its partitions", func(r rest) rest { return r.with(gpuName, plus(board0, true)) }, "invariant 3: GPU-0"},
		{"a partition that is gone", func(r rest) rest { return r.with(parts, plus(third, false)) }, "MIG-3 is still listed"},
		{"a partition is missing", func(r rest) rest { return r.with(parts, without(0)) }, "invariant 3: MIG-1 has 0 Healthy"},
		{"a faulty board is offered", func(r rest) rest { r.conditions[0] = faulty; return r }, "its board is faulty"},
		{"a doubtful board may be anything", func(r rest) rest { r.conditions[0] = doubtful; return r.with(parts, sick(0)) }, ""},
		{"another layout", func(r rest) rest { r.wish.layout = "all-balanced"; return r }, "invariant 9: board 0 has not come to layout"},
		{"no stream", func(r rest) rest {
			next := r.kubelet.Resources[parts]
			next.Streams = 0
			r.kubelet.Resources[parts] = next
			return r
		}, "invariant 4"},
		{"a name that nobody wants, without a stream", func(r rest) rest {
			r.kubelet.Resources["nvidia.com/old"] = simkubelet.Resource{Devices: []simkubelet.Device{{ID: board0}}}
			r.conditions[0] = faulty
			return r.with(parts, func([]simkubelet.Device) []simkubelet.Device { return nil })
		}, ""},
		{"a name that nobody wants and a pod holds, without a stream", func(r rest) rest {
			r.kubelet.Resources["nvidia.com/old"] = simkubelet.Resource{Devices: []simkubelet.Device{{ID: board0}}}
			r.conditions[0] = faulty
			r.kubelet.Pods[0].Containers[0].Grants = append(r.kubelet.Pods[0].Containers[0].Grants,
				simkubelet.Grant{Resource: "nvidia.com/old", Devices: []string{board0}})
			return r.with(parts, func([]simkubelet.Device) []simkubelet.Device { return nil })
		}, "invariant 4: nvidia.com/old has 0 streams"},
		{"a pod keeps a board from its layout", func(r rest) rest {
			r.wish.layout, r.wish.excluded = "all-balanced", nil
			r.conditions[1], r.conditions[2], r.conditions[4] = doubtful, doubtful, doubtful
			r.kubelet.Pods[0].Containers[0].Grants = append(r.kubelet.Pods[0].Containers[0].Grants,
				simkubelet.Grant{Resource: parts, Devices: []string{first}})
			return r
		}, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := strings.Join(judge(test.change(right())).wrong, "\n")
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("complaints %q, want %q", got, test.want)
			}
		})
	}
}

func TestStill(t *testing.T) {
	made := func(plan string, restless ...string) still {
		s := still{lists: map[string][]string{board0: {"a"}, board3: {"b"}}, plan: plan, restless: map[string]bool{}}
		for _, board := range restless {
			s.restless[board] = true
		}
		return s
	}
	other := func(s still, board string) still {
		s.lists[board] = append(s.lists[board], "c")
		return s
	}
	tests := []struct {
		name          string
		before, after still
		differ        bool
	}{
		{"the same", made("x"), made("x"), false},
		{"another plan", made("x"), made("y"), true},
		{"another list", made("x"), other(made("x"), board0), true},
		{"another list of a restless board", made("", board0), other(made("", board0), board0), false},
		{"of one that was restless", made("", board0), other(made("x"), board0), false},
		{"of one that has become restless", made("x"), other(made("", board0), board0), false},
		{"of another one", made("", board0), other(made("", board0), board3), true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := test.before.differ(test.after); (diff != "") != test.differ {
				t.Errorf("differs: %q", diff)
			}
		})
	}
}
