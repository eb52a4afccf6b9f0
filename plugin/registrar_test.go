package plugin_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
)

func TestLostStreamIsRegisteredAgain(t *testing.T) {
	b := newBench(t, nil)
	b.manager.Apply(plan(gpu, 2, 4))
	b.shows(gpu, 8, 8)
	for range 5 {
		opened := b.kubelet.Snapshot().Resources[gpu].StreamsOpened
		start := time.Now()
		b.kubelet.DropStream(gpu)
		b.await(func(k simkubelet.Snapshot) bool {
			return k.Resources[gpu].StreamsOpened > opened && k.Resources[gpu].Allocatable == 8
		})
		t.Logf("back after %s", time.Since(start))
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

// TestSocketWipedWhileRegistering: the kubelet would dial the old path for 10 s.
func TestSocketWipedWhileRegistering(t *testing.T) {
	b := newBench(t, nil)
	b.kubelet.SetSilent(true)
	b.manager.Apply(plan(gpu, 1, 1))
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations == 1 })
	sockets, err := filepath.Glob(filepath.Join(b.dir, "virgate-*"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets %v, %v", sockets, err)
	}
	if err := os.Remove(sockets[0]); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.ctx, 8*time.Second)
	defer cancel()
	if err := b.kubelet.Await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpu].Registrations == 2 }); err != nil {
		t.Error(err)
	}
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
	manager := plugin.NewManager(plugin.Options{Dir: dir, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
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

// doubter does not see what the kubelet serves the first few times.
type doubter struct {
	direct
	asked atomic.Int64
}

func (d *doubter) Serving(ctx context.Context, resource string) (bool, error) {
	serving, err := d.direct.Serving(ctx, resource)
	return serving && d.asked.Add(1) > 1, err
}

func TestIgnoredStreamIsReplaced(t *testing.T) {
	kubelet := &doubter{}
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

// occupied shows another plugin's devices until it is freed.
type occupied struct {
	direct
	asked atomic.Int64
	freed atomic.Bool
}

func (o *occupied) Serving(context.Context, string) (bool, error) {
	o.asked.Add(1)
	return !o.freed.Load(), nil
}

func TestRegistrationWaitsForTheBarrier(t *testing.T) {
	kubelet := &occupied{}
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing.VerifyAfter = time.Hour
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	for kubelet.asked.Load() < 3 {
		if b.ctx.Err() != nil {
			t.Fatal("the kubelet was not asked")
		}
		runtime.Gosched()
	}
	if n := b.kubelet.Snapshot().Resources[gpu].Registrations; n != 0 {
		t.Errorf("%d registrations before the barrier", n)
	}
	kubelet.freed.Store(true)
	b.shows(gpu, 2, 2)
}

// TestEachStreamIsVerified has the kubelet show the first stream's devices, and not
// those of the next.
func TestEachStreamIsVerified(t *testing.T) {
	kubelet := &occupied{}
	kubelet.freed.Store(true)
	b := newBench(t, func(_ *simkubelet.Options, options *plugin.Options) {
		options.Kubelet = kubelet
		options.Timing.VerifyAfter = time.Second
	})
	kubelet.direct = direct{b.kubelet}
	b.manager.Apply(plan(gpu, 1, 2))
	b.shows(gpu, 2, 2)
	kubelet.freed.Store(false)
	for asked := kubelet.asked.Load(); kubelet.asked.Load() == asked; runtime.Gosched() {
		if b.ctx.Err() != nil {
			t.Fatal("the first stream was not verified")
		}
	}
	kubelet.freed.Store(true)
	b.kubelet.DropStream(gpu)
	b.await(func(k simkubelet.Snapshot) bool { return k.Resources[gpu].StreamsOpened == 3 })
}
