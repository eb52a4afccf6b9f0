package api

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
)

// testKubelet has the whole program between the API server and a simulated
// kubelet: what changes in the cluster is what the kubelet sees, on the stream
// that was open before.
func testKubelet(t *testing.T, s *server) {
	two, four, ten := document("2"), document("4"), document("10")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two, "b": four})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")

	dir, err := os.MkdirTemp("", "va") //nolint:usetesting // a socket's path must be short
	s.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	node, err := simnode.New("t4")
	s.must(err)
	log := slog.New(slog.DiscardHandler)
	kubelet := simkubelet.New(simkubelet.Options{Dir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"), Logger: log})
	holders := podresources.New(podresources.Options{Socket: filepath.Join(dir, "pr.sock"), CheckpointDir: dir, Logger: log})
	t.Cleanup(func() { _ = holders.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- kubelet.Run(ctx) }()
	go func() {
		ended <- agent.Run(ctx, agent.Options{
			Node:    nvml.NewNode(node, nvml.Options{Logger: log, Rescan: time.Minute, Probe: time.Minute}),
			Policy:  f.policy,
			Plugin:  plugin.NewManager(plugin.Options{Dir: dir, Kubelet: holders, Logger: log, Timing: plugin.Timing{Quiet: time.Second}}),
			Holders: holders, Logger: log, Version: "test",
		})
	}()
	f.stop() // The program watches now.
	t.Cleanup(func() {
		cancel()
		<-ended
		<-ended
	})
	shows := func(devices int) {
		t.Helper()
		began := time.Now()
		await(t, 30*time.Second, "the kubelet to see it", func() bool {
			return kubelet.Snapshot().Resources["nvidia.com/gpu"].Allocatable == devices
		})
		t.Logf("%d devices after %s", devices, time.Since(began).Round(time.Millisecond))
	}
	shows(2)
	s.setNode("n1", "b")
	shows(4)
	s.setProfiles(map[string]string{"a": two, "b": ten})
	shows(10)
	s.setProfiles(map[string]string{"a": two, "b": document("0")})
	s.setNode("n1", "a")
	shows(2)
	if seen := kubelet.Snapshot().Resources["nvidia.com/gpu"]; seen.StreamsOpened != 1 || seen.Registrations != 1 {
		t.Errorf("%d streams, %d registrations; want one of each", seen.StreamsOpened, seen.Registrations)
	}
}
