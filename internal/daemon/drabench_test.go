package daemon

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/simdra"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// BenchmarkClaims is how long the kubelet waits for the program to prepare claims, from its call
// to the answer: the claim is read from the API server, whose answer takes no time here, the kubelet is asked who
// holds what, and the table and the CDI names are written and synced. 80 shares of eight GPUs, whose claims come
// now and then, one after the other, or 20 at once.
func BenchmarkClaims(b *testing.B) {
	for _, load := range []struct {
		name     string
		together int
		pause    time.Duration
	}{{"now and then", 1, 200 * time.Millisecond}, {"one by one", 1, 0}, {"20 at once", 20, 0}} {
		b.Run(load.name, func(b *testing.B) {
			node := newClaimsNode(b)
			var prepared, unprepared []time.Duration
			for b.Loop() {
				var claims []*resourceapi.ResourceClaim
				time.Sleep(load.pause)
				for i := range load.together {
					claim, err := node.api.Allocate("claim-"+strconv.Itoa(i), simdra.Request{})
					if err != nil {
						b.Fatal(err)
					}
					claims = append(claims, claim)
				}
				prepared = append(prepared, each(b, claims, func(c *resourceapi.ResourceClaim) error {
					_, err := node.kubelet.Prepare(b.Context(), c)
					return err
				})...)
				unprepared = append(unprepared, each(b, claims, func(c *resourceapi.ResourceClaim) error {
					defer node.api.Release(c)
					return node.kubelet.Unprepare(b.Context(), c)
				})...)
			}
			report(b, "prepare", prepared)
			report(b, "unprepare", unprepared)
		})
	}
}

// each does it for all claims at once, and returns how long each took.
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
			took[i] = time.Since(begun)
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

// claimsNode is the program on a simulated node that offers 80 shares by claims.
type claimsNode struct {
	api     *simdra.API
	kubelet *simdra.Kubelet
}

func newClaimsNode(b *testing.B) claimsNode {
	b.Helper()
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	dir, registry := b.TempDir(), b.TempDir()
	profile := filepath.Join(dir, "profile.yaml")
	must(os.WriteFile(profile, []byte("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\ndra: {resources: all}\n"), 0o600))
	library, err := simnode.New("dgx-h100")
	must(err)
	api, err := simdra.NewAPI(ctx, dra.DriverName, "n1", b.Errorf)
	must(err)
	kubelet := simkubelet.New(simkubelet.Options{Dir: filepath.Join(dir, "dp"), PodResourcesSocket: filepath.Join(dir, "pr.sock")})
	var running sync.WaitGroup
	b.Cleanup(running.Wait)
	b.Cleanup(cancel)
	run := func(do func(context.Context) error) {
		running.Go(func() {
			if err := do(ctx); err != nil && ctx.Err() == nil {
				b.Error(err)
			}
		})
	}
	run(kubelet.Run)
	run(func(ctx context.Context) error {
		return Run(ctx, Options{
			GPUs:      func(configs.StartupSettings) (GPUs, error) { return Simulated(library, library), nil },
			Profile:   ProfileOptions{Path: profile},
			PluginDir: filepath.Join(dir, "dp"), PodResourcesSocket: filepath.Join(dir, "pr.sock"),
			DRA:      &dradriver.Options{Driver: dra.DriverName, Dir: filepath.Join(dir, "plugins"), RegistryDir: registry, Config: api.Config()},
			Settings: agent.Settings{NodeName: "n1", Logger: slog.New(slog.DiscardHandler)},
		})
	})
	connection, err := simdra.Register(ctx, registry)
	must(err)
	b.Cleanup(func() { _ = connection.Close() })
	must(api.Until(ctx, func() bool {
		devices := 0
		for _, slice := range api.Sorted() {
			devices += len(slice.Spec.Devices)
		}
		return devices == 8
	}))
	return claimsNode{api, connection}
}
