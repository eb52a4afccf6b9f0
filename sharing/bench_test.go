package sharing

import (
	"fmt"
	"testing"
)

func BenchmarkPrefer(b *testing.B) {
	for _, policy := range []Policy{Distributed, Packed, Spread} {
		for _, count := range []int{8, 80, 800, 8000} {
			resource := NewPlan(node(8), defaults(Share{Resource: "nvidia.com/gpu", Replicas: count / 8})).Resources[0]
			x := NewIndex(resource.Devices, policy)
			available := make([]string, 0, count)
			for _, device := range resource.Devices {
				available = append(available, device.ID)
			}
			for _, size := range []int{1, 8, 64} {
				b.Run(fmt.Sprintf("policy=%s/ids=%d/wanted=%d", policy, count, size), func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						x.Prefer(available, nil, size)
					}
				})
			}
		}
	}
}

func BenchmarkNewIndex(b *testing.B) {
	for _, count := range []int{80, 8000} {
		resource := NewPlan(node(8), defaults(Share{Resource: "nvidia.com/gpu", Replicas: count / 8})).Resources[0]
		b.Run(fmt.Sprintf("ids=%d", count), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				NewIndex(resource.Devices, Distributed)
			}
		})
	}
}

func BenchmarkNewPlan(b *testing.B) {
	for _, replicas := range []int{10, 1000} {
		boards, profile := node(8), defaults(Share{Resource: "nvidia.com/gpu", Replicas: replicas})
		b.Run(fmt.Sprintf("gpus=8/replicas=%d", replicas), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				NewPlan(boards, profile)
			}
		})
	}
}
