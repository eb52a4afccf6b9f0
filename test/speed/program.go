package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/test/program"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// patience is how long a condition may take to come true.
const patience = 30 * time.Second

// process is one virgate run.
type process struct {
	*program.Process
	command *exec.Cmd
	// began is the time just before it was started.
	began time.Time
}

// launch starts the program and returns at once.
func launch(ctx context.Context, binary string, arguments ...string) (*process, error) {
	p := &process{command: exec.CommandContext(ctx, binary, arguments...), began: time.Now()}
	var err error
	if p.Process, err = program.Start(p.command); err != nil {
		return nil, fmt.Errorf("launch virgate: %w", err)
	}
	return p, nil
}

// stop ends the process as its DaemonSet does, and returns when it has ended.
func (p *process) stop() error {
	if err := p.Terminate(); err != nil {
		return fmt.Errorf("virgate ended: %w\n%s", err, p.Output())
	}
	return nil
}

// get returns the process's answer for a path.
func (p *process) get(path string) (string, error) {
	address, err := p.Address()
	if err != nil {
		return "", err
	}
	answer, err := http.Get("http://" + address + path)
	if err != nil {
		return "", fmt.Errorf("ask virgate: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", path, answer.Status)
	}
	if err != nil {
		return "", fmt.Errorf("ask virgate: %w", err)
	}
	return string(body), nil
}

// series returns the value of a series of /metrics without labels.
func (p *process) series(name string) (float64, error) {
	text, err := p.get("/metrics")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("/metrics has no %s", name)
}

// plugin is a second connection to the plugin's socket, beside the kubelet's, with the calls that
// are compared.
type plugin struct {
	api.DevicePluginClient
	close func()
	// devices are all devices that the kubelet has.
	devices []string
}

// dial connects to the socket that was registered last.
func (s *stage) dial() (plugin, error) {
	known := s.kubelet.Snapshot().Resources[resource]
	socket := filepath.Join(s.plugins(), filepath.Base(known.Socket))
	connection, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return plugin{}, fmt.Errorf("connect to %s: %w", socket, err)
	}
	p := plugin{DevicePluginClient: api.NewDevicePluginClient(connection), close: func() { _ = connection.Close() }}
	for _, device := range known.Devices {
		p.devices = append(p.devices, device.ID)
	}
	return p, nil
}

// empty is a call that the plugin answers without doing anything.
func (p plugin) empty(ctx context.Context) error {
	_, err := p.GetDevicePluginOptions(ctx, &api.Empty{})
	return err
}

// allocate calls Allocate for the i-th container, with one device.
func (p plugin) allocate(ctx context.Context, i int) error {
	id := p.devices[i%len(p.devices)]
	_, err := p.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
	return err
}

// prefer requests size of all devices. With 0 there is nothing to choose, so that the plugin only
// decodes the request.
func (p plugin) prefer(ctx context.Context, size int32) error {
	answer, err := p.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{
		ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: p.devices, AllocationSize: size}},
	})
	if err != nil {
		return err
	}
	if chosen := len(answer.ContainerResponses[0].DeviceIDs); chosen != int(size) {
		return fmt.Errorf("%d devices were preferred, want %d", chosen, size)
	}
	return nil
}

// resource is the resource of the simulated node.
const resource = "nvidia.com/gpu"

// gpus is the number of GPUs of the simulated node.
const gpus = 8

// stage is a simulated kubelet in this process and a folder that a virgate
// process shares with it.
type stage struct {
	binary  string
	dir     string
	kubelet *simkubelet.Kubelet
	// lists has the number of devices that the last list lets the kubelet allocate, until it is
	// received.
	lists chan int
	stop  func()
}

// newStage starts the kubelet.
func newStage(ctx context.Context, binary string) (*stage, error) {
	dir, err := os.MkdirTemp("", "vs") // A socket's path must be short.
	if err != nil {
		return nil, fmt.Errorf("set the stage: %w", err)
	}
	s := &stage{binary: binary, dir: dir, lists: make(chan int, 1)}
	s.kubelet = simkubelet.New(simkubelet.Options{Dir: s.plugins(), PodResourcesSocket: s.path("pr.sock"), OnEvent: s.witness})
	if err := s.kubelet.Start(ctx); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	serving, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = s.kubelet.Run(serving) })
	s.stop = func() {
		stop()
		running.Wait()
		_ = os.RemoveAll(dir)
	}
	return s, nil
}

// unpack makes the stage run a copy of the program that is written in small pieces, like an image
// that is unpacked on a node: Linux maps a file in the pieces in which it was written.
func (s *stage) unpack() error {
	from, err := os.Open(s.binary)
	if err != nil {
		return fmt.Errorf("copy the program: %w", err)
	}
	defer func() { _ = from.Close() }()
	s.binary = s.path("virgate")
	to, err := os.OpenFile(s.binary, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o700)
	if err != nil {
		return fmt.Errorf("copy the program: %w", err)
	}
	_, err = io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from})
	if err := errors.Join(err, to.Close()); err != nil {
		return fmt.Errorf("copy the program: %w", err)
	}
	return nil
}

func (s *stage) path(name string) string { return filepath.Join(s.dir, name) }
func (s *stage) plugins() string         { return s.path("dp") }

// share replaces the profile by one with that many devices in all.
func (s *stage) share(devices int) error {
	next := s.path("next.yaml")
	if err := os.WriteFile(next, profile(devices), 0o600); err != nil {
		return fmt.Errorf("write the profile: %w", err)
	}
	if err := os.Rename(next, s.path("profile.yaml")); err != nil {
		return fmt.Errorf("write the profile: %w", err)
	}
	return nil
}

// profile returns a profile with that many devices on all GPUs together.
func profile(devices int) []byte {
	return fmt.Appendf(nil, "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: %s, replicas: %d}\n", resource, devices/gpus)
}

// run starts virgate with the standard flags and more; configured has the flag for the profile of
// share.
func (s *stage) run(ctx context.Context, more ...string) (*process, error) {
	return launch(ctx, s.binary, append([]string{
		"run", "--node", "sim:dgx-a100", "--device-plugin-dir", s.plugins(), "--pod-resources-socket", s.path("pr.sock"),
		"--control-socket", s.path("control.sock"), "--listen", "127.0.0.1:0",
	}, more...)...)
}

// configured returns the flag for the profile of share.
func (s *stage) configured() []string { return []string{"--config", s.path("profile.yaml")} }

// witness stores what the newest list contains.
func (s *stage) witness(event simkubelet.Event) {
	if event.Kind != simkubelet.ListReceived {
		return
	}
	healthy := 0
	for _, d := range event.Devices {
		if d.Healthy {
			healthy++
		}
	}
	select {
	case <-s.lists: // The previous one was not received.
	default:
	}
	s.lists <- healthy
}

// shows waits for a list with which the kubelet can allocate that many devices. What the simulated
// kubelet does with the list afterwards, its checks and its checkpoint, is not measured.
func (s *stage) shows(ctx context.Context, allocatable int) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	last := -1
	for last != allocatable {
		select {
		case last = <-s.lists:
		case <-ctx.Done():
			return fmt.Errorf("await a list of %d devices, the last has %d: %w", allocatable, last, ctx.Err())
		}
	}
	return nil
}

// forget removes what an earlier virgate left in the folder.
func (s *stage) forget(ctx context.Context) error {
	if err := s.kubelet.Stop(ctx); err != nil {
		return err
	}
	if err := os.RemoveAll(s.plugins()); err != nil {
		return fmt.Errorf("clear the stage: %w", err)
	}
	return s.kubelet.Start(ctx)
}

const (
	nodeName                 = "node-1"
	namespace, configMapName = "gpu", "profiles"
)

// apiServer answers like the API server of a cluster in which nothing changes: over TLS and HTTP/2,
// in protobuf, with watches that stay open. It accepts writes and forgets them.
type apiServer struct {
	*httptest.Server
	encoder runtime.Encoder
	// documents are the entries of the ConfigMap.
	documents map[string]string
}

func newAPIServer(documents map[string]string) (*apiServer, error) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("make an API server: %w", err)
	}
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		return nil, fmt.Errorf("make an API server: %w", err)
	}
	s := &apiServer{encoder: protobuf.NewSerializer(scheme, scheme), documents: documents}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/nodes", s.follow(s.node))
	mux.HandleFunc("GET /api/v1/namespaces/"+namespace+"/configmaps", s.follow(s.configMaps))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Node", "apiVersion": "v1", "metadata": map[string]any{"name": nodeName}})
	})
	s.Server = httptest.NewUnstartedServer(mux)
	s.EnableHTTP2 = true
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	return s, nil
}

// follow answers a list; it answers a watch with nothing until the client disconnects.
func (s *apiServer) follow(list func() runtime.Object) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			_ = s.encoder.Encode(list(), w)
			return
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func (s *apiServer) node() runtime.Object {
	return &metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		Items: []metav1.PartialObjectMetadata{{
			TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
			ObjectMeta: metav1.ObjectMeta{
				Name: nodeName, UID: "00000000-0000-4000-8000-000000000001", ResourceVersion: "1",
				Labels: map[string]string{"nvidia.com/device-plugin.config": "shared"},
			},
		}},
	}
}

func (s *apiServer) configMaps() runtime.Object {
	return &corev1.ConfigMapList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMapList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "1"},
		Items: []corev1.ConfigMap{{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: configMapName, ResourceVersion: "1"},
			Data:       s.documents,
		}},
	}
}

// kubeconfig writes a kubeconfig file for the server.
func (s *apiServer) kubeconfig(path string) error {
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: speed
clusters: [{name: speed, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: speed, user: {token: speed}}]
contexts: [{name: speed, context: {cluster: speed, user: speed}}]
`, s.URL, base64.StdEncoding.EncodeToString(authority))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	return nil
}
