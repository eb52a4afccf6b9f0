package sharing

import (
	"fmt"
	"testing"
)

func BenchmarkPrefer(b *testing.B) {
	for _, policy := range []AllocationPolicy{Distributed, Packed, Spread} {
		for _, count := range []int{8, 80, 800, 8000} {
			resource := NewPlan(node(8), defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: count / 8})).Resources[0]
			x := NewDeviceSet(resource.Devices, resource.Units, policy)
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

// Whole GPUs are chosen by links: the best of all sets up to 8 of 16.
func BenchmarkPreferByLinks(b *testing.B) {
	for _, name := range []string{"DGX-1 V100", "DGX-2"} {
		resource := NewPlan(fabricOf(name).node(), defaults()).Resources[0]
		x := NewDeviceSet(resource.Devices, resource.Units, resource.Policy)
		var available []string
		for _, device := range resource.Devices {
			available = append(available, device.ID)
		}
		for _, size := range []int{1, 2, 4, 8} {
			b.Run(fmt.Sprintf("gpus=%d/wanted=%d", len(available), size), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					x.Prefer(available, nil, size)
				}
			})
		}
	}
}

// Partitions of 8 GPUs, as replicas, by GPU.
func BenchmarkPreferPartitions(b *testing.B) {
	for _, policy := range []AllocationPolicy{Distributed, Packed, Spread} {
		for _, count := range []int{56, 8008} {
			var gpus []GPU
			for index := range 8 {
				gpus = append(gpus, cut(index, oneG(), oneG(), oneG(), oneG(), oneG(), oneG(), oneG()))
			}
			resource := NewPlan(gpus, defaults(ReplicatedResource{Resource: "nvidia.com/mig-1g.5gb", Replicas: count / 56})).Resources[0]
			x := NewDeviceSet(resource.Devices, resource.Units, policy)
			var available []string
			for _, device := range resource.Devices {
				available = append(available, device.ID)
			}
			b.Run(fmt.Sprintf("policy=%s/ids=%d/wanted=64", policy, count), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					x.Prefer(available, nil, 64)
				}
			})
		}
	}
}

func BenchmarkNewDeviceSet(b *testing.B) {
	for _, count := range []int{80, 8000} {
		resource := NewPlan(node(8), defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: count / 8})).Resources[0]
		b.Run(fmt.Sprintf("ids=%d", count), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				NewDeviceSet(resource.Devices, resource.Units, Distributed)
			}
		})
	}
}

func BenchmarkNewPlan(b *testing.B) {
	for _, replicas := range []int{10, 1000} {
		gpus, profile := node(8), defaults(ReplicatedResource{Resource: "nvidia.com/gpu", Replicas: replicas})
		b.Run(fmt.Sprintf("gpus=8/replicas=%d", replicas), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				NewPlan(gpus, profile)
			}
		})
	}
}
