// Package mps_test runs the whole program with GPUs that are shared by MPS: virgate run, virgate mps with
// the stand-in for NVIDIA's daemon, a simulated node and a simulated kubelet.
package mps_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simmps"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
)

const (
	patience = await.Patience

	byMPS     = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	bySlices  = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n"
	exclusive = "version: v1\n"
)

type world struct {
	t       *testing.T
	dir     string
	uuid    string
	node    *simnode.Node
	kubelet *simkubelet.Kubelet
	look    chan os.Signal
	modes   *nvml.Node
	control *simmps.InProcess
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := shortdir.New(t)
	node, err := simnode.New("t4")
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := nvml.Scan(node)
	if err != nil {
		t.Fatal(err)
	}
	// Servers of any user must be able to enter both.
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "mps"), 0o755)); err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, dir: dir, uuid: gpus[0].UUID, node: node, look: make(chan os.Signal, 1),
		modes:   nvml.NewNode(nvml.WithDeadlines(node, nvml.Limits{}), nvml.Options{}),
		control: &simmps.InProcess{Servers: node.MPS()},
		kubelet: simkubelet.New(simkubelet.Options{Dir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"), StopGrace: time.Millisecond, StatusPeriod: 50 * time.Millisecond}),
	}
	w.start(w.kubelet.Run)
	t.Cleanup(func() {
		for _, violation := range w.kubelet.Violations() {
			t.Errorf("the kubelet's contract is broken: %s", violation)
		}
	})
	return w
}

// start calls run until stop or the end of the test.
func (w *world) start(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := run(ctx); err != nil && ctx.Err() == nil {
			w.t.Errorf("it ends: %v", err)
		}
	})
	stop = func() {
		cancel()
		running.Wait()
	}
	w.t.Cleanup(stop)
	return stop
}

func (w *world) log() *slog.Logger { return slog.New(slog.NewTextHandler(w.t.Output(), nil)) }

// run starts virgate run.
func (w *world) run() (stop func()) {
	return w.start(func(ctx context.Context) error {
		return daemon.Run(ctx, daemon.Options{
			GPUs: func(configs.StartupSettings) (daemon.GPUs, error) { return daemon.Simulated(w.node, w.node), nil },
			Profile: daemon.ProfileOptions{
				Path: filepath.Join(w.dir, "profile.yaml"), Overrides: configs.Overrides{"flags.mpsRoot": {Value: "/run/nvidia/mps", Source: "test"}},
			},
			PluginDir: w.dir, PodResourcesSocket: filepath.Join(w.dir, "pr.sock"), MPSSocket: filepath.Join(w.root(), mps.SocketName),
			Timing:   plugin.Timing{RemovalDelay: 40 * time.Millisecond, StopAfter: 20 * time.Millisecond, ListInterval: time.Millisecond},
			HostRoot: w.dir, CDIDir: filepath.Join(w.dir, "cdi"), HostInterval: 20 * time.Millisecond, CDIRetry: 20 * time.Millisecond,
			Settings: agent.Settings{SampleInterval: 50 * time.Millisecond, Reload: w.look, Logger: w.log(), Version: "test"},
		})
	})
}

// supervise starts virgate mps.
func (w *world) supervise() (stop func()) {
	return w.start(func(ctx context.Context) error {
		return mps.Run(ctx, mps.Options{
			Root: w.root(), Control: w.control, Logger: w.log(), SetComputeMode: w.modes.SetComputeMode,
			ComputeMode: func(ctx context.Context, gpu string) (sharing.ComputeMode, error) {
				mode, _, err := w.modes.ComputeMode(ctx, gpu)
				return mode, err
			},
			Timing: mps.Timing{
				Ask: 20 * time.Millisecond, Answer: 2 * time.Second, Start: patience, Stop: time.Second,
				Pause: time.Millisecond, MaxPause: 20 * time.Millisecond, FirstWish: patience,
			},
		})
	})
}

// profile replaces the profile by a rename, as a mounted ConfigMap does.
func (w *world) profile(text string) {
	w.t.Helper()
	path := filepath.Join(w.dir, "profile.yaml")
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		w.t.Fatal(err)
	}
	select {
	case w.look <- syscall.SIGHUP:
	default:
	}
}

// shows waits until the kubelet can grant exactly this many devices of nvidia.com/gpu.
func (w *world) shows(allocatable int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	if err := w.kubelet.Await(ctx, func(s simkubelet.Snapshot) bool {
		return s.Resources["nvidia.com/gpu"].Allocatable == allocatable
	}); err != nil {
		w.t.Fatal(err)
	}
}

// mode waits for the GPU's compute mode.
func (w *world) mode(want sharing.ComputeMode) {
	w.t.Helper()
	await.Until(w.t, "the compute mode", func() error {
		mode, _, err := w.modes.ComputeMode(w.t.Context(), w.uuid)
		if err == nil && mode != want {
			err = fmt.Errorf("compute mode %s, want %s", mode, want)
		}
		return err
	})
}

// root is the directory of MPS, outside the kubelet's, in which virgate run removes sockets.
func (w *world) root() string { return filepath.Join(w.dir, "mps") }

func (w *world) pipe() string { return filepath.Join(w.root(), w.uuid, "pipe") }

func (w *world) fault(text string) {
	w.t.Helper()
	path := filepath.Join(w.root(), w.uuid, "log", "fault")
	err := os.WriteFile(path, []byte(text), 0o600)
	if text == "" {
		err = os.Remove(path)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) pod(name string) {
	w.t.Helper()
	_, err := w.kubelet.AddPod(w.t.Context(), simkubelet.Pod{Namespace: "ns", Name: name, Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{"nvidia.com/gpu": 1}}}})
	if err != nil {
		w.t.Fatal(err)
	}
}

// connect has the pod's program start to compute.
func (w *world) connect(pid int) *simmps.Client {
	w.t.Helper()
	client, err := simmps.Connect(w.t.Context(), w.pipe(), pid)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = client.Close() })
	return client
}

// TestSwitches changes the sharing mode of a GPU back and forth. Its daemon and the compute mode change
// with it, and wait for programs that compute.
func TestSwitches(t *testing.T) {
	w := newWorld(t)
	w.profile(exclusive)
	w.run()
	w.supervise()
	w.shows(1)
	w.profile(byMPS)
	w.shows(4)
	w.mode(sharing.ExclusiveProcess)

	w.pod("one")
	client := w.connect(100)
	if client.Percentage != 25 {
		t.Errorf("the client has %+v, want a quarter", client)
	}
	if err := w.node.AddProcess(0, simnode.WholeGPU, 7, 0); err == nil {
		t.Error("a process that is no client computes on the GPU")
	}
	w.profile(bySlices) // This waits for the pod: no share of the new kind.
	w.shows(0)
	w.mode(sharing.ExclusiveProcess)
	_ = client.Close()
	if err := w.kubelet.DeletePod("ns", "one"); err != nil {
		t.Fatal(err)
	}
	w.shows(3)
	w.mode(sharing.DefaultComputeMode)
	if _, err := os.Stat(w.pipe()); err == nil {
		t.Error("the daemon's directory is there still")
	}

	if err := w.node.AddProcess(0, simnode.WholeGPU, 8, 0); err != nil { // A program computes.
		t.Fatal(err)
	}
	w.profile(byMPS)
	w.shows(0)
	w.mode(sharing.DefaultComputeMode)
	if err := w.node.RemoveProcess(0, simnode.WholeGPU, 8); err != nil {
		t.Fatal(err)
	}
	w.shows(4)
	w.mode(sharing.ExclusiveProcess)
	w.profile(exclusive)
	w.shows(1)
	w.mode(sharing.DefaultComputeMode)
}

// TestDaemonFaults checks that no pod gets a share while the daemon does not serve, and that all shares
// come back.
func TestDaemonFaults(t *testing.T) {
	for _, fault := range []string{"die", "hang"} {
		t.Run(fault, func(t *testing.T) {
			w := newWorld(t)
			w.profile(byMPS)
			w.run()
			w.supervise()
			w.shows(4)
			w.fault(fault)
			w.shows(0)
			w.mode(sharing.ExclusiveProcess)
			w.fault("")
			w.shows(4)
		})
	}
}

// TestRestarts checks that a new virgate run finds the daemon that the old one left, with its clients, and
// that virgate mps restarts it.
func TestRestarts(t *testing.T) {
	w := newWorld(t)
	w.profile(byMPS)
	stopRun, stopMPS := w.run(), w.supervise()
	w.shows(4)
	w.pod("one")
	client := w.connect(100)
	stopRun() // In this simulation nothing else keeps the GPU's state.
	w.run()
	w.shows(4)
	w.mode(sharing.ExclusiveProcess)
	if next := w.connect(101); next.Server != client.Server {
		t.Errorf("another server %d, was %d", next.Server, client.Server)
	}
	stopMPS()
	w.shows(0)
	w.mode(sharing.DefaultComputeMode)
	w.supervise()
	w.shows(4)
	w.mode(sharing.ExclusiveProcess)
}
