package simkubelet

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestListReplacesList(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", append(healthy("b@1", "c"), unhealthy("a@0+1")...)...)
	got := r.Snapshot().Resources[gpu]
	want := Resource{
		Devices:  []Device{{"a", false, []int64{0, 1}}, {"b", true, []int64{1}}, {"c", true, nil}},
		Capacity: 3, Allocatable: 2, Streams: 1, StreamsOpened: 1, Registrations: 1, Lists: 1, Socket: "a.sock", Connected: true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	p.send(unhealthy("b", "c")...)
	r.awaitCounts(gpu, 0, 2)
	p.send()
	r.awaitCounts(gpu, 0, 0)
	p.send(healthy("x", "y")...)
	r.awaitCounts(gpu, 2, 2)
	if got := r.Snapshot().Resources[gpu]; got.Lists != 4 || got.StreamsOpened != 1 || got.StreamsClosed != 0 {
		t.Errorf("got %+v, want 4 lists on one stream", got)
	}
}

func TestHealthIsComparedExactly(t *testing.T) {
	for health, ok := range map[string]bool{"Healthy": true, "Unhealthy": false, "healthy": false, "": false} {
		if d := newDevices([]*api.Device{{ID: "a", Health: health}}); d.healthy.has("a") != ok || d.unhealthy.has("a") == ok {
			t.Errorf("%q: got %+v", health, d)
		}
	}
	// As in the real kubelet one ID with both counts for two.
	if d := newDevices(append(healthy("a"), unhealthy("a")...)); d.capacity() != 2 || len(d.healthy) != 1 {
		t.Errorf("got %+v", d)
	}
}

func TestStreamEnd(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a", "b")...)
	close(p.quit)
	r.awaitCounts(gpu, 0, 2)
	got := r.Snapshot().Resources[gpu]
	if got.Connected || got.Streams != 0 || got.StreamsClosed != 1 {
		t.Errorf("got %+v, want a stopped endpoint", got)
	}
	_, err := r.AddPod(r.ctx, oneContainer("late", 1))
	if err == nil || !strings.Contains(err.Error(), "no healthy devices present; cannot allocate unhealthy devices "+gpu) {
		t.Errorf("got %v", err)
	}
}

// F5: the first plugin's end takes the second one along.
func TestOverlappingRegistration(t *testing.T) {
	r := startRig(t, Options{AllowOverlap: true})
	first := r.startPlugin(gpu, "1.sock", healthy("a", "b")...)
	second := r.servePlugin(gpu, "2.sock")
	second.allocate = func(_ context.Context, ids []string) (*api.AllocateResponse, error) {
		return answer([]string{"second"}), nil
	}
	if err := second.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.awaitCounts(gpu, 2, 2)
	second.send(healthy("a", "b", "c")...)
	first.send(healthy("a", "b", "c", "d")...)
	r.awaitCounts(gpu, 4, 4)
	if env := r.add(oneContainer("pod", 1)).Containers[0].Env(); env["DEVICES"] != "second" {
		t.Errorf("Allocate went to the old endpoint: %v", env)
	}
	first.server.Stop()
	second.awaitEnd()
	r.awaitCounts(gpu, 0, 4)
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Streams == 0 })
}

// E26: a surviving third stream revives devices of a stopped endpoint.
func TestThirdStreamOnStoppedEndpoint(t *testing.T) {
	r := startRig(t, Options{AllowOverlap: true})
	var plugins []*devicePlugin
	for _, socket := range []string{"1.sock", "2.sock", "3.sock"} {
		plugins = append(plugins, r.startPlugin(gpu, socket, healthy("a")...))
	}
	plugins[0].server.Stop()
	plugins[2].awaitEnd()
	r.awaitCounts(gpu, 0, 1)
	plugins[1].send(healthy("a")...)
	r.awaitCounts(gpu, 1, 1)
	if _, err := r.AddPod(r.ctx, oneContainer("pod", 1)); err == nil || !strings.Contains(err.Error(), "has been stopped") {
		t.Errorf("got %v, want a stopped endpoint", err)
	}
}

// F8: after a failed Register nobody notices the old plugin's death.
func TestFailedRegisterLeavesZombie(t *testing.T) {
	r := startRig(t, Options{DialTimeout: 30 * time.Millisecond})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	if err := registerWith(r.ctx, r.options.Dir, &api.RegisterRequest{Version: api.Version, Endpoint: "none.sock", ResourceName: gpu}); err == nil {
		t.Fatal("Register without a plugin succeeded")
	}
	p.server.Stop()
	r.await(func(s Snapshot) bool { return s.Resources[gpu].Streams == 0 })
	if got := r.Snapshot().Resources[gpu]; got.Allocatable != 1 || !got.Connected {
		t.Errorf("got %+v, want the dead plugin's device", got)
	}
	_, err := r.AddPod(r.ctx, oneContainer("pod", 1))
	if err == nil || !strings.Contains(err.Error(), "code = Unavailable") {
		t.Errorf("got %v, want Unavailable", err)
	}
}

func TestNodeStatus(t *testing.T) {
	now := time.Now()
	r := startRig(t, Options{StatusPeriod: time.Hour, Now: func() time.Time { return now }})
	p := r.startPlugin(gpu, "a.sock", append(healthy("a"), unhealthy("b")...)...)
	node := func() Quantity { return r.Snapshot().Node[gpu] }
	if got := node(); got != (Quantity{}) {
		t.Errorf("the status %v came before its time", got)
	}
	r.ReportStatus()
	if got := node(); got != (Quantity{2, 1}) {
		t.Errorf("got %v, want 2/1", got)
	}
	p.server.Stop()
	r.awaitCounts(gpu, 0, 2)
	r.lock()
	now = now.Add(5 * time.Minute)
	r.unlock()
	r.ReportStatus()
	if got := node(); got != (Quantity{2, 0}) {
		t.Errorf("within the grace: got %v, want 2/0", got)
	}
	r.lock()
	now = now.Add(time.Second)
	r.unlock()
	r.ReportStatus()
	if _, ok := r.Snapshot().Node[gpu]; !ok || node() != (Quantity{}) {
		t.Errorf("after the grace: got %v, want the name with 0/0", r.Snapshot().Node)
	}
	if got := r.Snapshot().Resources[gpu]; got.Capacity != 0 {
		t.Errorf("got %+v, want no devices", got)
	}
	if registered := r.checkpoint().RegisteredDevices; len(registered) != 0 {
		t.Errorf("the checkpoint still has %v", registered)
	}
}

func TestStatusIsPublishedByItself(t *testing.T) {
	r := startRig(t, Options{StatusPeriod: 5 * time.Millisecond})
	r.startPlugin(gpu, "a.sock", healthy("a")...)
	r.await(func(s Snapshot) bool { return s.Node[gpu] == Quantity{1, 1} })
}

func TestAwaitEndsWithContext(t *testing.T) {
	r := startRig(t, Options{})
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	err := r.Await(ctx, func(Snapshot) bool { return false })
	if err == nil || !strings.Contains(err.Error(), "up=true") {
		t.Errorf("got %v, want the last state", err)
	}
}

// A plugin whose connection is cut has lost its stream, and may register again.
func TestCutConnections(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a")...)
	r.CutConnections()
	p.awaitEnd()
	r.awaitCounts(gpu, 0, 1)
	if err := p.register(r.ctx); err != nil {
		t.Fatal(err)
	}
	p.send(healthy("a")...)
	r.awaitCounts(gpu, 1, 1)
	if err := r.Stop(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.CutConnections()
}
