package decide

import (
	"fmt"
	"testing"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// BenchmarkDecide decides for 16 GPUs, each offered as 500 shares, or divided on demand with seven partitions.
func BenchmarkDecide(b *testing.B) {
	geometry, _ := mig.GeometryOf(0x2330)
	gpus := func(partitions int) (list []sharing.GPU) {
		for i := range 16 {
			gpu := sharing.GPU{
				UUID:         fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i),
				Index:        i,
				Model:        "H100",
				NUMANode:     -1,
				MIGCapable:   true,
				MIG:          partitions > 0,
				Architecture: "hopper",
			}
			for p := range partitions {
				gpu.Partitions = append(gpu.Partitions, sharing.Partition{
					UUID:      fmt.Sprintf("MIG-%08d-%04d-0000-0000-000000000000", i, p),
					Index:     p,
					Profile:   mig.Profile{Compute: 1, Slices: 1, MemoryGB: 10},
					Placement: mig.Placement{Start: p, Size: 1},
				})
			}
			list = append(list, gpu)
		}
		return list
	}
	shared := Facts{GPUs: gpus(0), Profile: profile()}
	shared.Profile.TimeSlicing = []sharing.ReplicatedResource{{Path: "s", Resource: whole, Replicas: 500, Policy: sharing.Distributed}}
	divided := Facts{GPUs: gpus(7), Profile: profile()}
	onDemandOf(&divided, divided.GPUs[0].UUID)
	for _, gpu := range divided.GPUs {
		divided.DRA.Geometries[gpu.UUID] = Geometry{State: sharing.MIGState{Geometry: geometry}}
		divided.DRA.View.Paths[dra.UnitName(gpu.UUID, nil)] = units.DRA
	}
	for name, facts := range map[string]Facts{"8000 devices": shared, "on demand": divided} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var d Decision
			for b.Loop() {
				d = Decide(facts)
			}
			b.ReportMetric(float64(len(d.Units)), "units")
		})
	}
}
