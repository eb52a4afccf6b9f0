package simkubelet

import (
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestCheckList(t *testing.T) {
	misspelt := &api.Device{ID: "a", Health: "healthy"}
	for _, row := range []struct {
		name     string
		previous []*api.Device
		list     []*api.Device
		held     idSet
		want     []string
	}{
		{name: "clean", previous: unhealthy("z"), list: healthy("a@0", "b"), held: sets.New("a")},
		{name: "becomes unhealthy", previous: healthy("a"), list: unhealthy("a")},
		{name: "twice", list: append(healthy("a"), unhealthy("a")...), want: []string{"r: list has a twice"}},
		{name: "no ID", list: healthy(""), want: []string{"r: list has a device without ID"}},
		{name: "spelling", list: []*api.Device{misspelt}, want: []string{`r: health "healthy" of a counts as unhealthy`}},
		{name: "node", list: healthy("a@-1"), want: []string{"r: a is on a negative NUMA node: no node is no topology"}},
		{
			name: "no nodes", list: []*api.Device{{ID: "a", Health: api.Healthy, Topology: &api.TopologyInfo{}}},
			want: []string{"r: a has a topology without nodes: GetAllocatableResources does not show it"},
		},
		{
			name: "drops healthy", previous: healthy("a", "b", "c", "d", "e", "f"), list: healthy("f"),
			want: []string{"r: list drops devices that were Healthy in the list before: a, b, c, d and 1 more"},
		},
		{
			name: "drops held", previous: unhealthy("a", "b"), list: nil, held: sets.New("b"),
			want: []string{"r: list drops devices that pods hold: b"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			if diff := cmp.Diff(row.want, checkList("r", newDeviceList(row.previous), row.list, row.held)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Violations are also passed to OnViolation, with no lock held.
func TestListViolations(t *testing.T) {
	var mu sync.Mutex
	var called []string
	var r *rig
	r = startRig(t, Options{OnViolation: func(message string) {
		mu.Lock()
		defer mu.Unlock()
		called = append(called, message)
		_ = r.Snapshot() // would deadlock under the lock
	}})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	p.send(healthy("a")...)
	r.expectViolation("Healthy in the list before", "b")
	r.add(oneContainer("pod", 1))
	p.send(unhealthy("a")...)
	p.send()
	r.expectViolation("pods hold", "a")
	r.await(func(Snapshot) bool {
		mu.Lock()
		defer mu.Unlock()
		return len(called) == 2 && strings.Contains(called[1], "pods hold")
	})
}

// Devices became unhealthy when the stream ended, so the next list may drop them.
func TestListAfterReconnect(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	r.DropStream(gpu)
	p.awaitEnd()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Streams == 0 })
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("b")...)
	r.awaitCounts(gpu, 1, 1)
}

func TestTwoStreams(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.expectViolation(gpu, "2 live streams")
}

func TestListOver4MiB(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	p.post(healthy(strings.Repeat("x", 4<<20))...)
	r.expectViolation(gpu, "over 4 MiB")
	p.awaitEnd()
	r.awaitCounts(gpu, 0, 1)
}

func TestUnitInTwoResources(t *testing.T) {
	const shared = "nvidia.com/gpu.shared"
	r := startRig(t, Options{})
	whole := r.startPlugin(gpu, "1.sock", healthy("g0", "g1")...)
	sliced := r.startPlugin(shared, "2.sock", healthy("g2::0", "g2::1")...)

	sliced.send(append(healthy("g2::0", "g2::1"), unhealthy("g0::0")...)...)
	sliced.send(healthy("g2::0", "g2::1", "g0::0", "g0::1")...)
	r.expectViolation(gpu, shared, ": g0")

	// The same while a pod holds the unit.
	whole.send(append(unhealthy("g0"), healthy("g1")...)...)
	status := r.add(oneContainer("pod", 1))
	if got := status.Containers[0].Devices(gpu)[0]; got != "g1" {
		t.Fatalf("got %s, want g1", got)
	}
	sliced.send(healthy("g2::0", "g2::1", "g0::0", "g0::1", "g1::0")...)
	r.expectViolation(gpu, shared, ": g1")
}

func TestUnitAloneAndShared(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "1.sock", healthy("g0", "g1")...)
	p.send(healthy("g0", "g0::1", "g1")...) // Time-slices; the first one was the whole GPU.
	p.send(append(healthy("g0::0of2", "g0::1of2", "g1"), unhealthy("g0", "g0::1")...)...)
	p.send(append(healthy("g0::0of2", "g0::1of2", "g1::0of2"), unhealthy("g0", "g0::1", "g1")...)...)
	p.send(append(healthy("g0::0of2", "g0::1of2", "g1::0of2", "g0", "g1"), unhealthy("g0::1")...)...)
	r.expectViolation(gpu, gpu+" as shares: g0, g1")
}
