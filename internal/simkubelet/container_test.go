package simkubelet

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

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
	var started [][]string
	var left time.Duration
	fail := error(nil)
	p.preStart = func(ctx context.Context, ids []string) error {
		deadline, _ := ctx.Deadline()
		started, left = append(started, ids), time.Until(deadline)
		return fail
	}
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a", "b")...)
	r.add(oneContainer("pod", 2))
	fail = errors.New("not now")
	if _, err := r.RestartContainer(r.ctx, "default", "pod", "c"); err == nil || !strings.Contains(err.Error(), "PreStartContainer rpc failed") {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff([][]string{{"a", "b"}, {"a", "b"}}, started); diff != "" {
		t.Error(diff)
	}
	if left <= 0 || left > 30*time.Second {
		t.Errorf("deadline in %v, want 30 s", left)
	}
	p.server.Stop()
	r.await(func(s Snapshot) bool { return !s.Resources[gpu].Connected })
	if _, err := r.RestartContainer(r.ctx, "default", "pod", "c"); err == nil || !strings.Contains(err.Error(), "has been stopped") {
		t.Errorf("got %v", err)
	}
}
