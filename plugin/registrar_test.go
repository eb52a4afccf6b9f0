package plugin_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestLostStreamIsRegisteredAgain(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	for range 5 {
		opened := b.kubelet.Snapshot().Resources[gpu].StreamsOpened
		b.kubelet.DropStream(gpu)
		b.await(func(k simkubelet.Snapshot) bool {
			return k.Resources[gpu].StreamsOpened > opened && k.Resources[gpu].Allocatable == 8
		})
	}
}

func TestKubeletRestart(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	b.mustPod("p", gpu, 2)
	for range 3 {
		if err := b.kubelet.Restart(b.ctx); err != nil {
			t.Fatal(err)
		}
		b.shows(gpu, 8, 8)
	}
}

func TestSocketDeleted(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	first := b.kubelet.Snapshot().Resources[gpu].Socket
	if err := os.Remove(filepath.Join(b.dir, filepath.Base(first))); err != nil {
		t.Fatal(err)
	}
	b.mustPod("p", gpu, 1) // The open stream does not need the file.
	b.kubelet.DropStream(gpu)
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[gpu]
		return r.Allocatable == 8 && r.Socket != first
	})
}

// TestSocketWipedWhileRegistering checks that the wiped socket ends a registration: the kubelet would dial the old
// path for 10 s. The first registration may take an hour here, so nothing else can end it.
func TestSocketWipedWhileRegistering(t *testing.T) {
	b := newBench(t, nil)
	b.kubelet.HangRegister(true)
	b.manager.Apply(plan(gpu, 1, 1))
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations == 1 })
	sockets, err := filepath.Glob(filepath.Join(b.dir, "virgate-*"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets %v, %v", sockets, err)
	}
	if err := os.Remove(sockets[0]); err != nil {
		t.Fatal(err)
	}
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations == 2 })
}

// TestSecondStreamStartsOver lets the kubelet connect to the socket twice.
func TestSecondStreamStartsOver(t *testing.T) {
	b := newBench(t, func(options *simkubelet.Options, _ *plugin.Options) { options.AllowOverlap = true })
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	first := b.kubelet.Snapshot().Resources[gpu].Socket
	connection, err := grpc.NewClient("unix:"+filepath.Join(b.dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	_, err = api.NewRegistrationClient(connection).Register(b.ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: filepath.Base(first), ResourceName: gpu,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.await(func(k simkubelet.Snapshot) bool {
		r := k.Resources[gpu]
		return r.Socket != first && r.Streams == 1 && r.Allocatable == 2 && r.Connected
	})
	b.mustPod("p", gpu, 1)
}

func TestKubeletRefuses(t *testing.T) {
	b := newBench(t, nil)
	b.kubelet.RefuseRegister(3)
	b.manager.Apply(plan(gpu, 1, 1))
	b.shows(gpu, 1, 1)
}

func TestKubeletAbsentAtStart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dp")
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler), Timing: plugin.Timing{StreamTimeout: time.Hour}})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = manager.Run(ctx) })
	manager.Apply(plan(gpu, 1, 2))
	kubelet := simkubelet.New(simkubelet.Options{Dir: dir})
	running.Go(func() { _ = kubelet.Run(ctx) })
	if err := kubelet.Await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Allocatable == 2 }); err != nil {
		t.Error(err)
	}
	if n := kubelet.Snapshot().Resources[gpu].Registrations; n != 1 {
		t.Errorf("%d registrations, want 1", n)
	}
}

// doubter does not see the kubelet serve one of its streams.
type doubter struct {
	direct
	// unseen is the number of that stream, from 1.
	unseen int
	// asked counts the questions while the resource was served.
	asked atomic.Int64
}

// Serving waits until the kubelet has read the stream's first list.
func (d *doubter) Serving(ctx context.Context, resource string) (bool, error) {
	var r simkubelet.Resource
	err := d.Await(ctx, func(k simkubelet.Snapshot) bool {
		r = k.Resources[resource]
		return !r.Connected || r.Allocatable > 0
	})
	if r.Connected {
		d.asked.Add(1)
	}
	return r.Connected && r.StreamsOpened != d.unseen, err
}

func TestIgnoredStreamIsReplaced(t *testing.T) {
	kubelet := &doubter{unseen: 1}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing.VerifyAfter = 20 * time.Millisecond
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	b.await(func(k simkubelet.Snapshot) bool {
		return k.Resources[gpu].StreamsOpened == 2 && k.Resources[gpu].Allocatable == 2
	})
	b.mustPod("p", gpu, 1)
}

// occupied shows another plugin's devices the first three times.
type occupied struct {
	direct
	asked int
	// registrations is their number at the last question.
	registrations int
}

func (o *occupied) Serving(_ context.Context, resource string) (bool, error) {
	o.asked++
	o.registrations = o.Snapshot().Resources[resource].Registrations
	return o.asked <= 3, nil
}

func TestRegistrationWaitsForTheBarrier(t *testing.T) {
	kubelet := &occupied{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) { options.Kubelet = kubelet })
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	b.stop()
	if kubelet.asked != 4 || kubelet.registrations != 0 {
		t.Errorf("asked %d times, and %d registrations before the last; want 4 and none", kubelet.asked, kubelet.registrations)
	}
}

// TestEachStreamIsVerified has the kubelet show the first stream's devices, but not the second's.
func TestEachStreamIsVerified(t *testing.T) {
	kubelet := &doubter{unseen: 2}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing.VerifyAfter = 20 * time.Millisecond
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	for kubelet.asked.Load() == 0 {
		if b.ctx.Err() != nil {
			t.Fatal("the first stream was not verified")
		}
		runtime.Gosched()
	}
	b.kubelet.DropStream(gpu)
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].StreamsOpened == 3 })
}

// listener is a kubelet that opens its stream, but whose answer to Register is lost, as if it came after the
// deadline.
type listener struct {
	api.UnimplementedRegistrationServer
	dir string
	// life ends the streams.
	life          context.Context
	registrations atomic.Int32
	lists         chan int
}

func (l *listener) Register(_ context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	l.registrations.Add(1)
	connection, err := grpc.NewClient("unix:"+filepath.Join(l.dir, request.Endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	context.AfterFunc(l.life, func() { _ = connection.Close() })
	stream, err := api.NewDevicePluginClient(connection).ListAndWatch(l.life, &api.Empty{})
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	l.lists <- len(first.Devices)
	go func() {
		for {
			list, err := stream.Recv()
			if err != nil {
				return
			}
			l.lists <- len(list.Devices)
		}
	}()
	return nil, errors.New("the answer is lost")
}

// Found by test/soak: a resource with a stream was registered a second time, which makes the kubelet drop one of
// the two.
func TestLostAnswerIsNotRegisteredAgain(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	heard := &listener{dir: dir, life: ctx, lists: make(chan int, 100)}
	socket, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	kubelet := grpc.NewServer()
	api.RegisterRegistrationServer(kubelet, heard)
	running.Go(func() { _ = kubelet.Serve(socket) })
	defer kubelet.Stop()
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	running.Go(func() { _ = manager.Run(ctx) })

	// Lists are 100 ms apart, and a first retry is sooner than three of them.
	for devices := 2; devices < 14; devices++ {
		manager.Apply(plan(gpu, 1, devices))
		for got := 0; got != devices; {
			select {
			case got = <-heard.lists:
			case <-ctx.Done():
				t.Fatalf("list of %d devices not received", devices)
			}
		}
	}
	if n := heard.registrations.Load(); n != 1 {
		t.Errorf("registered %d times beside an open stream, want once", n)
	}
}

// registry records the endpoints that register.
type registry struct {
	api.UnimplementedRegistrationServer
	endpoints chan string
}

func (r registry) Register(_ context.Context, request *api.RegisterRequest) (*api.Empty, error) {
	r.endpoints <- request.Endpoint
	return &api.Empty{}, nil
}

// TestKubeletSocketComesLast checks the moment at which a kubelet has removed all sockets but not yet created its
// own. A plugin that looks then already has a new socket but no kubelet to register with, and its socket is not
// removed again.
func TestKubeletSocketComesLast(t *testing.T) {
	dir := t.TempDir()
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler), Timing: plugin.Timing{StreamTimeout: time.Hour}})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = manager.Run(ctx) })
	manager.Apply(plan(gpu, 1, 2))

	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	var sockets []string
	// After some looks with a socket it has surely tried to register, and found no kubelet.
	for looks := 0; looks < 50; <-again.C {
		var err error
		if sockets, err = filepath.Glob(filepath.Join(dir, "virgate-*.sock")); err != nil || ctx.Err() != nil {
			t.Fatal(err, ctx.Err())
		}
		looks += len(sockets)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	kubelet, registered := grpc.NewServer(), registry{endpoints: make(chan string, 1)}
	api.RegisterRegistrationServer(kubelet, registered)
	running.Go(func() { _ = kubelet.Serve(listener) })
	defer kubelet.Stop()
	select {
	case endpoint := <-registered.endpoints:
		if want := filepath.Base(sockets[0]); endpoint != want {
			t.Errorf("registered %s, want the socket that was there, %s", endpoint, want)
		}
	case <-ctx.Done():
		t.Error("not registered")
	}
}

// TestSocketWipedAfterTheStreamEnded checks that the socket is watched when a later registration hangs, although it
// is not watched while a stream is open. Otherwise the kubelet would dial the wiped socket until the registration's
// deadline, an hour.
func TestSocketWipedAfterTheStreamEnded(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	first := b.kubelet.Snapshot().Resources[gpu]
	b.kubelet.HangRegister(true)
	b.kubelet.DropStream(gpu)
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations > first.Registrations })
	if err := os.Remove(filepath.Join(b.dir, filepath.Base(first.Socket))); err != nil {
		t.Fatal(err)
	}
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations > first.Registrations+1 })
}

// TestOpenStreamIsLeftAlone checks that a kubelet that has a stream is not disturbed: it needs neither socket file,
// and would drop the stream for a second registration.
func TestOpenStreamIsLeftAlone(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	if err := os.Remove(filepath.Join(b.dir, filepath.Base(b.kubelet.Snapshot().Resources[gpu].Socket))); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(filepath.Join(b.dir, "kubelet.sock"), time.Time{}, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(b.ctx, 500*time.Millisecond) // Nothing happens that could be awaited.
	defer cancel()
	if b.kubelet.Await(soon, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpu].Registrations > 1 || k.Resources[gpu].StreamsClosed > 0
	}) == nil {
		t.Error("a stream that is open was disturbed")
	}
	b.mustPod("p", gpu, 1)
}
