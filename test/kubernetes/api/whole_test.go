package api

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
)

// program is all of Virgate on one simulated node, put together as by virgate
// run: profiles from the API server, boards that can be cut, and a reporter.
type program struct {
	counter
	gpus    *simnode.Node
	kubelet *simkubelet.Kubelet
}

// run starts it for the Node with boards of that kind until the test ends.
func (s *server) run(t *testing.T, name, boards string) *program {
	t.Helper()
	dir, err := os.MkdirTemp("", "va") //nolint:usetesting // a socket's path must be short
	s.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &program{}
	p.gpus, err = simnode.New(boards)
	s.must(err)
	log := slog.New(slog.DiscardHandler)
	p.kubelet = simkubelet.New(simkubelet.Options{Dir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"), Logger: log})
	holders := podresources.New(podresources.Options{Socket: filepath.Join(dir, "pr.sock"), CheckpointDir: dir, Logger: log})
	t.Cleanup(func() { _ = holders.Close() })

	config := p.into(s.config(virgateToken))
	reporter, err := report.New(report.Options{Config: config, Node: name, Events: true, Condition: true, Annotations: true})
	s.must(err)
	api, err := policy.NewAPI(config)
	s.must(err)
	labels := policy.NewLabels(api, name, label, log)
	labels.Replaced = reporter.NodeReplaced
	started, err := configs.Parse("", nil, nil)
	s.must(err)
	file := state.NewFile(dir, log)
	file.Load()
	node := nvml.NewNode(p.gpus, nvml.Options{Logger: log, Rescan: time.Minute, Probe: time.Minute})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { _ = p.kubelet.Run(ctx) })
	running.Go(func() {
		if err := agent.Run(ctx, agent.Options{
			Node: node, Health: node, Logger: log, NodeName: name, Reporter: reporter, Holders: holders,
			Policy: &policy.Node{Shelf: policy.NewConfigMap(api, namespace, configMap, log), Labels: labels, Started: started.Process},
			Plugin: plugin.NewManager(plugin.Options{
				Dir: dir, Kubelet: holders, Store: state.Lists{File: file}, Logger: log,
				Timing: plugin.Timing{Quiet: 500 * time.Millisecond, StopAfter: time.Second},
			}),
			Partitioner: nvml.NewPartitioner(p.gpus, node.Quiet), Journal: state.Journal{File: file}, Refresh: node.LookAgain,
		}); err != nil {
			t.Error(err)
		}
	})
	return p
}

// offers says that the kubelet can give exactly so many of the resource.
func (p *program) offers(resource string, devices int) bool {
	return p.kubelet.Snapshot().Resources[resource].Allocatable == devices
}
