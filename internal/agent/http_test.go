package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// listening learns the HTTP addresses from the log.
type listening struct {
	slog.Handler
	addresses map[string]chan string
}

func newListening() listening {
	return listening{slog.DiscardHandler, map[string]chan string{"http listens": make(chan string, 10), "health listens": make(chan string, 10)}}
}

func (l listening) Enabled(context.Context, slog.Level) bool { return true }

func (l listening) Handle(_ context.Context, record slog.Record) error {
	if told, ok := l.addresses[record.Message]; ok {
		record.Attrs(func(attr slog.Attr) bool {
			told <- attr.Value.String()
			return true
		})
	}
	return nil
}

// await waits for the address in this log message.
func (l listening) await(t *testing.T, message string) net.Addr {
	t.Helper()
	address, err := net.ResolveTCPAddr("tcp", <-l.addresses[message])
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// TestListensWhenServing has a standby beside a program with the same address and control socket. It takes both
// over when it serves; its probes are answered from the start.
func TestListensWhenServing(t *testing.T) {
	t.Parallel()
	claimed, standing, controlled := make(chan struct{}), make(chan struct{}), make(chan struct{})
	log := newListening()
	newRig(t, func(r *rig) {
		r.options.Listen, r.options.HTTP, r.options.ListenWhenServing = "127.0.0.1:0", web.HTTP{HealthListen: "127.0.0.1:0"}, true
		r.options.Logger = slog.New(log)
		r.options.Control = func(ctx context.Context, _ http.Handler) error {
			close(controlled)
			<-ctx.Done()
			return nil
		}
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
			standBy()
			close(standing)
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	<-standing
	health := log.await(t, "health listens").String()
	for range 3 { // A listener that was wrongly started would by now be in the log.
		if code, body := answer(t, "http://"+health+"/readyz"); code != http.StatusOK {
			t.Fatalf("standing by, it is not ready: %d %s", code, body)
		}
	}
	select {
	case address := <-log.addresses["http listens"]:
		t.Errorf("standing by, it listens at %s", address)
	case <-controlled:
		t.Error("standing by, it serves the control socket")
	default:
	}
	close(claimed)
	if code, body := answer(t, "http://"+log.await(t, "http listens").String()+"/api/v1/status"); code != http.StatusOK || !strings.Contains(body, `"role": "serving"`) {
		t.Errorf("serving, it answers %d %s", code, body)
	}
	<-controlled
}

// answer asks for a URL.
func answer(t *testing.T, url string) (int, string) {
	t.Helper()
	response, err := http.Get(url) //nolint:gosec // it is this test's own
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// taken listens on an address, as another program would, until it is closed.
func taken(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// TestListenAddressInUse starts with both addresses taken: the GPUs are served, the report gives the reason, and
// HTTP is served as soon as an address is free.
func TestListenAddressInUse(t *testing.T) {
	main, health := taken(t), taken(t)
	reporter, log := newFakeReporter(), newListening()
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Logger = reporter, slog.New(log)
		r.options.Listen, r.options.HTTP = main.Addr().String(), web.HTTP{HealthListen: health.Addr().String()}
	})
	r.shows(8)
	says := func(what string, refused ...string) {
		t.Helper()
		reporter.await(t, what, func(n nodereport.Report) bool {
			return n.Ready == nodereport.ConditionTrue && n.Reason == "Serving" && strings.Count(n.Message, "not served") == len(refused) &&
				!slices.ContainsFunc(refused, func(text string) bool { return !strings.Contains(n.Message, text) })
		})
	}
	says("both", "listen for HTTP: listen tcp "+main.Addr().String()+": bind: address already in use",
		"listen for health: listen tcp "+health.Addr().String()+": bind: address already in use")

	_ = main.Close()
	says("that one is served", "listen for health")
	answers := log.await(t, "http listens").String()
	if code, _ := answer(t, "http://"+answers+"/readyz"); code != http.StatusOK || answers != main.Addr().String() {
		t.Errorf("/readyz on %s: %d", answers, code)
	}
	_ = health.Close()
	says("that both are served")
	r.policy.set(profile(5), nil)
	r.shows(10)
}

// TestOneAddressTwice checks that using an address twice is reported, and does not end the program.
func TestOneAddressTwice(t *testing.T) {
	probe := taken(t)
	_ = probe.Close()
	reporter := newFakeReporter()
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Listen = reporter, probe.Addr().String()
		r.options.HTTP.HealthListen = probe.Addr().String()
	})
	r.shows(8)
	reporter.await(t, "one of them", func(n nodereport.Report) bool { return strings.Count(n.Message, "address already in use") == 1 })
}

// TestNoAddress checks that an invalid address is an error at once, because waiting does not help.
func TestNoAddress(t *testing.T) {
	t.Parallel()
	for what, options := range map[string]Options{
		"listen for HTTP":   {Settings: Settings{Listen: "localhost:99999"}},
		"listen for health": {Settings: Settings{HTTP: web.HTTP{HealthListen: "localhost"}}},
	} {
		options.Plugin = plugin.NewManager(plugin.Options{Dir: t.TempDir()})
		if err := Run(t.Context(), withIdle(options)); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: got %v", what, err)
		}
	}
}

func TestNotReadyReasons(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		change func(*rig)
		want   string
	}{
		{"no profile", func(r *rig) {
			r.policy = fakePolicy{newInput(sharing.Profile{}, errors.New("line 3"))}
			r.options.ConfigSource = r.policy
		}, "no profile: line 3"},
		{"no driver", func(r *rig) {
			r.node = fakeNode{newInput[[]sharing.GPU](nil, errors.New("no driver"))}
			r.options.Node = r.node
		}, "GPUs not read: no driver"},
		{"silent kubelet", func(r *rig) { r.kubelet.HangRegister(true) }, "nvidia.com/gpu: not registered"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, test.change)
			r.awaitBody("/readyz", 503, test.want)
		})
	}
}

func TestReadyWhenServed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.awaitBody("/readyz", 200, "ok")
	r.shows(8)
	if code, body := r.get("/healthz"); code != 200 {
		t.Errorf("healthz %d %s", code, body)
	}
	code, body := r.get("/plan")
	var got sharing.Summary
	if err := json.Unmarshal([]byte(body), &got); code != 200 || err != nil {
		t.Fatalf("plan %d %s", code, body)
	}
	if len(got.Resources) != 1 || got.Resources[0].Devices != 8 || got.Warnings == nil {
		t.Errorf("plan %+v", got)
	}
}

func TestReadyWithoutGPUs(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput([]sharing.GPU{}, nil)}; r.options.Node = r.node })
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, `"resources": []`)
}

func TestNotReadyBeforeTheClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) {
		r.options.AcquireLock = func(ctx context.Context, _ func()) error {
			<-ctx.Done()
			return ctx.Err()
		}
	})
	r.awaitBody("/readyz", 503, "not serving yet")
}

// TestReadyWhileANewNameWaits renames a resource while a pod holds its only unit. The new name has no devices
// yet, and the node is ready.
func TestReadyWhileANewNameWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput(gpus(""), nil)}; r.options.Node = r.node })
	r.shows(4)
	_, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	renamed := profile(4)
	renamed.TimeSlicing[0].Rename = gpuResource + ".shared"
	r.policy.set(renamed, nil)
	r.shows(0)
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, "nvidia.com/gpu.shared")
	r.awaitBody("/metrics", 200, "virgate_kubelet_state_known 1")
}

// fakeHealth has one GPU with a fatal error, and its monitor gets no events.
type fakeHealth struct{}

func (fakeHealth) Health() sharing.HealthReport {
	return sharing.HealthReport{
		Units:    []sharing.UnitHealth{{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: sharing.Unhealthy, Reason: "XID 79"}},
		Monitors: []sharing.HealthMonitor{{GPU: "GPU-a", Degraded: "deaf"}},
	}
}

func TestHealthMetrics(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.options.Health = fakeHealth{} })
	r.awaitBody("/metrics", 200, `virgate_unit_health_state{gpu_uuid="GPU-a",state="unhealthy",unit_uuid="GPU-a"} 1`)
	r.awaitBody("/metrics", 200, `virgate_health_monitor_up{gpu_uuid="GPU-a"} 0`)
	r.awaitBody("/readyz", 200, "ok") // Degraded is not unready.
}

// TestOnProfile checks that OnProfile is called once for each profile that comes into force, and for no other.
func TestOnProfile(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var seen []int
	r := newRig(t, func(r *rig) {
		r.options.SetHealthRules = func(p sharing.Profile) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, p.TimeSlicing[0].Replicas)
		}
	})
	r.shows(8)
	r.node.set(gpus("", "", ""), nil)
	r.shows(12)
	r.policy.set(sharing.Profile{}, errors.New("line 3"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	r.policy.set(profile(5), nil)
	r.shows(15)
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(seen, []int{4, 5}) {
		t.Errorf("called with %v, want 4 and 5", seen)
	}
}

// TestTakesOverBeforeServing checks that a fault from the last run is already in the first list.
func TestTakesOverBeforeServing(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) {
		r.options.RestoreHealth = func(context.Context) error {
			r.node.set(gpus("", "XID 79"), nil)
			return nil
		}
	})
	r.shows(4)
	if lists := r.agent.Plugin.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists, want one", lists)
	}
}

func TestTakeOverFailureEndsRun(t *testing.T) {
	t.Parallel()
	failure := errors.New("no health")
	r := newRig(t, nil)
	options := r.options
	options.Plugin = plugin.NewManager(plugin.Options{Dir: t.TempDir(), Kubelet: r.sight, Logger: options.Logger})
	options.RestoreHealth = func(context.Context) error { return failure }
	options.Node, options.ConfigSource = fakeNode{newInput(gpus(""), nil)}, fakePolicy{newInput(profile(1), nil)}
	if err := Run(t.Context(), options); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}

func TestPageOverHTTP(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.awaitBody("/status", 200, "8</td>")
}
