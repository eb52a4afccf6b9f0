package api

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
)

// testProgramTells runs all of the program between a simulated driver, a
// simulated kubelet and the real API server.
func testProgramTells(t *testing.T, s *server) {
	s.setNode("program", "")
	profile := filepath.Join(t.TempDir(), "profile.yaml")
	const entry = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: "
	write(t, profile, entry+"4}\n")
	gpus := startProgram(t, s, profile)
	s.await(startTimeout, "the first profile", func() bool {
		return s.node("program").Labels[report.StateLabel] == "applied" && len(s.told("program", "ProfileApplied")) == 1
	})
	generation := s.node("program").Annotations[report.GenerationAnnotation]

	s.await(startTimeout, "the XID", func() bool {
		// An event that comes before anybody listens is lost, so it comes again.
		s.must(gpus.Do("xid", map[string]string{"gpu": "0", "code": "79"}))
		return slices.ContainsFunc(s.told("program", "GPUUnhealthy"), func(m string) bool { return strings.Contains(m, "GPU 0 (GPU-") && strings.Contains(m, "XID 79") })
	})

	write(t, profile, entry+"-3}\n")
	s.await(startTimeout, "the refusal", func() bool {
		return s.says("program", generation, "rejected", "ProfileRejected") && len(s.told("program", "ProfileRejected")) == 1
	})
	for _, part := range []string{profile + ":5", "sharing.timeSlicing.resources[0].replicas", "(got -3)"} {
		if got := s.told("program", "ProfileRejected")[0]; !strings.Contains(got, part) {
			t.Errorf("%q does not name %s", got, part)
		}
	}

	write(t, profile, entry+"5}\n")
	s.await(startTimeout, "the next profile", func() bool {
		node := s.node("program")
		return node.Labels[report.StateLabel] == "applied" && node.Annotations[report.GenerationAnnotation] != generation && len(s.told("program", "ProfileApplied")) == 2
	})
}

// startProgram runs Virgate for the Node program with the profile until the test ends.
func startProgram(t *testing.T, s *server, profile string) *simnode.Node {
	t.Helper()
	dir, err := os.MkdirTemp("", "va") // A socket's path must be short.
	s.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	gpus, err := simnode.New("dgx-a100")
	s.must(err)
	log := slog.New(slog.DiscardHandler)
	file := &policy.File{Path: profile}
	config, err := file.Config()
	s.must(err)
	file.Started = config.Process
	sight := podresources.New(podresources.Options{CheckpointDir: dir, Logger: log})
	t.Cleanup(func() { _ = sight.Close() })
	reporter, err := report.New(report.Options{Config: s.config(virgateToken), Node: "program", Events: true, Condition: true, Annotations: true})
	s.must(err)
	node := nvml.NewNode(gpus, nvml.Options{Logger: log, Probe: 100 * time.Millisecond})
	kubelet := simkubelet.New(simkubelet.Options{Dir: dir})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { _ = kubelet.Run(ctx) })
	running.Go(func() {
		if err := agent.Run(ctx, agent.Options{
			Node: node, Health: node, Policy: file, Reporter: reporter, Logger: log, NodeName: "program",
			Plugin: plugin.NewManager(plugin.Options{Dir: dir, Kubelet: sight, Logger: log}),
		}); err != nil {
			t.Error(err)
		}
	})
	return gpus
}
