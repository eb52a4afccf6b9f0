package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// fakeLastKnownGood has the last run's profile, replaces it like the real one, and records the profiles it was
// asked to keep.
type fakeLastKnownGood struct {
	mu   sync.Mutex
	last *configs.SelectedProfile
	kept []string
}

func (k *fakeLastKnownGood) Load() (configs.SelectedProfile, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.last == nil {
		return configs.SelectedProfile{}, false
	}
	return *k.last, true
}

func (k *fakeLastKnownGood) Save(s configs.SelectedProfile) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last = &s
	if n := len(k.kept); n == 0 || k.kept[n-1] != s.Generation {
		k.kept = append(k.kept, s.Generation)
	}
}

func (k *fakeLastKnownGood) list() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return fmt.Sprint(k.kept)
}

func generations(replicas ...int) string {
	var list []string
	for _, r := range replicas {
		list = append(list, configs.Generation(profile(r)))
	}
	return fmt.Sprint(list)
}

func TestLastRunsProfileServes(t *testing.T) {
	t.Parallel()
	last := configs.Config{Profile: profile(3)}.SelectedFrom("ConfigMap gpu/profiles", "a", nil)
	for _, test := range []struct {
		name string
		err  error
	}{
		{"a broken profile", errors.New("line 3")},
		{"one that is not known", fmt.Errorf("node n1: %w", configs.ErrPending)},
	} {
		t.Run(test.name, func(t *testing.T) {
			keeper := &fakeLastKnownGood{last: &last}
			r := newRig(t, func(r *rig) {
				r.policy = fakePolicy{newInput(profile(4), test.err)}
				r.options.ConfigSource, r.options.LastKnownGood = r.policy, keeper
			})
			r.awaitBody("/readyz", 200, "ok")
			if got := r.agent.state.Load().plan.Resources[0]; len(got.Devices) != 6 {
				t.Errorf("%d devices, want those of the last run's profile", len(got.Devices))
			}
			if got := keeper.list(); got != "[]" {
				t.Errorf("kept %s, which was there", got)
			}
			r.policy.set(profile(5), nil)
			r.awaitBody("/plan", 200, `"replicas": 5`)
			if got, want := keeper.list(), generations(5); got != want {
				t.Errorf("kept %s, want %s", got, want)
			}
			r.policy.set(profile(6), errors.New("line 4"))
			r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
			if got, want := keeper.list(), generations(5); got != want {
				t.Errorf("kept %s, want %s", got, want)
			}
		})
	}
}

// byGPUs chooses the profile by a rule about the GPUs; until they are known, the default.
type byGPUs struct {
	fakePolicy
	node fakeNode
	rule sharing.Profile
}

func (p byGPUs) Profile() (configs.SelectedProfile, error) {
	if _, err := p.node.get(); err == nil {
		return configs.Config{Profile: p.rule}.SelectedFrom("fake", "", nil), nil
	}
	selected, err := p.fakePolicy.Profile()
	selected.Choice.AwaitsGPUs = true
	return selected, err
}

// beforeWatch is a Node that calls a function before its driver is opened.
type beforeWatch struct {
	fakeNode
	call func()
}

func (n beforeWatch) Watch(ctx context.Context, changed func()) error {
	n.call()
	return n.fakeNode.Watch(ctx, changed)
}

// TestFirstScanHasTheLastRunsRules checks that if rules depend on the GPUs, the first scan uses the health rules of
// the last run's profile, not those of the default.
func TestFirstScanHasTheLastRunsRules(t *testing.T) {
	t.Parallel()
	last := configs.Config{Profile: profile(3)}.SelectedFrom("ConfigMap gpu/profiles", "a", nil)
	for _, test := range []struct {
		name  string
		last  *configs.SelectedProfile
		first int
	}{
		{"after a run", &last, 3},
		{"at the first start", nil, 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			keeper := &fakeLastKnownGood{last: test.last}
			var inForce, first atomic.Int64
			r := newRig(t, func(r *rig) {
				r.node = fakeNode{newInput[[]sharing.GPU](nil, sharing.ErrNotRead)}
				r.options.Node = beforeWatch{r.node, func() { first.Store(inForce.Load()) }}
				r.options.ConfigSource, r.options.LastKnownGood = byGPUs{r.policy, r.node, profile(5)}, keeper
				r.options.SetHealthRules = func(p sharing.Profile) { inForce.Store(int64(p.TimeSlicing[0].Replicas)) }
			})
			<-r.node.started
			if got := first.Load(); got != int64(test.first) {
				t.Errorf("the first scan has the health rules of profile %d, want %d", got, test.first)
			}
			r.agent.planNow(r.ctx)
			s := r.agent.state.Load()
			if s.rejected != nil || s.restored != (test.last != nil) || keeper.list() != "[]" {
				t.Errorf("rejected: %v, restored: %t, kept: %s", s.rejected, s.restored, keeper.list())
			}
			r.node.set(gpus("", ""), nil)
			r.shows(10)
			if got := inForce.Load(); got != 5 || r.agent.state.Load().restored {
				t.Errorf("then the health rules of profile %d are in force", got)
			}
			if got, want := keeper.list(), generations(5); got != want {
				t.Errorf("kept %s, want %s", got, want)
			}
		})
	}
}

// A standby rejects the profile before it may serve, and nothing changes when it may. Found by test/soak. If it
// may partition GPUs, it must know what it serves before it registers.
func TestLastRunsProfileServesAfterStandby(t *testing.T) {
	t.Parallel()
	last := configs.Config{Profile: profile(3)}.SelectedFrom("ConfigMap gpu/profiles", "a", nil)
	for _, partitions := range []bool{false, true} {
		t.Run(fmt.Sprint("partitions ", partitions), func(t *testing.T) {
			r := newRig(t, func(r *rig) {
				r.policy = fakePolicy{newInput(profile(4), errors.New("line 3"))}
				r.options.ConfigSource, r.options.LastKnownGood = r.policy, &fakeLastKnownGood{last: &last}
				if partitions {
					sim, err := simnode.New("a30x2")
					if err != nil {
						t.Fatal(err)
					}
					r.options.Partitioner = nvml.NewPartitioner(sim, nvml.NewNode(sim, nvml.Options{Logger: r.options.Logger}).PauseEvents)
					r.options.Journal = &memoryStore{}
				}
				r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
					standBy()
					return await.Condition(ctx.Done(), func() error {
						if s := r.agent.state.Load(); s.rejected == nil || s.gpus == nil {
							return errors.New("the profile is not rejected yet")
						}
						return nil
					})
				}
			})
			r.shows(6)
		})
	}
}

// A profile with longer lists for this node's GPUs than the kubelet accepts is rejected, also at the start,
// and a profile that fits is served afterwards.
func TestProfileWithTooLongLists(t *testing.T) {
	t.Parallel()
	const most = sharing.MaxDevices / 2 // There are two GPUs.
	for _, started := range []bool{true, false} {
		t.Run(fmt.Sprint("started ", started), func(t *testing.T) {
			r := newRig(t, func(r *rig) {
				if !started {
					r.policy = fakePolicy{newInput(profile(most+1), nil)}
					r.options.ConfigSource = r.policy
				}
			})
			if started {
				r.shows(8)
				r.policy.set(profile(most+1), nil)
			}
			r.awaitBody("/api/v1/status", 200, fmt.Sprintf("write at most %d, or", most))
			r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
			if started {
				r.awaitBody("/plan", 200, `"replicas": 4`)
			}
			r.policy.set(profile(5), nil)
			r.shows(10)
			r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 1")
		})
	}
}

// TestTooLongListsAfterRestart starts with a profile that has too many devices for this node, while the GPUs
// cannot be read yet. The last run's profile is kept and served, and the wanted one stays rejected, even if both
// are the same.
func TestTooLongListsAfterRestart(t *testing.T) {
	t.Parallel()
	const tooMany = sharing.MaxDevices/2 + 1
	for _, kept := range []int{3, tooMany} {
		t.Run(fmt.Sprint("kept ", kept), func(t *testing.T) {
			last := configs.Config{Profile: profile(kept)}.SelectedFrom("ConfigMap gpu/profiles", "a", nil)
			keeper := &fakeLastKnownGood{last: &last}
			r := newRig(t, func(r *rig) {
				r.node = fakeNode{newInput[[]sharing.GPU](nil, sharing.ErrNotRead)}
				r.policy = fakePolicy{newInput(profile(tooMany), nil)}
				r.options.Node, r.options.ConfigSource, r.options.LastKnownGood = r.node, r.policy, keeper
			})
			r.await("the profile", func() bool { return r.agent.state.Load().profile != nil })
			r.node.set(gpus("", ""), nil)
			if kept == 3 {
				r.shows(6)
			}
			r.await("the refusal", func() bool { return r.agent.state.Load().planned && r.agent.state.Load().rejected != nil })
			r.node.set(gpus("fault", ""), nil)
			r.await("the next plan", func() bool {
				s := r.agent.state.Load()
				return len(s.plan.Resources) == 1 && !s.plan.Resources[0].Units[0].Health.Healthy()
			})
			if s := r.agent.state.Load(); s.rejected == nil || !s.restored {
				t.Errorf("rejected %v, restored %v: the refusal was forgotten", s.rejected, s.restored)
			}
			if got := keeper.list(); got != "[]" {
				t.Errorf("kept %s", got)
			}
		})
	}
}

// A profile that was good while the program stood by is the last good one. It is kept, although the wanted one is
// bad by the time the program serves. Found by test/soak.
func TestKeepsWhatWasGoodWhileItStoodBy(t *testing.T) {
	t.Parallel()
	keeper, claimed := &fakeLastKnownGood{}, make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.LastKnownGood = keeper
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
			standBy()
			select {
			case <-claimed:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
	})
	r.awaitBody("/plan", 200, `"replicas": 4`)
	r.policy.set(profile(5), errors.New("line 3"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	if got := keeper.list(); got != "[]" {
		t.Errorf("kept %s by a program that stands by", got)
	}
	close(claimed)
	r.shows(8)
	if got, want := keeper.list(), generations(4); got != want {
		t.Errorf("kept %s, want %s", got, want)
	}
}

// fakeHost returns what the test sets, and counts calls.
type fakeHost struct {
	*input[grant.Host]
	prepared *atomic.Int64
}

func newFakeHost(host grant.Host) fakeHost { return fakeHost{newInput(host, nil), &atomic.Int64{}} }

func (h fakeHost) Prepare(sharing.Grants, []sharing.GPU) grant.Host {
	h.prepared.Add(1)
	host, _ := h.get()
	return host
}

func withheld(units ...string) grant.Host {
	host := grant.Host{Obstacles: map[string]string{}}
	for _, unit := range units {
		host.Obstacles[unit] = "the driver is not installed yet"
	}
	return host
}

// TestObstaclesWithhold checks that a device is Healthy only while the host has everything that a grant names.
func TestObstaclesWithhold(t *testing.T) {
	t.Parallel()
	host := newFakeHost(withheld("GPU-a", "GPU-b"))
	r := newRig(t, func(r *rig) { r.options.Host = host })
	listed := func(k simkubelet.Snapshot) bool { return len(k.Resources[gpuResource].Devices) == 8 }
	if err := r.kubelet.Await(r.ctx, listed); err != nil {
		t.Fatal(err)
	}
	r.shows(0)
	host.set(withheld("GPU-b"), nil)
	r.shows(4)
	host.set(withheld(), nil)
	r.shows(8)
	host.set(withheld("GPU-a"), nil)
	r.shows(4)
}

// TestHostReachesGrants checks that a grant includes what the host prepared, even if nothing else has changed.
func TestHostReachesGrants(t *testing.T) {
	t.Parallel()
	nodes := map[string][]string{"GPU-a": {"/dev/nvidia0"}, "GPU-b": {"/dev/nvidia1"}}
	host := newFakeHost(grant.Host{Nodes: nodes})
	r := newRig(t, func(r *rig) {
		r.options.Host = host
		want, _ := r.policy.get()
		want.Grants = sharing.Grants{DeviceNodes: true}
		r.policy.value = want
	})
	r.shows(8)
	granted := func(name string) []string {
		t.Helper()
		pod, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "test", Name: name, Containers: []simkubelet.Container{
			{Name: "main", Requests: map[string]int{gpuResource: 1}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		var paths []string
		for _, device := range pod.Containers[0].Grants[0].Response.Devices {
			paths = append(paths, device.ContainerPath)
		}
		return paths
	}
	if got := granted("first"); len(got) != 1 || !strings.HasPrefix(got[0], "/dev/nvidia") {
		t.Errorf("granted %v", got)
	}
	host.set(grant.Host{Nodes: nodes, ControlNodes: []string{"/dev/nvidiactl"}}, nil)
	r.agent.planNow(r.ctx)
	// The manager takes up the new host by itself, without a sign.
	for name := "p"; ; name += "p" {
		if got := granted(name); len(got) == 2 && got[0] == "/dev/nvidiactl" {
			return
		}
		if err := r.kubelet.DeletePod("test", name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStandbyLeavesTheHostAlone(t *testing.T) {
	t.Parallel()
	host := newFakeHost(withheld())
	claimed := make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.Host = host
		r.options.AcquireLock = func(ctx context.Context, _ func()) error {
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	r.agent.planNow(r.ctx)
	if got := host.prepared.Load(); got != 0 {
		t.Errorf("prepared %d times while standing by", got)
	}
	close(claimed)
	r.shows(8)
	if host.prepared.Load() == 0 {
		t.Error("serves without having prepared the host")
	}
}

// TestFirstListIsPrepared checks that a unit is Healthy for the kubelet only once it can be granted.
func TestFirstListIsPrepared(t *testing.T) {
	t.Parallel()
	host := newFakeHost(withheld("GPU-a"))
	r := newRig(t, func(r *rig) { r.options.Host = host })
	healthy := map[string]bool{}
	err := r.kubelet.Await(r.ctx, func(k simkubelet.Snapshot) bool {
		for _, device := range k.Resources[gpuResource].Devices {
			healthy[device.ID] = healthy[device.ID] || device.Healthy
		}
		return k.Resources[gpuResource].Allocatable == 4
	})
	if err != nil {
		t.Fatal(err)
	}
	for id, was := range healthy {
		if was && strings.HasPrefix(id, "GPU-a") {
			t.Errorf("%s was Healthy", id)
		}
	}
}

func TestCountObstacles(t *testing.T) {
	t.Parallel()
	got := countObstacles(map[string]string{"GPU-a": "x", "GPU-b": "x", "GPU-c": "y"})
	if diff := cmp.Diff(map[string]int{"x": 2, "y": 1}, got); diff != "" {
		t.Error(diff)
	}
}

// stuckHost ends like a Host whose driver does not answer.
type stuckHost struct{ fakeHost }

func (h stuckHost) Watch(ctx context.Context, changed func()) error {
	if err := h.fakeHost.Watch(ctx, changed); err != nil {
		return err
	}
	return errors.New("abandoned the CDI specs")
}

func TestStuckHostIsLeftBehind(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.options.Host = stuckHost{newFakeHost(withheld())} })
	r.shows(8)
}
