package simkubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// reregister serves a removed socket again and registers.
func (p *devicePlugin) reregister(list ...*api.Device) {
	p.rig.t.Helper()
	p.server.Stop()
	p.listen()
	if err := p.register(p.rig.ctx); err != nil {
		p.rig.t.Fatal(err)
	}
	p.send(list...)
}

// Restart is Stop and Start.
func (r *rig) Restart(ctx context.Context) error {
	return errors.Join(r.Stop(ctx), r.Start(ctx))
}

func TestRestart(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a@0", "b@0")...)
	before := r.add(oneContainer("pod", 1))
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.awaitEnd()
	if s := r.Snapshot(); s.Up || s.Resources[gpu].Capacity != 0 || s.Resources[gpu].Streams != 0 {
		t.Errorf("stopped kubelet: %s", s)
	}
	if _, err := r.AddPod(r.ctx, oneContainer("early", 1)); !errors.Is(err, ErrDown) {
		t.Errorf("pod on a stopped kubelet: %v", err)
	}
	if err := r.Start(r.ctx); err != nil {
		t.Fatal(err)
	}
	if got := r.Snapshot().Resources[gpu]; got.Connected || got.Capacity != 0 {
		t.Errorf("got %+v, want a stopped endpoint without devices", got)
	}
	if _, err := os.Stat(filepath.Join(r.options.Dir, "a.sock")); !os.IsNotExist(err) {
		t.Errorf("the plugin's socket was not wiped: %v", err)
	}
	if diff := cmp.Diff(before, r.Snapshot().Pods[0], cmp.Comparer(sameResponse)); diff != "" {
		t.Error(diff)
	}
	if _, err := r.RestartContainer(r.ctx, "default", "pod", "c"); err != nil {
		t.Errorf("container restart without the plugin: %v", err)
	}
	p.reregister(healthy("a@0", "b@0")...)
	if got := r.add(oneContainer("next", 1)).Containers[0].Devices(gpu); got[0] != "b" {
		t.Errorf("next pod got %q, want the free b", got)
	}
	if got := r.Snapshot().Resources[gpu]; got.Registrations != 2 || got.StreamsOpened != 2 {
		t.Errorf("got %+v, want counters that outlive the restart", got)
	}
}

// Devices in the checkpoint are not allocated again before their pods are restored.
func TestNewPodBeforeSourcesAreReady(t *testing.T) {
	r := startRig(t, Options{DelayPods: true})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	r.add(oneContainer("old", 1))
	if err := r.Restart(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.reregister(healthy("a", "b")...)
	if got := r.add(oneContainer("new", 1)).Containers[0].Devices(gpu); got[0] != "b" {
		t.Errorf("got %q, want the free b", got)
	}
	if err := r.RestorePods(r.ctx); err != nil {
		t.Fatal(err)
	}
	if got := r.Snapshot().Pods[0].Containers[0].Devices(gpu); len(got) != 1 || got[0] != "a" {
		t.Errorf("the old pod has %q, want a", got)
	}
}

func sameResponse(a, b *api.ContainerAllocateResponse) bool { return a.String() == b.String() }

func TestReboot(t *testing.T) {
	for _, row := range []struct {
		name string
		// list is the plugin's offer before the pods come back, nil for none.
		list []*api.Device
		want string
	}{
		{"plugin is late", nil, "no healthy devices present"},
		{"same devices", healthy("a", "b"), ""},
		{"device is unhealthy", append(unhealthy("a"), healthy("b")...), "previously allocated devices are no longer healthy"},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := startRig(t, Options{DelayPods: true})
			p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
			calls := 0
			p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) { calls++; return answer(ids), nil }
			r.add(oneContainer("pod", 1))
			if err := r.Stop(r.ctx); err != nil {
				t.Fatal(err)
			}
			r.StopContainers()
			if err := r.Start(r.ctx); err != nil {
				t.Fatal(err)
			}
			if row.list != nil {
				p.reregister(row.list...)
			}
			if err := r.RestorePods(r.ctx); err != nil {
				t.Fatal(err)
			}
			pod := r.Snapshot().Pods[0]
			if row.want == "" {
				if pod.Phase != Running || pod.Containers[0].Env()["DEVICES"] != "a" {
					t.Errorf("got %+v, want it running with what it had", pod)
				}
				// It runs now, so a mere restart does not call the plugin.
				if err := errors.Join(r.Restart(r.ctx), r.RestorePods(r.ctx)); err != nil {
					t.Fatal(err)
				}
				if pod := r.Snapshot().Pods[0]; pod.Phase != Running {
					t.Errorf("after another restart: got %+v", pod)
				}
			} else if pod.Phase != Failed || !strings.Contains(pod.Message, row.want) {
				t.Errorf("got %+v, want it failed: %s", pod, row.want)
			}
			if calls != 1 {
				t.Errorf("%d Allocate calls, want the first alone", calls)
			}
		})
	}
}

// The first list after the restart lacks a device that a pod holds: with a topology
// policy the real kubelet panics (cm/devicemanager/topology_hints.go).
func TestHeldDeviceMissingAfterRestart(t *testing.T) {
	r := startRig(t, Options{DelayPods: true})
	p := r.startPlugin(gpu, "a.sock", healthy("a@0", "b@0")...)
	r.add(oneContainer("pod", 1))
	if err := r.Restart(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.reregister(healthy("b@0")...)
	r.expectViolation("pods hold", "a")
	if err := r.RestorePods(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.expectViolation("kubelet would panic", "default/pod", ": a")
}

func TestResizePod(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	r.add(oneContainer("pod", 1))
	if err := r.ResizePod(r.ctx, "default", "pod"); err != nil {
		t.Error(err)
	}
	if err := r.ResizePod(r.ctx, "default", "none"); !errors.Is(err, ErrNoPod) {
		t.Errorf("got %v", err)
	}
	p.send(append(unhealthy("a"), healthy("b")...)...)
	if err := r.ResizePod(r.ctx, "default", "pod"); err == nil || !strings.Contains(err.Error(), "previously allocated") {
		t.Errorf("got %v", err)
	}
	if pod := r.Snapshot().Pods[0]; pod.Phase != Running {
		t.Errorf("resize changed the pod: %+v", pod)
	}
	p.send(healthy("b")...)
	r.expectViolation("pods hold")
	_ = r.ResizePod(r.ctx, "default", "pod")
	r.expectViolation("is admitted again")
}

func TestRestartContainer(t *testing.T) {
	now := time.Now()
	r := startRig(t, Options{StatusPeriod: time.Hour, Now: func() time.Time { return now }})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	calls := 0
	p.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) { calls++; return answer(ids), nil }
	r.add(oneContainer("pod", 1))
	restart := func() error {
		status, err := r.RestartContainer(r.ctx, "default", "pod", "c")
		if err == nil && status.Env()["DEVICES"] != "a" {
			t.Errorf("got %+v, want the cached answer", status)
		}
		return err
	}
	p.send(unhealthy("a")...)
	if err := restart(); err != nil {
		t.Errorf("unhealthy: %v", err)
	}
	p.server.Stop()
	r.await(func(s Snapshot) bool { return !s.Resources[gpu].Connected })
	if err := restart(); err != nil {
		t.Errorf("without the plugin: %v", err)
	}
	r.lock()
	now = now.Add(5*time.Minute + time.Second)
	r.unlock()
	if err := restart(); err != nil {
		t.Errorf("after the grace, before the status: %v", err)
	}
	r.ReportStatus()
	if err := restart(); err == nil || !strings.Contains(err.Error(), "endpoint not found in cache for a registered resource: nvidia.com/gpu") {
		t.Errorf("after the grace: %v", err)
	}
	if calls != 1 {
		t.Errorf("%d Allocate calls, want 1", calls)
	}
	for _, missing := range [][2]string{{"none", "c"}, {"pod", "none"}} {
		if _, err := r.RestartContainer(r.ctx, "default", missing[0], missing[1]); !errors.Is(err, ErrNoPod) {
			t.Errorf("%v: got %v", missing, err)
		}
	}
}

func TestPreStartContainer(t *testing.T) {
	r := startRig(t, Options{})
	p := r.servePlugin(gpu, "a.sock")
	p.options = &api.DevicePluginOptions{PreStartRequired: true}
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.expectViolation(gpu, "PreStartContainer")
}
