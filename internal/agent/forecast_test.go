package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/release"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// labelled is a policy with profiles for other values of a label.
type labelled struct {
	fakePolicy
	profiles map[string]sharing.Profile
}

func (l labelled) WithLabel(_, value string) (configs.SelectedProfile, error) {
	profile, found := l.profiles[value]
	switch {
	case value == "pending":
		return configs.SelectedProfile{}, fmt.Errorf("ConfigMap gpu/profiles: %w", configs.ErrPending)
	case !found:
		return configs.SelectedProfile{}, errors.New("there is no such profile\nand no other")
	}
	return configs.Config{Profile: profile}.SelectedFrom("fake", value, nil), nil
}

// foreseen is the program's forecast. It asks again while a busy machine makes it fail.
func foreseen(t *testing.T, r *rig, value string) (f nodereport.Forecast) {
	t.Helper()
	for {
		code, body := r.get("/api/v1/forecast?label=l&value=" + value)
		f = nodereport.Forecast{}
		err := json.Unmarshal([]byte(body), &f)
		slow := code == http.StatusServiceUnavailable || f.Unknown == "what pods hold cannot be read" || strings.Contains(f.Unknown, "deadline")
		switch {
		case slow && r.ctx.Err() == nil:
		case code != http.StatusOK || err != nil:
			t.Fatalf("%d %s (%v)", code, body, err)
		default:
			return f
		}
	}
}

// shares is a profile with this many shares of each GPU, under that name.
func shares(replicas int, rename string) sharing.Profile {
	p := profile(replicas)
	p.TimeSlicing[0].Rename = rename
	return p
}

// TestForecast checks that a node's forecast comes true: first with its pods, then without them.
func TestForecast(t *testing.T) {
	t.Parallel()
	type resources = []nodereport.ForecastResource
	of := func(name string, before, lowest, then, after int) nodereport.ForecastResource {
		return nodereport.ForecastResource{Name: name, Before: before, Lowest: lowest, Then: then, After: after}
	}
	for _, test := range []struct {
		name, node string
		from, to   sharing.Profile
		pods       []simkubelet.Pod
		resources  resources
		// busy has the beginning of each unit in the way: index, pods and reason.
		busy    []string
		layouts []nodereport.ForecastLayout
	}{
		{
			"more shares", "t4x2", shares(4, ""), shares(8, ""), []simkubelet.Pod{migPod("a", gpuResource, 1)},
			resources{of(gpuResource, 8, 8, 16, 16)}, nil, nil,
		},
		{"fewer shares", "t4x2", shares(8, ""), shares(4, ""), []simkubelet.Pod{migPod("a", gpuResource, 1)}, resources{of(gpuResource, 16, 8, 8, 8)}, nil, nil},
		{
			"exclusive", "t4x2", shares(4, ""), shares(1, ""), []simkubelet.Pod{migPod("a", gpuResource, 1)},
			resources{of(gpuResource, 8, 0, 1, 2)}, []string{"0 [default/a] "}, nil,
		},
		{
			"shared under the same name", "t4x2", shares(1, ""), shares(4, ""), []simkubelet.Pod{migPod("a", gpuResource, 1)},
			resources{of(gpuResource, 2, 2, 5, 8)}, []string{"0 [default/a] "}, nil,
		},
		{
			"shared under another name", "t4x2", shares(1, ""), shares(4, "nvidia.com/gpu.shared"), []simkubelet.Pod{migPod("a", gpuResource, 1)},
			resources{of(gpuResource, 2, 0, 0, 0), of("nvidia.com/gpu.shared", 0, 0, 4, 8)}, []string{"0 [default/a] "}, nil,
		},
		{
			"partitions", "h100+all-1g.10gb", migProfile(layoutNamed("all-1g.10gb")), migProfile(layoutNamed("all-balanced")),
			[]simkubelet.Pod{migPod("a", oneG, 1), migPod("b", oneG, 1), migPod("c", oneG, 1), migPod("d", oneG, 1), migPod("e", oneG, 1)},
			resources{of(oneG, 7, 2, 2, 2), of("nvidia.com/mig-2g.20gb", 0, 0, 0, 1), of(threeG, 0, 0, 0, 1)},
			[]string{"0:", "0:", "0:"}, []nodereport.ForecastLayout{{Kept: 2, Destroyed: 5, Made: 2}},
		},
		{
			"MIG mode", "h100", shares(1, ""), migProfile(layoutNamed("all-balanced")), []simkubelet.Pod{migPod("a", gpuResource, 1)},
			resources{of(gpuResource, 1, 0, 0, 0), of(oneG, 0, 0, 0, 2), of("nvidia.com/mig-2g.20gb", 0, 0, 0, 1), of(threeG, 0, 0, 0, 1)},
			[]string{"0 [default/a] the GPU is in use as a whole by default/a"}, []nodereport.ForecastLayout{{Made: 4}},
		},
		{
			"whole GPUs again", "h100+all-balanced", migProfile(layoutNamed("all-balanced")), migProfile(layoutNamed("all-disabled")), nil,
			resources{of(gpuResource, 0, 0, 1, 1), of(oneG, 2, 0, 0, 0), of("nvidia.com/mig-2g.20gb", 1, 0, 0, 0), of(threeG, 1, 0, 0, 0)},
			nil, []nodereport.ForecastLayout{{Destroyed: 4}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			timing := plugin.Timing{RemovalDelay: 100 * time.Millisecond, ListInterval: time.Millisecond, StopAfter: 2 * time.Second}
			c := newTimedMIGRig(t, test.node, test.from, timing, func(o *Options) {
				o.ConfigSource = labelled{o.ConfigSource.(fakePolicy), map[string]sharing.Profile{"new": test.to}}
			})
			for _, r := range test.resources {
				c.awaitAllocatable(r.Name, r.Before)
			}
			for _, pod := range test.pods {
				if _, err := c.kubelet.AddPod(c.ctx, pod); err != nil {
					t.Fatal(err)
				}
			}
			for _, pod := range test.pods { // Until the kubelet names it.
				c.awaitBody("/api/v1/status", http.StatusOK, fmt.Sprintf("%q: %q", "pod", pod.Name))
			}
			f := foreseen(t, c.rig, "new")
			if diff := cmp.Diff(test.resources, f.Resources); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			var busy []string
			for _, u := range f.Busy {
				busy = append(busy, fmt.Sprint(u.Index, " ", u.Pods, " ", u.Reason))
			}
			if !slices.EqualFunc(busy, test.busy, strings.HasPrefix) {
				t.Errorf("busy %q, want %q", busy, test.busy)
			}
			for i := range f.Layouts {
				f.Layouts[i].GPU = ""
			}
			if diff := cmp.Diff(test.layouts, f.Layouts); diff != "" || f.Unfit != nil || f.Unknown != "" {
				t.Errorf("layouts (-want +got):\n%s%+v", diff, f)
			}
			c.policy.set(test.to, nil)
			for _, r := range f.Resources {
				c.awaitAllocatable(r.Name, r.Then)
			}
			for _, pod := range test.pods {
				if err := c.kubelet.DeletePod(pod.Namespace, pod.Name); err != nil {
					t.Fatal(err)
				}
			}
			for _, r := range f.Resources {
				c.awaitAllocatable(r.Name, r.After)
			}
		})
	}
}

// TestForecastOfWhatDoesNotFit checks that a node which would refuse a profile, or offer nothing, gives the
// reason and changes nothing, and that a node which cannot tell reports that.
func TestForecastOfWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	tooMany := layoutNamed("too-many")
	tooMany.Blocks = []sharing.LayoutBlock{{All: true, Layout: mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: mig.Profile{Compute: 3, Slices: 3, MemoryGB: 40}, Count: 3}}}}}
	nothing := shares(4, "")
	first, err := sharing.ParseSelector("0")
	if err != nil {
		t.Fatal(err)
	}
	nothing.Exclude = []sharing.Selector{first}
	unmatched := shares(4, "")
	unmatched.TimeSlicing = append(unmatched.TimeSlicing, sharing.ReplicatedResource{Path: "s[1]", Resource: threeG, Replicas: 2})
	c := newTimedMIGRig(t, "h100", shares(4, ""), plugin.Timing{}, func(o *Options) {
		o.ConfigSource = labelled{o.ConfigSource.(fakePolicy), map[string]sharing.Profile{"too-many": migProfile(tooMany), "nothing": nothing, "unmatched": unmatched}}
	})
	c.awaitAllocatable(gpuResource, 4)
	stays := []nodereport.ForecastResource{{Name: gpuResource, Before: 4, Lowest: 4, Then: 4, After: 4}}
	for value, want := range map[string][]string{
		"none":     {"there is no such profile", "and no other"},
		"too-many": {`GPU 0: MIG layout "too-many": `},
		"nothing":  {"the node would have nothing to offer"},
	} {
		f := foreseen(t, c.rig, value)
		if diff := cmp.Diff(stays, f.Resources); diff != "" || len(f.Unfit) != len(want) || f.Unknown != "" || len(f.Layouts) > 0 {
			t.Errorf("%s: %+v\n%s", value, f, diff)
			continue
		}
		for i := range want {
			if !strings.Contains(f.Unfit[i], want[i]) {
				t.Errorf("%s: %q, want %q", value, f.Unfit[i], want[i])
			}
		}
	}
	if f := foreseen(t, c.rig, "unmatched"); f.Unfit != nil || len(f.Warnings) != 1 || f.Warnings[0] != "s[1]: no unit of "+threeG+" on this node" {
		t.Errorf("unmatched: %+v", f)
	}
	if f := foreseen(t, c.rig, "pending"); f.Unknown != "the profile is ConfigMap gpu/profiles: not known yet" || f.Resources == nil {
		t.Errorf("pending: %+v", f)
	}
	for _, query := range []string{"", "?label=l", "?value=v"} {
		if code, body := c.get("/api/v1/forecast" + query); code != http.StatusBadRequest {
			t.Errorf("%q: %d %s", query, code, body)
		}
	}
}

// TestForecastBeforeServing checks that a program that does not serve the node gives no forecast.
func TestForecastBeforeServing(t *testing.T) {
	t.Parallel()
	a := newAgent(withIdle(Options{Plugin: plugin.NewManager(plugin.Options{Dir: t.TempDir()}), ConfigSource: fakePolicy{newInput(profile(4), nil)}}))
	recorder := httptest.NewRecorder()
	a.web.Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/api/v1/forecast?label=l&value=v", nil))
	if body := recorder.Body.String(); !strings.Contains(body, `"unknown": "this Virgate does not serve the node"`) {
		t.Error(body)
	}
}

// heldBy is a kubelet that returns these allocations, or an error.
type heldBy struct {
	plugin.Kubelet
	held []sharing.Allocation
	err  error
}

func (h heldBy) Held(context.Context) ([]sharing.Allocation, error) { return h.held, h.err }

// TestForecastGoesByTheNode checks that units that are released, not grantable or on DRA are not offered, that
// known warnings are not repeated, and that unreadable state is not guessed.
func TestForecastGoesByTheNode(t *testing.T) {
	t.Parallel()
	withDRA, layout, reset := profile(4), migProfile(layoutNamed("all-balanced")), migProfile(layoutNamed("all-balanced"))
	withDRA.DRA.Resources, reset.MIG.Reset = []string{gpuResource}, true
	dynamic := migProfile(sharing.MIGConfig{Manage: true})
	dynamic.DRA.All, dynamic.DRA.DynamicMIG = true, true
	odd := profile(4)
	odd.TimeSlicing = append(odd.TimeSlicing, sharing.ReplicatedResource{Path: "s[1]", Resource: threeG, Replicas: 2})
	profiles := map[string]sharing.Profile{"shares": profile(4), "dra": withDRA, "layout": layout, "reset": reset, "odd": odd, "dynamic": dynamic}
	geometry, _ := mig.GeometryOf(0x2330)
	for _, test := range []struct {
		name, value string
		change      func(a *agent, s *state)
		state       sharing.MIGState
		then        int // Devices of gpuResource.
		want        string
	}{
		{name: "as it is", value: "shares", then: 8},
		{name: "released", value: "shares", then: 4, change: func(a *agent, s *state) { released(a, s, "GPU-a") }},
		{name: "not granted", value: "shares", then: 4, change: func(_ *agent, s *state) { s.host.Obstacles = map[string]string{"GPU-b": "no device node"} }},
		{name: "by DRA", value: "dra", change: servingClaims},
		{name: "by DRA, held as a share", value: "dra", want: "GPU-b", change: func(a *agent, s *state) {
			servingClaims(a, s)
			a.samples.kubelet = heldBy{held: []sharing.Allocation{{Resource: gpuResource, Devices: []string{"GPU-b::1"}}}}
		}},
		{name: "without DRA", value: "dra", then: 8},
		{name: "a warning", value: "odd", then: 8, want: "s[1]: no unit of " + threeG + " on this node"},
		{name: "a known warning", value: "odd", then: 8, change: func(_ *agent, s *state) {
			s.plan.Warnings = []string{"s[1]: no unit of " + threeG + " on this node"}
		}},
		{name: "GPUs not read", value: "shares", want: "its GPUs cannot be read: the driver hangs", change: func(_ *agent, s *state) { s.unread = errors.New("the driver hangs") }},
		{name: "no plan", value: "shares", want: "it has no plan yet", change: func(_ *agent, s *state) { s.planned = false }},
		{name: "paused", value: "shares", want: forMIGText, change: func(_ *agent, s *state) { s.pause = forMIG }},
		{name: "holders unknown", value: "shares", want: "what pods hold cannot be read", change: func(a *agent, _ *state) { a.samples.kubelet = heldBy{err: errors.New("no kubelet")} }},
		{name: "partitions not read", value: "layout", want: "GPU 0: no driver", change: func(a *agent, _ *state) { a.mig.Partitioner = idle{} }},
		{name: "a layout", value: "layout", state: sharing.MIGState{Geometry: geometry}},
		{name: "a layout that takes a reboot", value: "reset", state: sharing.MIGState{Geometry: geometry, NeedsReboot: true}, want: "GPU 0: its MIG mode changes with a reset (mig.reset) or a reboot alone", change: mayReset},
		{name: "a layout that takes a reset", value: "layout", state: sharing.MIGState{Geometry: geometry, Enabled: true}, want: "GPU 0: its MIG mode changes with a reset (mig.reset) or a reboot alone"},
		{name: "a layout with a reset", value: "reset", then: 2, state: sharing.MIGState{Geometry: geometry, Enabled: true}, want: "GPU 0 is reset before it has its layout", change: mayReset},
		{name: "a layout with a reset, without the right", value: "reset", state: sharing.MIGState{Geometry: geometry, Enabled: true}, want: "GPU 0: its MIG mode changes with a reset (mig.reset) or a reboot alone"},
		{name: "divided on demand", value: "dynamic", state: sharing.MIGState{Geometry: geometry}, change: func(a *agent, s *state) {
			servingClaims(a, s)
			for i := range s.gpus {
				s.gpus[i].MIGCapable, s.gpus[i].Architecture = true, "hopper"
			}
		}},
		{name: "a layout, released", value: "layout", state: sharing.MIGState{Geometry: geometry, NeedsReboot: true}, change: func(a *agent, s *state) {
			released(a, s, "GPU-a", "GPU-b")
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := newAgent(withIdle(Options{
				Plugin: plugin.NewManager(plugin.Options{}), ConfigSource: labelled{fakePolicy{newInput(profile(1), nil)}, profiles},
				Kubelet: heldBy{}, Partitioner: stateOnly{test.state},
			}))
			a.serving.Store(true)
			s := &state{planned: true, gpus: gpus("", "")}
			if test.change != nil {
				test.change(a, s)
			}
			a.state.Store(s)
			f := newForecaster(a).forecast(t.Context(), "l", test.value)
			then := 0
			for _, r := range f.Resources {
				if r.Name == gpuResource {
					then = r.Then
				}
			}
			said := f.Unknown + strings.Join(slices.Concat(f.Unfit, f.Warnings), "; ")
			for _, u := range f.Busy {
				said += u.Unit
			}
			if test.value == "dra" && a.DRA.Driver == nil {
				said = ""
			}
			if then != test.then && f.Unfit == nil || !strings.Contains(said, test.want) || test.want == "" && said != "" {
				t.Errorf("%d devices, want %d; %q, want %q\n%+v", then, test.then, said, test.want, f)
			}
		})
	}
}

// released has the GPUs released and adds the plan's warnings about them.
func released(a *agent, s *state, gpus ...string) {
	f := &fakeReleaser{}
	for _, gpu := range gpus {
		f.kept = append(f.kept, release.Release{GPU: gpu, State: release.Released})
	}
	a.releases.Releaser, a.releases.Store = f, f
	a.releases.Load(context.Background())
	for _, r := range a.releases.Reservations() {
		s.plan.Warnings = append(s.plan.Warnings, r.Text)
	}
}

func mayReset(a *agent, _ *state) {
	a.Releases.Reset = func(context.Context, string) error { return nil }
}

func servingClaims(a *agent, _ *state) {
	a.DRA = drapath.Options{Driver: &fakeDRA{}, Claims: claims.NewTable(claims.Options{}), Node: func() dra.Node { return dra.Node{Name: "node", Driver: "gpu.virgate.test"} }}
	a.dra = drapath.New(a.DRA, drapath.Deps{Partitioner: a.Partitioner, Replan: a.requestPlan})
}

// stateOnly is a driver whose GPUs are all partitioned so.
type stateOnly struct{ state sharing.MIGState }

func (s stateOnly) State(context.Context, string) (sharing.MIGState, error) { return s.state, nil }

func (stateOnly) Apply(context.Context, string, mig.Step) error { return errors.New("not asked for") }
