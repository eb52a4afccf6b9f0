package daemon

import (
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/internal/simdra"
)

// BenchmarkClaims measures how long the kubelet waits for claims to be prepared. The claim is read from an API
// server without delay, the holders from the kubelet, and the table and the CDI names are written and synced.
// There are 80 shares of eight GPUs, and claims come now and then, one by one, or 20 at once.
func BenchmarkClaims(b *testing.B) {
	for _, load := range []struct {
		name     string
		together int
		pause    time.Duration
	}{{"now and then", 1, 200 * time.Millisecond}, {"one by one", 1, 0}, {"20 at once", 20, 0}} {
		b.Run(load.name, func(b *testing.B) {
			node := newClaimsNode(b, "dgx-h100", "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\ndra: {resources: all}\n")
			node.start(b)
			defer node.stop()
			node.awaitDevices(b, 8)
			var prepared, unprepared []time.Duration
			for b.Loop() {
				var claims []*resourceapi.ResourceClaim
				<-time.After(load.pause) //nolint:forbidigo // The load of a benchmark.
				for i := range load.together {
					claim, err := node.api.Allocate("claim-"+strconv.Itoa(i), simdra.Request{})
					if err != nil {
						b.Fatal(err)
					}
					claims = append(claims, claim)
				}
				prepared = append(prepared, each(b, claims, func(c *resourceapi.ResourceClaim) error {
					_, err := node.driver.Prepare(b.Context(), c)
					return err
				})...)
				unprepared = append(unprepared, each(b, claims, func(c *resourceapi.ResourceClaim) error {
					defer node.api.Release(c)
					return node.driver.Unprepare(b.Context(), c)
				})...)
			}
			report(b, "prepare", prepared)
			report(b, "unprepare", unprepared)
		})
	}
}

// each calls do for all claims at once, and returns how long each took.
func each(b *testing.B, claims []*resourceapi.ResourceClaim, do func(*resourceapi.ResourceClaim) error) []time.Duration {
	b.Helper()
	took := make([]time.Duration, len(claims))
	var group sync.WaitGroup
	for i, claim := range claims {
		group.Go(func() {
			begun := time.Now()
			if err := do(claim); err != nil {
				b.Error(err)
			}
			took[i] = time.Since(begun) //nolint:forbidigo // A benchmark measures the time.
		})
	}
	group.Wait()
	return took
}

func report(b *testing.B, call string, took []time.Duration) {
	b.Helper()
	slices.Sort(took)
	for name, at := range map[string]int{"p50": len(took) / 2, "p99": len(took) * 99 / 100} {
		b.ReportMetric(float64(took[at].Microseconds())/1000, call+"-"+name+"-ms")
	}
}
