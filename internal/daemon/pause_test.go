package daemon

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/simdra"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
)

// labelsOf are the labels of the one Node of an API server.
func (n *claimsNode) labelsOf(t *testing.T, labels map[string]string) *configsource.NodeLabels {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") != "" {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{
			"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{"resourceVersion": "1"},
			"items": []any{map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{"name": "n1", "uid": "u", "resourceVersion": "1", "labels": labels}}},
		})
	}))
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	config := *n.api.Config()
	config.Host = server.URL
	client, err := kube.NewClient(&config)
	if err != nil {
		t.Fatal(err)
	}
	return configsource.NewNodeLabels(client, "n1", "profile", slog.New(slog.DiscardHandler))
}

var paused = map[string]string{"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"}

type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// runWith runs the program on the node with these labels; stop ends it.
func (n *claimsNode) runWith(t *testing.T, labels *configsource.NodeLabels, withDRA bool, registry string, log *logged) (stop func()) {
	t.Helper()
	var err error
	if n.gpus, err = simnode.New(n.hardware); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	if err := n.pods.Start(ctx); err != nil {
		t.Fatal(err)
	}
	options := Options{
		GPUs:      func(configs.StartupSettings) (GPUs, error) { return Simulated(n.gpus, n.gpus), nil },
		Profile:   ProfileOptions{Path: filepath.Join(n.dir, "profile.yaml"), Labels: labels},
		PluginDir: filepath.Join(n.dir, "dp"), PodResourcesSocket: filepath.Join(n.dir, "pr.sock"),
		Settings: agent.Settings{NodeName: "n1", Logger: slog.New(slog.NewTextHandler(log, nil))},
	}
	if withDRA {
		options.DRA = &dradriver.Options{Driver: dra.DriverName, Dir: filepath.Join(n.dir, "plugins"), RegistryDir: registry, Config: n.api.Config()}
	}
	running.Go(func() {
		if err := Run(ctx, options); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	})
	stop = sync.OnceFunc(func() {
		if n.driver != nil {
			_ = n.driver.Close()
		}
		cancel()
		running.Wait()
		n.pods.StopContainers()
		_ = n.pods.Stop(context.Background())
	})
	t.Cleanup(stop)
	return stop
}

// TestClaimInAPause checks that a program that starts in a pause while a pod has a claim serves DRA, so that the
// kubelet can unprepare the claim and the pod can end.
func TestClaimInAPause(t *testing.T) {
	t.Parallel()
	n := newClaimsNode(t, "a30x4", "version: v1\ndra: {resources: all}\n")
	log := &logged{}
	registry := t.TempDir()
	stop := n.runWith(t, n.labelsOf(t, nil), true, registry, log)
	var err error
	if n.driver, err = simdra.Register(n.patience, registry); err != nil {
		t.Fatal(err)
	}
	n.awaitDevices(t, 4)
	claim, err := n.api.Allocate("claim", simdra.Request{})
	if err != nil {
		t.Fatal(err)
	}
	device := n.prepare(t, claim)
	if _, err := n.pods.AddPod(t.Context(), simkubelet.Pod{Namespace: claim.Namespace, Name: "p", Containers: []simkubelet.Container{{
		Name: "work", Claims: []simkubelet.Claim{{Name: claim.Name, Devices: []simkubelet.ClaimDevice{
			{Driver: dra.DriverName, Pool: device.GetPoolName(), Name: device.GetDeviceName(), CDI: device.GetCdiDeviceIds()},
		}}},
	}}}); err != nil {
		t.Fatal(err)
	}
	stop()
	// Its next start is in a pause that it did not see begin. Pods go on.
	registry, log = t.TempDir(), &logged{}
	n.runWith(t, n.labelsOf(t, paused), true, registry, log)
	if n.driver, err = simdra.Register(n.patience, registry); err != nil {
		t.Fatalf("no DRA driver, so the pod cannot end before the pause does: %v; the driver was opened %d times\n%s", err, n.gpus.Calls("Init"), log)
	}
	if err := n.driver.Unprepare(n.patience, claim); err != nil {
		t.Error(err)
	}
}
