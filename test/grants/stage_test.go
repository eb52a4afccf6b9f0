// Package grants allocates on simulated nodes, through the plugin's socket and with all that a running
// Virgate collects for grants. It compares whole answers with golden files, one for each profile. After an
// intended change:
//
//	go test ./test/grants -update
package grants

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
)

// stage is a node with a profile in force and its sockets open.
type stage struct {
	plan  sharing.Plan
	ready grant.Host
	// nodes are the device nodes of each unit, for every strategy.
	nodes map[string][]string
	// root is the node's file system, specs the folder with its CDI specs, dir
	// the kubelet's.
	root, specs, dir string
}

// newStage serves the profile on a node with a host's installed driver.
func newStage(t *testing.T, nodeName, profile string) stage {
	t.Helper()
	library, err := simnode.New(nodeName)
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(library)
	if err != nil {
		t.Fatal(err)
	}
	config, err := configs.Parse("profile.yaml", []byte(profile), nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := shortdir.New(t)
	s := stage{root: hostRoot(t, nodeName, config.Startup.DevRoot, gpus), specs: filepath.Join(dir, "cdi"), dir: dir}
	if err := os.Mkdir(s.specs, 0o755); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	hostOptions := host.Options{
		Root: s.root, DevRoot: config.Startup.DevRoot, Capabilities: migcaps.NewReader(s.root), Logger: log, PrepareTimeout: await.Patience,
		Specs: cdi.NewWriter(cdi.Options{Dir: s.specs, Source: cdi.Simulated{}, Logger: log}),
	}
	node := host.New(hostOptions)
	s.nodes = host.New(hostOptions).Prepare(sharing.Grants{DeviceNodes: true}, gpus).Nodes
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: log})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = manager.Run(ctx) })
	running.Go(func() { _ = node.Watch(ctx, func() {}) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})

	s.plan = sharing.NewPlan(gpus, config.Profile)
	s.ready = node.Prepare(s.plan.Grants, gpus)
	if len(s.ready.Obstacles) > 0 {
		t.Fatalf("not to be granted: %v", s.ready.Obstacles)
	}
	manager.SetHost(s.ready)
	manager.Apply(s.plan)
	return s
}

// hosts has one file system for each kind of node. All tests share it, because nothing writes into it.
var hosts struct {
	sync.Mutex
	dir   string
	roots map[string]string
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "grants")
	if err != nil {
		panic(err)
	}
	hosts.dir, hosts.roots = dir, map[string]string{}
	m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(err)
	}
}

// hostRoot returns a file system with a driver's files; nvidia-modeset is not loaded.
func hostRoot(t *testing.T, nodeName, devRoot string, gpus []sharing.GPU) string {
	t.Helper()
	hosts.Lock()
	defer hosts.Unlock()
	kind := nodeName + " " + devRoot
	if root, made := hosts.roots[kind]; made {
		return root
	}
	root := filepath.Join(hosts.dir, fmt.Sprint(len(hosts.roots)))
	hosts.roots[kind] = root
	files := map[string]string{
		"/usr/local/nvidia/lib64/libcuda.so.1":      "driver",
		"/usr/local/nvidia/lib64/libnvidia-ml.so.1": "driver",
		"/proc/devices": "195 nvidia\n236 nvidia-caps\n",
	}
	nodes := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for _, g := range gpus {
		nodes = append(nodes, fmt.Sprintf("nvidia%d", g.Minor))
		for _, p := range g.Partitions {
			gi := firstMinor + (g.Minor*instances+p.GI)*(1+computes)
			nodes = append(nodes, fmt.Sprintf("nvidia-caps/nvidia-cap%d", gi), fmt.Sprintf("nvidia-caps/nvidia-cap%d", gi+1+p.CI))
			instance := fmt.Sprintf("%s/gpu%d/mig/gi%d", migcaps.Folder, g.Minor, p.GI)
			files[instance+"/access"] = fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\n", gi)
			files[fmt.Sprintf("%s/ci%d/access", instance, p.CI)] = fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\n", gi+1+p.CI)
		}
	}
	for _, node := range nodes {
		files[filepath.Join(devRoot, "dev", node)] = ""
	}
	for path, content := range files {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// An IMEX channel is a device; a link to one counts.
	channel := filepath.Join(root, devRoot, grant.IMEXNode("0"))
	if err := errors.Join(os.MkdirAll(filepath.Dir(channel), 0o755), os.Symlink("/dev/null", channel)); err != nil {
		t.Fatal(err)
	}
	return root
}

// The driver numbers the capabilities of each GPU's GPU instances in this order from firstMinor on, each
// with this many compute instances.
const (
	firstMinor = 3
	instances  = 15
	computes   = 8
)

// allocate requests devices of a resource, by their places in its list.
func (s stage) allocate(t *testing.T, resource string, places ...int) *api.ContainerAllocateResponse {
	t.Helper()
	request := &api.ContainerAllocateRequest{}
	for _, r := range s.plan.Resources {
		if r.Name == resource {
			for _, place := range places {
				request.DevicesIds = append(request.DevicesIds, r.Devices[place].ID)
			}
		}
	}
	// The socket comes a moment after Apply. A client that dialled before would back off.
	var sockets []string
	await.Until(t, "the socket of "+resource, func() (err error) {
		pattern := filepath.Join(s.dir, "virgate-"+strings.ReplaceAll(resource, "/", "_")+"-*.sock")
		if sockets, err = filepath.Glob(pattern); err == nil && len(sockets) != 1 {
			err = fmt.Errorf("there are %q", sockets)
		}
		return err
	})
	connection, err := grpc.NewClient("unix://"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	response, err := api.NewDevicePluginClient(connection).Allocate(t.Context(), &api.AllocateRequest{
		ContainerRequests: []*api.ContainerAllocateRequest{request},
	})
	if err != nil {
		t.Fatal(err)
	}
	return response.ContainerResponses[0]
}
