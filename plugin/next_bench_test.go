package plugin

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/protobuf/proto"
)

// BenchmarkNext is the first list of a start, and a look at one that stays.
func BenchmarkNext(b *testing.B) {
	for _, replicas := range []int{10, 100, 1000} {
		plan := sharing.NewPlan(grownNode(8, 1, replicas))
		first := func() Lists { return Next(nil, plan, KubeletSnapshot{}, RPCState{}, time.Time{}, Timing{}) }
		b.Run(fmt.Sprintf("devices=%d/first", 8*replicas), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				first()
			}
		})
		b.Run(fmt.Sprintf("devices=%d/again", 8*replicas), func(b *testing.B) {
			b.ReportAllocs()
			have := first()
			for b.Loop() {
				Next(have, plan, KubeletSnapshot{}, RPCState{}, time.Time{}, Timing{})
			}
		})
	}
}

// BenchmarkStep is a step with 8,000 unchanged devices, as the timer runs it while the kubelet cannot be read.
func BenchmarkStep(b *testing.B) {
	plan := sharing.NewPlan(grownNode(8, 1, 1000))
	r := &reconciler{
		Manager: NewManager(Options{Logger: slog.New(slog.DiscardHandler)}),
		lists:   Lists{},
		servers: map[string]*running{},
		start:   func(s *server) *running { return &running{server: s} },
	}
	r.step(&plan)
	b.ReportAllocs()
	for b.Loop() {
		r.step(&plan)
	}
}

// BenchmarkGeneration makes a server's generation of 8,000 devices.
func BenchmarkGeneration(b *testing.B) {
	plan := planOf(nil, "gpu=1000:A,B,C,D,E,F,G,H")
	list := Next(nil, plan, KubeletSnapshot{}, RPCState{}, time.Time{}, Timing{})["gpu"]
	units := map[string]sharing.Unit{}
	for _, u := range plan.Resources[0].Units {
		units[u.ID] = u
	}
	b.ReportAllocs()
	for b.Loop() {
		newGeneration(plan.Resources[0], list, grantTerms{host: &grant.Host{}}, plan.Health, units, nil)
	}
}

// BenchmarkGrowth makes the plan, the first lists and the generations of a node. It reports the bytes of all
// lists as the kubelet receives them, and the bytes that stay in memory. docs/internals/scale.md has its table.
func BenchmarkGrowth(b *testing.B) {
	for _, size := range []struct{ gpus, resources, replicas int }{
		{1, 1, 10},
		{8, 1, 1},
		{8, 1, 10},
		{8, 8, 10},
		{8, 1, 100},
		{8, 1, 1000},
		{8, 8, 1000},
		{64, 1, 10},
		{64, 64, 10},
		{64, 1, 125},
		{16, 1, sharing.MaxDevices / 16},
	} {
		gpus, profile := grownNode(size.gpus, size.resources, size.replicas)
		name := fmt.Sprintf("gpus=%d/resources=%d/devices=%d", size.gpus, size.resources, size.gpus*size.replicas)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				build(gpus, profile)
			}
			b.StopTimer()
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			built := build(gpus, profile)
			runtime.GC()
			runtime.ReadMemStats(&after)
			bytes := 0
			for _, g := range built {
				bytes += proto.Size(g.response())
			}
			b.ReportMetric(float64(bytes), "list-B")
			b.ReportMetric(float64(after.HeapAlloc)-float64(before.HeapAlloc), "kept-B")
			runtime.KeepAlive(built)
		})
	}
}

// grownNode is a node and a profile by which each GPU has so many replicas
// and the GPUs so many names.
func grownNode(gpus, resources, replicas int) ([]sharing.GPU, sharing.Profile) {
	profile := sharing.Profile{
		MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
	}
	var node []sharing.GPU
	for i := range gpus {
		node = append(node, sharing.GPU{UUID: fmt.Sprintf("GPU-%08d", i) + strings.Repeat("0", 28), Index: i, Model: "Test", NUMANode: i % 2})
	}
	for i := range resources {
		profile.TimeSlicing = append(profile.TimeSlicing, sharing.ReplicatedResource{
			Path: fmt.Sprintf("[%d]", i), Resource: "nvidia.com/gpu", Rename: fmt.Sprintf("nvidia.com/gpu-%d", i), Replicas: replicas,
			Select: sharing.Selection{Count: gpus / resources}, Policy: sharing.Distributed,
		})
	}
	return node, profile
}

func build(gpus []sharing.GPU, profile sharing.Profile) []*generation {
	plan := sharing.NewPlan(gpus, profile)
	lists := Next(nil, plan, KubeletSnapshot{}, RPCState{}, time.Time{}, Timing{})
	units := map[string]sharing.Unit{}
	for _, r := range plan.Resources {
		for _, unit := range r.Units {
			units[unit.ID] = unit
		}
	}
	var all []*generation
	for _, r := range plan.Resources {
		all = append(all, newGeneration(r, lists[r.Name], grantTerms{host: &grant.Host{}}, plan.Health, units, nil))
	}
	return all
}
