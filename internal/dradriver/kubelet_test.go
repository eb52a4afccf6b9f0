package dradriver

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/test/await"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// fakeClaims are a table of claims.
type fakeClaims struct {
	prepare   func(context.Context, dra.Claim) ([][]string, error)
	unprepare func(uid string) error

	mutex   sync.Mutex
	devices []dra.DeviceHealth
	changed chan struct{}
}

func (f *fakeClaims) Prepare(ctx context.Context, claim dra.Claim) ([][]string, error) {
	return f.prepare(ctx, claim)
}

func (f *fakeClaims) Unprepare(claim dra.Claim) error {
	return f.unprepare(claim.UID)
}

func (f *fakeClaims) Devices() ([]dra.DeviceHealth, <-chan struct{}) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.devices, f.changed
}

func (f *fakeClaims) set(devices ...dra.DeviceHealth) {
	_, _ = f.Devices()
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.devices = devices
	close(f.changed)
	f.changed = make(chan struct{})
}

// dial connects as the kubelet does.
func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// register handles a new socket in the registry like the kubelet, and returns where the driver serves.
func register(t *testing.T, registry, socket string) *registration.PluginInfo {
	t.Helper()
	client := registration.NewRegistrationClient(dial(t, filepath.Join(registry, socket)))
	info, err := client.GetInfo(t.Context(), &registration.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	return info
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	await.True(t, what, condition)
}

func allocated(uid string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{TypeMeta: metav1.TypeMeta{Kind: "ResourceClaim", APIVersion: resourceapi.SchemeGroupVersion.String()}}
	claim.Namespace, claim.Name, claim.UID = "ns", "name-"+uid, types.UID(uid)
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	return claim
}

func TestPrepare(t *testing.T) {
	f := newFakeAPI(t)
	const path = "ns/name-"
	f.Claims[path+"1"] = allocated("1",
		resourceapi.DeviceRequestAllocationResult{
			Request: "a", Driver: driverName, Pool: poolName, Device: "gpu-1-ts", ShareID: new(types.UID("share")),
			ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("2"), "memory": resource.MustParse("1Gi")},
		},
		resourceapi.DeviceRequestAllocationResult{Request: "b/large", Driver: driverName, Pool: poolName, Device: "gpu-2", AdminAccess: new(true)},
		resourceapi.DeviceRequestAllocationResult{Request: "net", Driver: "nic.example.com", Pool: poolName, Device: "d"},
		resourceapi.DeviceRequestAllocationResult{Request: "far", Driver: driverName, Pool: "n2/" + driverName, Device: "gpu-1"},
	)
	for _, driver := range []string{driverName, "nic.example.com"} {
		config := resourceapi.DeviceAllocationConfiguration{}
		config.Opaque = &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: apiruntime.RawExtension{Raw: []byte(`{"for": "` + driver + `"}`)}}
		devices := &f.Claims[path+"1"].Status.Allocation.Devices
		devices.Config = append(devices.Config, config)
	}
	f.Claims[path+"2"] = allocated("2")
	f.Claims[path+"3"] = allocated("3")
	f.Claims[path+"3"].UID = "other"
	f.Claims[path+"4"] = allocated("4")
	f.Claims[path+"4"].Status.Allocation = nil
	want := dra.Claim{UID: "1", Namespace: "ns", Name: "name-1", Configs: [][]byte{[]byte(`{"for":"` + driverName + `"}`)}, Results: []dra.Result{
		{Request: "a", Device: "gpu-1-ts", ShareID: "share", Shares: 2},
		{Request: "b/large", Device: "gpu-2", Admin: true},
	}}
	// Claims are prepared concurrently: each waits for the other.
	var both sync.WaitGroup
	both.Add(2)
	claims := &fakeClaims{
		prepare: func(_ context.Context, claim dra.Claim) ([][]string, error) {
			both.Done()
			met := make(chan struct{})
			go func() { both.Wait(); close(met) }()
			select {
			case <-met:
			case <-patience():
				t.Error("claims are not prepared side by side")
			}
			if claim.UID != "1" {
				return nil, errors.New("pod x has the GPU")
			}
			if diff := cmp.Diff(want, claim); diff != "" {
				t.Errorf("claim (-want +got):\n%s", diff)
			}
			return [][]string{{"k/gpu=gpu-1-ts"}, {"k/gpu=gpu-2"}}, nil
		},
		unprepare: func(uid string) error {
			if uid == "2" {
				return errors.New("state not written")
			}
			return nil
		},
	}
	registry, dir := t.TempDir(), filepath.Join(t.TempDir(), "plugins", driverName)
	var mutex sync.Mutex
	var observed []string
	observe := func(call Call, took time.Duration, err error) {
		mutex.Lock()
		defer mutex.Unlock()
		if took <= 0 {
			t.Errorf("%s took %s", call, took)
		}
		observed = append(observed, string(call)+" "+text(err))
	}
	d, _ := run(t, Options{Config: f.Config(), Claims: claims, Dir: dir, RegistryDir: registry, PodUID: "pod", Observe: observe})
	info := register(t, registry, driverName+"-pod-reg.sock")
	if want := (&registration.PluginInfo{
		Type: "DRAPlugin", Name: driverName, Endpoint: filepath.Join(dir, "dra-pod.sock"), SupportedVersions: []string{"v1.DRAPlugin", "v1alpha1.DRAResourceHealth"},
	}); !cmp.Equal(want, info, protocmp.Transform()) {
		t.Errorf("registered as %v", info)
	}
	eventually(t, "registered", func() bool { return d.State().Registered })

	kubelet := drapb.NewDRAPluginClient(dial(t, info.Endpoint))
	asked := func(uids ...string) (all []*drapb.Claim) {
		for _, uid := range uids {
			all = append(all, &drapb.Claim{Namespace: "ns", Uid: uid, Name: "name-" + uid})
		}
		return all
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	prepared, err := kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: asked("1", "2", "3", "4", "5")})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]*drapb.NodePrepareResourceResponse{
		"1": {Devices: []*drapb.Device{
			{RequestNames: []string{"a"}, PoolName: poolName, DeviceName: "gpu-1-ts", CdiDeviceIds: []string{"k/gpu=gpu-1-ts"}, ShareId: new("share")},
			{RequestNames: []string{"b"}, PoolName: poolName, DeviceName: "gpu-2", CdiDeviceIds: []string{"k/gpu=gpu-2"}},
		}},
		"2": {Error: "pod x has the GPU"},
		"3": {Error: "claim ns/name-3 is another one now"},
		"4": {Error: "claim ns/name-4 is not allocated"},
		"5": {Error: "read claim ns/name-5: refused by the simulation"},
	}, prepared.Claims, protocmp.Transform()); diff != "" {
		t.Errorf("prepared (-want +got):\n%s", diff)
	}
	unprepared, err := kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: asked("1", "2")})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]*drapb.NodeUnprepareResourceResponse{"1": {}, "2": {Error: "state not written"}}, unprepared.Claims, protocmp.Transform()); diff != "" {
		t.Errorf("unprepared (-want +got):\n%s", diff)
	}
	mutex.Lock()
	defer mutex.Unlock()
	slices.Sort(observed)
	if diff := cmp.Diff([]string{
		"prepare ", "prepare claim ns/name-3 is another one now", "prepare claim ns/name-4 is not allocated", "prepare pod x has the GPU", "prepare read claim ns/name-5: refused by the simulation",
		"unprepare ", "unprepare state not written",
	}, observed); diff != "" {
		t.Errorf("observed (-want +got):\n%s", diff)
	}
}

func TestHealth(t *testing.T) {
	f := newFakeAPI(t)
	claims := &fakeClaims{}
	since := time.Unix(1_800_000_000, 0)
	good := dra.DeviceHealth{Device: "gpu-1", Healthy: true, Since: since}
	claims.set(good)
	registry := t.TempDir()
	_, stop := run(t, Options{Config: f.Config(), Claims: claims, Dir: t.TempDir(), RegistryDir: registry})
	info := register(t, registry, driverName+"-reg.sock")
	stream, err := drahealth.NewDRAResourceHealthClient(dial(t, info.Endpoint)).NodeWatchResources(t.Context(), &drahealth.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	receive := func() []*drahealth.DeviceHealth {
		t.Helper()
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return response.Devices
	}
	device := func(health drahealth.HealthStatus, message string) []*drahealth.DeviceHealth {
		return []*drahealth.DeviceHealth{{
			Device: &drahealth.DeviceIdentifier{PoolName: poolName, DeviceName: "gpu-1"}, Health: health, Message: message, LastUpdatedTime: since.Unix(),
		}}
	}
	for range 3 { // Again and again, because the kubelet forgets.
		if diff := cmp.Diff(device(drahealth.HealthStatus_HEALTHY, ""), receive(), protocmp.Transform()); diff != "" {
			t.Errorf("health (-want +got):\n%s", diff)
		}
	}
	bad := good
	bad.Healthy, bad.Reason = false, "XID 79"
	claims.set(bad)
	want := device(drahealth.HealthStatus_UNHEALTHY, "XID 79")
	late := patience()
	for !cmp.Equal(want, receive(), protocmp.Transform()) {
		select {
		case <-late:
			t.Fatal("the fault is never told")
		default:
		}
	}
	stop()
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("the stream ends with %v", err)
	}
}

// TestFaultAtOnce checks that a change does not wait for the next repetition.
func TestFaultAtOnce(t *testing.T) {
	f := newFakeAPI(t)
	claims := &fakeClaims{}
	claims.set()
	d, err := New(Options{Driver: driverName, Node: nodeName, Config: f.Config(), Claims: claims, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	d.timing.beat = 24 * time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	stream := &healthStream{ctx: ctx, sent: make(chan int)}
	ended := make(chan error, 1)
	go func() { ended <- (&health{driver: d}).NodeWatchResources(nil, stream) }()
	if n := <-stream.sent; n != 0 {
		t.Errorf("%d devices at first", n)
	}
	claims.set(dra.DeviceHealth{}, dra.DeviceHealth{})
	if n := <-stream.sent; n != 2 {
		t.Errorf("%d devices after the change", n)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

type healthStream struct {
	grpc.ServerStream
	ctx  context.Context
	sent chan int
}

func (s *healthStream) Context() context.Context { return s.ctx }

func (s *healthStream) Send(response *drahealth.NodeWatchResourcesResponse) error {
	s.sent <- len(response.Devices)
	return nil
}

// TestSockets checks the sockets of dead pods, of other programs, and the driver's own.
func TestSockets(t *testing.T) {
	f := newFakeAPI(t)
	registry, dir := t.TempDir(), t.TempDir()
	exists := func(path string) bool { _, err := os.Lstat(path); return err == nil }
	// A killed pod has left its sockets; another driver's must stay.
	dead := []string{filepath.Join(dir, "dra-dead.sock"), filepath.Join(registry, driverName+"-dead-reg.sock")}
	other := filepath.Join(registry, "nic.example.com-reg.sock")
	for _, path := range append(dead, other) {
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		listener.(*net.UnixListener).SetUnlinkOnClose(false)
		_ = listener.Close()
	}
	// Another program has the driver's name, and serves.
	living, err := net.Listen("unix", filepath.Join(registry, driverName+"-reg.sock"))
	if err != nil {
		t.Fatal(err)
	}
	d, stop := run(t, Options{Config: f.Config(), Claims: &fakeClaims{}, Dir: dir, RegistryDir: registry, PodUID: "pod"})
	eventually(t, "refused", func() bool {
		return strings.HasPrefix(problem(d), "another program serves this driver's name at "+registry)
	})
	ours := []string{filepath.Join(dir, "dra-pod.sock"), filepath.Join(registry, driverName+"-pod-reg.sock")}
	if exists(ours[0]) || exists(ours[1]) {
		t.Error("it serves beside another program")
	}
	_ = living.Close()
	register(t, registry, filepath.Base(ours[1]))
	if exists(dead[0]) || exists(dead[1]) || !exists(other) {
		t.Error("other sockets are not as they should be")
	}
	eventually(t, "registered", func() bool { return d.State().Registered })

	for _, socket := range ours { // Someone clears the directory.
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		eventually(t, "made anew", func() bool { return exists(ours[0]) && exists(ours[1]) })
		if d.State().Registered {
			t.Error("it has not been registered since")
		}
		register(t, registry, filepath.Base(ours[1]))
	}
	eventually(t, "registered", func() bool { return d.State().Registered && problem(d) == "" })
	if _, err := registration.NewRegistrationClient(dial(t, ours[1])).NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{Error: "too old"}); err != nil {
		t.Fatal(err)
	}
	if s := d.State(); s.Registered || problem(d) != "the kubelet refuses: too old" {
		t.Errorf("status: %+v", s)
	}
	stop()
	if exists(ours[0]) || exists(ours[1]) {
		t.Error("it leaves its sockets")
	}
}

// TestEnd checks that no call is in progress once Run has returned: a call is cancelled and waited for, the
// kubelet tries again, and a successor serves.
func TestEnd(t *testing.T) {
	f := newFakeAPI(t)
	f.Claims["ns/name-1"] = allocated("1")
	begun, letGo, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	claims := &fakeClaims{prepare: func(ctx context.Context, _ dra.Claim) ([][]string, error) {
		close(begun)
		<-ctx.Done()
		<-letGo
		close(ended)
		return nil, ctx.Err()
	}}
	registry, dir := t.TempDir(), t.TempDir()
	d, stop := run(t, Options{Config: f.Config(), Claims: claims, Dir: dir, RegistryDir: registry, PodUID: "old"})
	d.Publish(pool("a"))
	f.watched()
	old := dial(t, register(t, registry, driverName+"-old-reg.sock").Endpoint)
	if _, err := drahealth.NewDRAResourceHealthClient(old).NodeWatchResources(t.Context(), &drahealth.NodeWatchResourcesRequest{}); err != nil {
		t.Fatal(err)
	}
	request := &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "ns", Name: "name-1", Uid: "1"}}}
	answered := make(chan error, 1)
	go func() {
		_, err := drapb.NewDRAPluginClient(old).NodePrepareResources(context.Background(), request)
		answered <- err
	}()
	<-begun
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }()
	if err := <-answered; status.Code(err) != codes.Unavailable {
		t.Errorf("the call ends with %v", err)
	}
	// The connection is closed. The server either waits for the call now, or did not wait.
	await.Until(t, "the server waits for the call", func() error {
		select {
		case <-stopped:
			return await.Never("a call is under way after the end")
		default:
		}
		stacks := make([]byte, 1<<20)
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(stack, "sync.(*WaitGroup).Wait") && strings.Contains(stack, "grpc.(*Server).stop") {
				return nil
			}
		}
		return errors.New("it does not wait")
	})
	close(letGo)
	<-stopped
	<-ended
	if _, err := drapb.NewDRAPluginClient(old).NodePrepareResources(t.Context(), request); status.Code(err) != codes.Unavailable {
		t.Errorf("a call after the end: %v", err)
	}
	var left string
	eventually(t, "nothing left", func() bool {
		stacks := make([]byte, 1<<20)
		left = string(stacks[:runtime.Stack(stacks, true)])
		return !strings.Contains(left, "dradriver.(*Driver)") && !strings.Contains(left, "dradriver.(*health)") &&
			!strings.Contains(left, "grpc.(*Server).") && !strings.Contains(left, "watch.(*StreamWatcher)")
	})
	f.wrote()

	successor := &fakeClaims{prepare: func(context.Context, dra.Claim) ([][]string, error) { return nil, nil }}
	d, _ = run(t, Options{Config: f.Config(), Claims: successor, Dir: dir, RegistryDir: registry, PodUID: "new"})
	d.Publish(pool("a"))
	info := register(t, registry, driverName+"-new-reg.sock")
	if _, err := drapb.NewDRAPluginClient(dial(t, info.Endpoint)).NodePrepareResources(t.Context(), request); err != nil {
		t.Error(err)
	}
	f.watched()
	if wrote := f.wrote(); wrote != nil {
		t.Errorf("the successor wrote %q", wrote)
	}
}
