package daemon

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simdra"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/await"
)

// claimsNode is the whole program on a simulated node that offers its profile's devices to claims.
type claimsNode struct {
	dir, hardware string
	api           *simdra.API
	pods          *simkubelet.Kubelet
	patience      context.Context

	// Of a run.
	gpus   *simnode.Node
	driver *simdra.Kubelet
	stop   func()
}

func newClaimsNode(t testing.TB, hardware, profile string) *claimsNode {
	t.Helper()
	n := &claimsNode{dir: t.TempDir(), hardware: hardware}
	if err := os.WriteFile(filepath.Join(n.dir, "profile.yaml"), []byte(profile), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	n.patience, cancel = context.WithTimeout(ctx, await.Patience)
	t.Cleanup(cancel)
	var err error
	if n.api, err = simdra.NewAPI(ctx, dra.DriverName, "n1", t.Errorf); err != nil {
		t.Fatal(err)
	}
	n.pods = simkubelet.New(simkubelet.Options{Dir: filepath.Join(n.dir, "dp"), PodResourcesSocket: filepath.Join(n.dir, "pr.sock")})
	return n
}

// start runs the kubelet and the program on the node as after a boot: without partitions.
func (n *claimsNode) start(t testing.TB) {
	t.Helper()
	var err error
	if n.gpus, err = simnode.New(n.hardware); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	registry := t.TempDir()
	if err := n.pods.Start(ctx); err != nil {
		t.Fatal(err)
	}
	running.Go(func() {
		err := Run(ctx, Options{
			GPUs:      func(configs.StartupSettings) (GPUs, error) { return Simulated(n.gpus, n.gpus), nil },
			Profile:   ProfileOptions{Path: filepath.Join(n.dir, "profile.yaml")},
			PluginDir: filepath.Join(n.dir, "dp"), PodResourcesSocket: filepath.Join(n.dir, "pr.sock"),
			DRA:      &dradriver.Options{Driver: dra.DriverName, Dir: filepath.Join(n.dir, "plugins"), RegistryDir: registry, Config: n.api.Config()},
			Settings: agent.Settings{NodeName: "n1", Logger: slog.New(slog.DiscardHandler)},
		})
		if err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	})
	n.stop = sync.OnceFunc(func() {
		if n.driver != nil {
			_ = n.driver.Close()
		}
		cancel()
		running.Wait()
		n.pods.StopContainers()
		_ = n.pods.Stop(context.Background()) // Which waits for nothing.
	})
	t.Cleanup(n.stop)
	if n.driver, err = simdra.Register(ctx, registry); err != nil {
		t.Fatal(err)
	}
}

// awaitDevices waits until the ResourceSlices have at least so many devices.
func (n *claimsNode) awaitDevices(t testing.TB, atLeast int) {
	t.Helper()
	if err := n.api.Until(n.patience, func() bool {
		devices := 0
		for _, slice := range n.api.Sorted() {
			devices += len(slice.Spec.Devices)
		}
		return devices >= atLeast
	}); err != nil {
		t.Fatal(err)
	}
}

// TestReboot reboots a node with two pods on partitions made for their claims. The kubelet shows both pods before
// it asks for the first claim. Each gets its partition made again, with the same CDI entries.
func TestReboot(t *testing.T) {
	t.Parallel()
	n := newClaimsNode(t, "h100", "version: v1\nflags: {migStrategy: mixed}\nmig: {manage: true}\ndra: {resources: all, dynamicMIG: true}\n")
	n.start(t)
	n.awaitDevices(t, 20)
	var given []*resourceapi.ResourceClaim
	entries := map[string][]string{}
	for _, profile := range []string{"1g.10gb", "3g.40gb"} {
		claim, err := n.api.Allocate("claim-"+profile, simdra.Request{Profile: profile})
		if err != nil {
			t.Fatal(err)
		}
		device := n.prepare(t, claim)
		entries[claim.Name] = device.GetCdiDeviceIds()
		if _, err := n.pods.AddPod(t.Context(), simkubelet.Pod{Namespace: claim.Namespace, Name: profile, Containers: []simkubelet.Container{{
			Name: "work", Claims: []simkubelet.Claim{{Name: claim.Name, Devices: []simkubelet.ClaimDevice{
				{Driver: dra.DriverName, Pool: device.GetPoolName(), Name: device.GetDeviceName(), CDI: device.GetCdiDeviceIds()},
			}}},
		}}}); err != nil {
			t.Fatal(err)
		}
		given = append(given, claim)
	}
	n.stop()
	n.start(t)
	if parts := len(n.partitions(t)); parts > 0 {
		t.Fatalf("%d partitions after a reboot", parts)
	}
	for _, claim := range given {
		if device := n.prepare(t, claim); len(device.GetCdiDeviceIds()) == 0 || device.GetCdiDeviceIds()[0] != entries[claim.Name][0] {
			t.Errorf("%s has %q after the reboot, and had %q", claim.Name, device.GetCdiDeviceIds(), entries[claim.Name])
		}
	}
	if parts := n.partitions(t); len(parts) != 2 {
		t.Errorf("partitions %q", parts)
	}
}

// prepare asks until the driver prepares the claim, like the kubelet.
func (n *claimsNode) prepare(t *testing.T, claim *resourceapi.ResourceClaim) *drapb.Device {
	t.Helper()
	var devices []*drapb.Device
	await.Until(t, "the devices of "+claim.Name, func() (err error) {
		devices, err = n.driver.Prepare(t.Context(), claim)
		return err
	})
	return devices[0]
}

func (n *claimsNode) partitions(t *testing.T) (list []string) {
	t.Helper()
	gpus, err := nvml.Scan(n.gpus)
	if err != nil {
		t.Fatal(err)
	}
	for _, gpu := range gpus {
		for _, p := range gpu.Partitions {
			list = append(list, p.UUID)
		}
	}
	return list
}
