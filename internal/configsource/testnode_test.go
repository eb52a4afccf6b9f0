package configsource

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/watchserver"
)

// fakeServer is a Client to an in-memory API server; it reconnects soon after a cut.
type fakeServer struct{ *watchserver.Server }

func newFakeServer() fakeServer { return fakeServer{watchserver.New()} }

func (s fakeServer) Follow(ctx context.Context, q kube.Query, into kube.Store) {
	requests := cache.ListWatch{ListWithContextFunc: s.List, WatchFuncWithContext: s.Watch}
	kube.Follow(ctx, requests, q.What, into, 0, time.Millisecond)
}

func fakeNode(name, value string) runtime.Object {
	node := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if value != "" {
		node.Labels = map[string]string{labelName: value}
	}
	return node
}

func fakeConfigMap(documents map[string]string) runtime.Object {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "profiles", Namespace: "gpu"}, Data: documents}
}

const labelName = "nvidia.com/device-plugin.config"

// testNode is a node's source over two fake servers, and the profiles it would have applied.
type testNode struct {
	t           *testing.T
	nodes, maps fakeServer
	source      *NodeSource
	mu          sync.Mutex
	applied     []string
	problem     error
	// problems counts looks with a problem.
	problems int
	stop     func()
}

func newTestNode(t *testing.T, change func(*NodeSource)) *testNode {
	t.Helper()
	s := &testNode{t: t, nodes: newFakeServer(), maps: newFakeServer()}
	log := slog.New(slog.DiscardHandler)
	s.source = &NodeSource{
		Labels: NewNodeLabels(s.nodes, "n1", labelName, log),
		Source: NewConfigMap(s.maps, "gpu", "profiles", log),
	}
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.source.Started = started.Startup
	if change != nil {
		change(s.source)
	}
	return s
}

func (s *testNode) run() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.source.Watch(ctx, s.look) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
	s.t.Cleanup(s.stop)
}

// look reads the profile, like the agent at every change.
func (s *testNode) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	selected, err := s.source.Profile()
	if s.problem = err; err != nil {
		s.problems++
		return
	}
	if next := selected.Generation; len(s.applied) == 0 || s.applied[len(s.applied)-1] != next {
		s.applied = append(s.applied, next)
	}
}

// await waits for the generation in force and a part of the problem, "" without one.
func (s *testNode) await(generation, problem string) {
	s.t.Helper()
	await.Until(s.t, "a profile", func() error {
		s.mu.Lock()
		have, err := "", s.problem
		if len(s.applied) > 0 {
			have = s.applied[len(s.applied)-1]
		}
		s.mu.Unlock()
		if have == generation && (err == nil) == (problem == "") && (err == nil || strings.Contains(err.Error(), problem)) {
			return nil
		}
		return fmt.Errorf("in force %q, problem %w; want %q, %q", have, err, generation, problem)
	})
}

func generation(t *testing.T, text string) string {
	t.Helper()
	config, err := configs.Parse("", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return configs.Generation(config.Profile)
}
