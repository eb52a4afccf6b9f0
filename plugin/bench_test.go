package plugin_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/virgate/virgate/plugin"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// The benchmarks measure over a real socket; compare them with the empty call.

func BenchmarkEmptyCall(b *testing.B) {
	client := dialPlugin(b, plan(gpu, 8, 10))
	for b.Loop() {
		if _, err := client.GetDevicePluginOptions(b.Context(), &api.Empty{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAllocate(b *testing.B) {
	for _, replicas := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("devices=%d", 8*replicas), func(b *testing.B) {
			client := dialPlugin(b, plan(gpu, 8, replicas))
			request := allocate("GPU-0003::1")
			var empty, full time.Duration
			for b.Loop() {
				start := time.Now()
				if _, err := client.GetDevicePluginOptions(b.Context(), &api.Empty{}); err != nil {
					b.Fatal(err)
				}
				middle := time.Now()
				if _, err := client.Allocate(b.Context(), request); err != nil {
					b.Fatal(err)
				}
				end := time.Now()
				empty += middle.Sub(start)
				full += end.Sub(middle)
			}
			b.ReportMetric(float64(full)/float64(empty), "×empty")
		})
	}
}

func BenchmarkPreferredAllocation(b *testing.B) {
	p := plan(gpu, 8, 1000)
	var available []string
	for _, d := range p.Resources[0].Devices {
		available = append(available, d.ID)
	}
	client := dialPlugin(b, p)
	for _, size := range []int32{1, 8, 64} {
		b.Run(fmt.Sprintf("devices=8000/size=%d", size), func(b *testing.B) {
			request := &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: available, AllocationSize: size},
			}}
			for b.Loop() {
				if _, err := client.GetPreferredAllocation(b.Context(), request); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkListUpdate measures from a plan until its list is received.
func BenchmarkListUpdate(b *testing.B) {
	for _, replicas := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("devices=%d", 8*replicas), func(b *testing.B) {
			sound := plan(gpu, 8, replicas)
			faulty := withFault(plan(gpu, 8, replicas), "GPU-0003", "lost")
			client, manager := dialOptions(b, plugin.Options{
				Logger: slog.New(slog.DiscardHandler),
				Timing: plugin.Timing{ListInterval: time.Nanosecond}, // Lists that follow at once are no burst here.
			}, sound)
			stream, err := client.ListAndWatch(b.Context(), &api.Empty{})
			if err == nil {
				_, err = stream.Recv()
			}
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for next, after := faulty, sound; b.Loop(); next, after = after, next {
				manager.Apply(next)
				if _, err := stream.Recv(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
