package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/shortdir"
)

// patience is how long anything may take on a busy machine.
const patience = await.Patience

const gpuResource = "nvidia.com/gpu"

// input of either kind; the test sets what it returns.
type input[T any] struct {
	mu      sync.Mutex
	value   T
	err     error
	changed func()
	started chan struct{}
}

func newInput[T any](value T, err error) *input[T] {
	return &input[T]{value: value, err: err, started: make(chan struct{})}
}

func (i *input[T]) get() (T, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.value, i.err
}

func (i *input[T]) set(value T, err error) {
	<-i.started
	i.mu.Lock()
	i.value, i.err = value, err
	i.mu.Unlock()
	i.changed()
}

func (i *input[T]) Watch(ctx context.Context, changed func()) error {
	i.changed = changed
	close(i.started)
	changed()
	<-ctx.Done()
	return nil
}

type fakeNode struct{ *input[[]sharing.GPU] }

func (n fakeNode) Inventory() ([]sharing.GPU, error) { return n.get() }
func (n fakeNode) Unlisted() string                  { return "" }

type fakePolicy struct{ *input[sharing.Profile] }

func (p fakePolicy) Profile() (configs.SelectedProfile, error) {
	profile, err := p.get()
	if err != nil {
		return configs.SelectedProfile{Source: "fake"}, err
	}
	return configs.Config{Profile: profile}.SelectedFrom("fake", "", nil), nil
}

func (p fakePolicy) WithLabel(string, string) (configs.SelectedProfile, error) { return p.Profile() }

func gpus(faults ...string) []sharing.GPU {
	list := make([]sharing.GPU, len(faults))
	for i, fault := range faults {
		list[i] = sharing.GPU{UUID: "GPU-" + string(rune('a'+i)), Index: i, Model: "Test", NUMANode: -1, Health: sharing.Health{Reason: fault}}
	}
	return list
}

func profile(replicas int) sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID,
		GPUNames:    []sharing.NamingRule{{Pattern: "*", Name: gpuResource}},
		TimeSlicing: []sharing.ReplicatedResource{{Path: "s", Resource: gpuResource, Replicas: replicas, Policy: sharing.Distributed}},
	}
}

// idle has parts of an agent that do nothing, for tests that do not use them.
type idle struct{}

func (idle) Health() sharing.HealthReport { return sharing.HealthReport{} }

func (idle) Load() (configs.SelectedProfile, bool) { return configs.SelectedProfile{}, false }

func (idle) Save(configs.SelectedProfile) {}

func (idle) Prepare(sharing.Grants, []sharing.GPU) grant.Host { return grant.Host{} }

func (idle) Watch(ctx context.Context, _ func()) error {
	<-ctx.Done()
	return nil
}

func (idle) State(context.Context, string) (sharing.MIGState, error) {
	return sharing.MIGState{}, errors.New("no driver")
}

func (idle) Apply(context.Context, string, mig.Step) error { return errors.New("no driver") }

// noKubelet is a kubelet that does not answer.
type noKubelet struct{ plugin.Kubelet }

func (noKubelet) Held(context.Context) ([]sharing.Allocation, error) {
	return nil, errors.New("no kubelet")
}

// withIdle fills in idle parts.
func withIdle(o Options) Options {
	if o.Kubelet == nil {
		o.Kubelet = noKubelet{}
	}
	if o.Processes == nil {
		o.Processes = func(context.Context, string) ([]int, error) { return nil, nil }
	}
	if o.Measure == nil {
		o.Measure = func(context.Context) sharing.Measurement { return sharing.Measurement{} }
	}
	if o.Health == nil {
		o.Health = idle{}
	}
	if o.Host == nil {
		o.Host = idle{}
	}
	if o.LastKnownGood == nil {
		o.LastKnownGood = idle{}
	}
	if o.Partitioner == nil {
		o.Partitioner = idle{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.SetHealthRules == nil {
		o.SetHealthRules = func(sharing.Profile) {}
	}
	if o.AcquireLock == nil {
		o.AcquireLock = func(context.Context, func()) error { return nil }
	}
	if o.RestoreHealth == nil {
		o.RestoreHealth = func(context.Context) error { return nil }
	}
	if o.UnreadKubelet == nil {
		o.UnreadKubelet = func() (podResources, checkpoint error) { return nil, nil }
	}
	if o.StateWriteError == nil {
		o.StateWriteError = func() error { return nil }
	}
	return o
}

// rig is an agent between inputs that the test sets and a simulated kubelet.
type rig struct {
	t       *testing.T
	ctx     context.Context
	node    fakeNode
	policy  fakePolicy
	kubelet *kubelettest.Kubelet
	dir     string // of the kubelet's sockets
	// sight reads the kubelet.
	sight   plugin.Kubelet
	options Options
	agent   *agent
	http    http.Handler
	// wantErr must be in run's error; empty if run succeeds. ended is closed when run returns.
	wantErr string
	ended   chan struct{}
}

func newRig(t *testing.T, change func(*rig)) *rig {
	t.Helper()
	dir := shortdir.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	r := &rig{
		t: t, ctx: ctx, ended: make(chan struct{}), dir: dir,
		node: fakeNode{newInput(gpus("", ""), nil)}, policy: fakePolicy{newInput(profile(4), nil)},
		kubelet: kubelettest.New(simkubelet.Options{Dir: dir, PodResourcesSocket: dir + ".sock"}),
	}
	sight := podresources.New(podresources.Options{Socket: dir + ".sock", CheckpointDir: dir, Timeout: patience})
	t.Cleanup(func() { _ = sight.Close() })
	r.sight = sight
	r.options = Options{
		Node: r.node, ConfigSource: r.policy, Settings: Settings{Logger: slog.New(slog.DiscardHandler), Version: "test"},
		Plugin: plugin.NewManager(plugin.Options{
			Dir: dir, Kubelet: sight, Logger: slog.New(slog.DiscardHandler),
			Timing: pluginTiming(),
		}),
	}
	if change != nil {
		change(r)
	}
	r.options = withIdle(r.options)
	r.agent = newAgent(r.options)
	r.http = r.agent.web.Handler()
	var running sync.WaitGroup
	running.Go(func() { _ = r.kubelet.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		_ = os.Remove(dir + ".sock")
	})
	if _, silent := r.options.Kubelet.(noKubelet); !silent {
		// The program of a node that boots waits for the kubelet; no test depends on how long.
		if err := await.Condition(ctx.Done(), func() error { _, err := r.options.Kubelet.Held(ctx); return err }); err != nil {
			t.Fatalf("wait for the kubelet's first answer: %v", err)
		}
	}
	running.Go(func() {
		defer close(r.ended)
		err := r.agent.run(ctx)
		if (err == nil) != (r.wantErr == "") || (err != nil && !strings.Contains(err.Error(), r.wantErr)) {
			t.Errorf("run: %v, want %q", err, r.wantErr)
			cancel() // Nothing that a test waits for comes any more.
		}
	})
	return r
}

// await waits until the condition holds.
func (r *rig) await(what string, reached func() bool) {
	r.t.Helper()
	r.until(what, func() error {
		if reached() {
			return nil
		}
		return unreached{r}
	})
}

// unreached is the error of await. It is seldom read, so nothing is formatted before.
type unreached struct{ r *rig }

func (u unreached) Error() string {
	r := u.r
	claims := "none"
	if r.options.DRA.Claims != nil {
		claims = fmt.Sprintf("%+v", r.options.DRA.Claims.View())
	}
	return fmt.Sprintf("plan %+v, MPS %+v, settings %+v, claims %s, served %+v", r.agent.state.Load().plan,
		*r.agent.mps.View(), r.agent.gpuSettings.All(), claims, r.agent.Plugin.Status().Resources)
}

// until waits until condition returns nil. It gives up once the program has ended.
func (r *rig) until(what string, condition func() error) {
	r.t.Helper()
	err := await.Condition(r.ctx.Done(), func() error {
		select {
		case <-r.ended:
			if err := condition(); err != nil {
				return await.Never("the program has ended: %w", err)
			}
			return nil
		default:
			return condition()
		}
	})
	if err != nil {
		r.t.Fatalf("wait for %s: %v", what, err)
	}
}

// pluginTiming has short waits, and no deadline that a slow machine could exceed.
func pluginTiming() plugin.Timing {
	return plugin.Timing{
		RemovalDelay: 50 * time.Millisecond, ListInterval: time.Millisecond,
		StreamTimeout: time.Hour, VerifyAfter: time.Hour,
		// The end of a server drops what gRPC has not written yet, so it must come later than a starved
		// goroutine writes the last list.
		StopAfter: 2 * time.Second,
	}
}

// endable returns a function that ends the agent before the test ends. For newRig's change.
func (r *rig) endable() (end func()) {
	told := make(chan struct{})
	r.options.Background = append(r.options.Background, func(ctx context.Context) error {
		select {
		case <-told:
			return errors.New("told to stop")
		case <-ctx.Done():
			return nil
		}
	})
	r.wantErr = "told to stop"
	return func() { close(told) }
}

func (r *rig) shows(allocatable int) {
	r.t.Helper()
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Allocatable == allocatable }); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) get(path string) (int, string) {
	recorder := httptest.NewRecorder()
	r.http.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
	return recorder.Code, recorder.Body.String()
}

// awaitBody waits until the path answers with the code and a body that contains text.
func (r *rig) awaitBody(path string, code int, text string) {
	r.t.Helper()
	r.until(path, func() error {
		if gotCode, body := r.get(path); gotCode != code || !strings.Contains(body, text) {
			return fmt.Errorf("%d %q, want %d %q", gotCode, body, code, text)
		}
		return nil
	})
}

func TestFollowsBothInputs(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.shows(8)
	r.policy.set(profile(10), nil)
	r.shows(20)
	r.node.set(gpus("", "XID 79"), nil)
	r.shows(10)
	r.node.set(gpus("", "", ""), nil)
	r.shows(30)
}

func TestRejectedProfileLeavesTheLastGoodOne(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.shows(8)
	r.policy.set(sharing.Profile{}, errors.New("p.yaml:3: replicas: must be at least 1"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	r.node.set(gpus("", "", ""), nil)
	r.shows(12) // The GPUs' changes are planned with the last good profile.
	r.policy.set(profile(5), nil)
	r.shows(15)
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 1")
}

func TestUnreadableGPUsLeaveThePlan(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.shows(8)
	r.node.set(nil, errors.New("driver gone"))
	r.awaitBody("/metrics", 200, "virgate_inventory_last_read_successful 0")
	r.policy.set(profile(3), nil)
	r.shows(6)
}

func TestStandsByUntilClaimed(t *testing.T) {
	t.Parallel()
	claimed := make(chan struct{})
	var measured atomic.Int32
	r := newRig(t, func(r *rig) {
		r.options.Measure = func(context.Context) sharing.Measurement {
			measured.Add(1)
			return sharing.Measurement{}
		}
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
			standBy()
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	r.awaitBody("/plan", 200, `"devices": 8`)
	r.awaitBody("/readyz", 200, "ok")
	if n := r.kubelet.Snapshot().Resources[gpuResource].Registrations; n != 0 {
		t.Errorf("%d registrations while standing by", n)
	}
	select {
	case <-r.node.started:
		t.Error("a driver is watched while standing by")
	default:
	}
	if n := measured.Load(); n != 0 {
		t.Errorf("%d measurements while standing by", n)
	}
	close(claimed)
	r.shows(8)
	<-r.node.started
}

// TestTakesOverBeforeItLists restores the last program's fatal error after everything else has been planned.
func TestTakesOverBeforeItLists(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) {
		r.options.RestoreHealth = func(ctx context.Context) error {
			<-r.node.started
			<-r.policy.started
			for len(r.agent.replan) > 0 {
				r.agent.planNow(ctx)
			}
			r.agent.planNow(ctx)
			r.node.mu.Lock()
			defer r.node.mu.Unlock()
			r.node.value = gpus("", "fatal") // Without saying so.
			return nil
		}
	})
	r.shows(4)
	if lists := r.kubelet.Snapshot().Resources[gpuResource].Lists; lists != 1 {
		t.Errorf("the kubelet was sent %d lists", lists)
	}
}

func TestDrainsBeforeItEnds(t *testing.T) {
	t.Parallel()
	var end func()
	r := newRig(t, func(r *rig) {
		r.options.DrainTimeout = time.Hour
		end = r.endable()
	})
	r.shows(8)
	end()
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Capacity == 0 && !k.Resources[gpuResource].Connected
	}); err != nil {
		t.Error(err)
	}
}

func TestRefresh(t *testing.T) {
	t.Parallel()
	look := make(chan os.Signal)
	r := newRig(t, func(r *rig) { r.options.Reload = look })
	r.shows(8)
	r.policy.mu.Lock()
	r.policy.value = profile(2) // Without saying so.
	r.policy.mu.Unlock()
	look <- syscall.SIGHUP
	r.shows(4)
}

func TestBackgroundFailureEndsRun(t *testing.T) {
	t.Parallel()
	failure := errors.New("socket gone")
	err := Run(t.Context(), withIdle(Options{
		Node: fakeNode{newInput(gpus(""), nil)}, ConfigSource: fakePolicy{newInput(profile(1), nil)},
		Plugin:     plugin.NewManager(plugin.Options{Dir: t.TempDir(), Logger: slog.New(slog.DiscardHandler)}),
		Background: []func(context.Context) error{func(context.Context) error { return failure }},
	}))
	if !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}

// TestServesToTheLast has a part of the program end slowly. A successor must wait for it, so the kubelet is
// served meanwhile.
func TestServesToTheLast(t *testing.T) {
	t.Parallel()
	rested := make(chan struct{})
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.Background = append(r.options.Background, func(ctx context.Context) error {
			<-ctx.Done()
			<-rested
			return nil
		})
	})
	r.shows(8)
	end()
	lost, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond) // Nothing happens that could be awaited.
	defer cancel()
	if r.kubelet.Await(lost, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].StreamsClosed > 0 }) == nil {
		t.Error("the kubelet is left alone while the program ends")
	}
	for i := range 8 {
		if _, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{
			Namespace: "test", Name: fmt.Sprint("late-", i),
			Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpuResource: 1}}},
		}); err != nil {
			t.Errorf("a pod that comes while the program ends: %v", err)
		}
	}
	close(rested)
	r.gone()
}

// gone waits until the kubelet is no longer served.
func (r *rig) gone() {
	r.t.Helper()
	if err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool { return !k.Resources[gpuResource].Connected }); err != nil {
		r.t.Error(err)
	}
}

// TestAnswersWhileItDrains checks that a draining program still answers probes and reports that it drains.
func TestAnswersWhileItDrains(t *testing.T) {
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := probe.Addr().String()
	_ = probe.Close()
	node, reporter := &slowNode{asked: make(chan struct{}), answer: make(chan struct{})}, newFakeReporter()
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.Listen, r.options.DrainTimeout, r.options.Reporter = address, time.Hour, reporter
		node.fakeNode = r.node
		r.options.Node = node
	})
	r.shows(8)
	node.slow.Store(true)
	r.agent.requestPlan()
	<-node.asked // It drains until answer is closed.
	end()
	r.awaitBody("/api/v1/status", 200, `"role": "draining"`)
	for range 10 {
		response, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			t.Error(err)
			break
		}
		_ = response.Body.Close()
	}
	select {
	case <-reporter.ended:
		t.Error("the reporter has ended")
	default:
	}
	close(node.answer)
	r.gone()
}

// TestClaimedTooLate ends the program just when it may serve. It must not register while its other parts end.
func TestClaimedTooLate(t *testing.T) {
	t.Parallel()
	registered := make(chan bool, 1)
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
			standBy()
			<-ctx.Done()
			return nil
		}
		r.options.Background = append(r.options.Background, func(ctx context.Context) error {
			<-ctx.Done()
			soon, cancel := context.WithTimeout(r.ctx, 300*time.Millisecond) // Nothing happens that could be awaited.
			defer cancel()
			registered <- r.kubelet.Await(soon, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Registrations > 0 }) == nil
			return nil
		})
	})
	r.awaitBody("/plan", 200, `"devices": 8`)
	end()
	if <-registered {
		t.Error("registered at the end")
	}
}

// TestDrainIsTheLastPlan ends the program while it decides about a profile. The decision must not bring the
// devices back.
func TestDrainIsTheLastPlan(t *testing.T) {
	t.Parallel()
	node := &slowNode{asked: make(chan struct{}), answer: make(chan struct{})}
	var end func()
	r := newRig(t, func(r *rig) {
		end = r.endable()
		r.options.DrainTimeout = time.Hour
		node.fakeNode = r.node
		r.options.Node = node
	})
	r.shows(8)
	node.slow.Store(true)
	r.policy.set(profile(8), nil)
	<-node.asked
	end()
	r.awaitBody("/api/v1/status", 200, `"role": "draining"`)
	close(node.answer)
	r.gone()
	if capacity := r.kubelet.Snapshot().Resources[gpuResource].Capacity; capacity != 0 {
		t.Errorf("%d devices are left", capacity)
	}
}

// slowNode, when slow, closes asked at the first question and answers once answer is closed.
type slowNode struct {
	fakeNode
	slow          atomic.Bool
	asked, answer chan struct{}
}

func (n *slowNode) Inventory() ([]sharing.GPU, error) {
	if n.slow.CompareAndSwap(true, false) {
		close(n.asked)
		<-n.answer
	}
	return n.fakeNode.Inventory()
}
