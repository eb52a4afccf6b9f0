package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

// fakeDRA is an API server that stores each offer at once, unless it is set to be slow.
type fakeDRA struct {
	mu        sync.Mutex
	offer     []resourceapi.ResourceSlice
	offers    int
	asked     int    // how often Allocated was called
	first     string // the devices of the first offer that had some
	written   time.Time
	state     dra.DriverState
	without   dra.Features
	allocated map[string][]string
	err       error
}

func (f *fakeDRA) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (f *fakeDRA) Publish(offer []resourceapi.ResourceSlice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.offer, f.written = offer, time.Now()
	f.offers++
	if f.first == "" {
		f.first = f.names()
	}
}

func (f *fakeDRA) State() dra.DriverState {
	f.mu.Lock()
	defer f.mu.Unlock()
	state := f.state
	state.Registered, state.Written, state.Without = true, f.written, f.without
	return state
}

func (f *fakeDRA) Allocated(context.Context) (map[string][]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return maps.Clone(f.allocated), f.err
}

func (f *fakeDRA) set(change func(f *fakeDRA)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

// devices lists the offered devices, with taints marked.
func (f *fakeDRA) devices() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.names()
}

func (f *fakeDRA) names() string {
	var names []string
	for _, slice := range f.offer {
		for _, d := range slice.Spec.Devices {
			name := d.Name
			for _, taint := range d.Taints {
				_, key, _ := strings.Cut(taint.Key, "/")
				name += "(" + key + ")"
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// memory is a state file that outlives agents.
type memory struct {
	mu   sync.Mutex
	data []byte
}

func (m *memory) Read(_ string, value any) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.data == nil {
		return false, nil
	}
	return true, json.Unmarshal(m.data, value)
}

func (m *memory) WriteOrForget(_ string, value any) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.data, err = json.Marshal(value)
	return err
}

func newDRARig(t *testing.T, f *fakeDRA, p sharing.Profile, adjust ...func(*rig)) *rig {
	return newRig(t, func(r *rig) {
		for _, change := range adjust {
			change(r)
		}
		r.options.Kubelet = r.sight
		r.options.DRA, r.options.ClaimCalls = draOptions(r, f, &memory{}), nodemetrics.NewClaimCalls()
		r.startWith(p)
	})
}

func draOptions(r *rig, f *fakeDRA, store claims.Store) drapath.Options {
	return drapath.Options{
		Driver: f, Quiet: time.Millisecond,
		Claims: claims.NewTable(claims.Options{Store: store, Driver: dra.DriverName, Holders: r.sight.Held}),
		Node:   func() dra.Node { return dra.Node{Name: "node", Driver: dra.DriverName} },
	}
}

func draProfile(replicas int) sharing.Profile {
	p := profile(replicas)
	p.DRA.All = true
	return p
}

func (r *rig) awaitOffer(f *fakeDRA, want string) {
	r.t.Helper()
	r.await("offered: "+want, func() bool { return f.devices() == want })
}

func shareClaim(uid, device string) dra.Claim {
	return dra.Claim{UID: uid, Namespace: "ns", Name: uid, Results: []dra.Result{{Request: "r", Device: device, ShareID: uid, Shares: 1}}}
}

// TestPathToDRAAndBack moves a resource from the device plugin to DRA and back while a pod and a claim use it.
// Neither is disturbed, and each unit moves when it is free.
func TestPathToDRAAndBack(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newDRARig(t, f, profile(4))
	r.shows(8)
	r.awaitOffer(f, "")
	r.addPod("slice", 1) // Of a.
	r.policy.set(draProfile(4), nil)
	r.awaitOffer(f, "gpu-b-ts")
	r.shows(0)
	if err := r.options.DRA.Claims.Prepare(r.ctx, shareClaim("early", "gpu-a-ts")); err == nil {
		t.Error("a claim got a share of a GPU that the device plugin has given away")
	}
	r.must(r.options.DRA.Claims.Unprepare(shareClaim("early", "gpu-a-ts")))
	r.deletePod("slice")
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	c := shareClaim("1", "gpu-b-ts")
	r.must(r.options.DRA.Claims.Prepare(r.ctx, c))
	f.set(func(f *fakeDRA) { f.allocated = map[string][]string{"1": {"gpu-b-ts"}, "2": {"gpu-a-ts"}} }) // One claim is on its way.
	r.policy.set(profile(4), nil)
	r.awaitOffer(f, "gpu-b-ts(leaving)")
	r.await("gpu-a leaves DRA", func() bool { return r.options.DRA.Claims.View().Paths["gpu-a"] == units.LeavingDRA })
	if got := r.agent.view.status(r.ctx).DRA; got == nil || !got.Registered || len(got.Claims) != 1 || len(got.Refused) != 0 {
		t.Errorf("status %+v", got)
	}
	late := shareClaim("2", "gpu-a-ts")
	r.must(r.options.DRA.Claims.Prepare(r.ctx, late)) // It was given away before it left.
	r.must(r.options.DRA.Claims.Unprepare(late))
	r.shows(0)
	f.set(func(f *fakeDRA) { f.allocated = map[string][]string{"1": {"gpu-b-ts"}} })
	r.shows(4)
	r.must(r.options.DRA.Claims.Unprepare(c))
	f.set(func(f *fakeDRA) { f.allocated, f.err = nil, errors.New("no API server") })
	f.set(func(f *fakeDRA) { f.err = nil })
	r.shows(8)
	r.awaitOffer(f, "")
	if got := r.options.DRA.Claims.View().Paths; len(got) != 0 {
		t.Errorf("paths %v", got)
	}
}

// TestLateClaim has a scheduler allocate devices that are the device plugin's again. The plugin gives them up for
// that claim alone, once no pod has them, and gets them back afterwards.
func TestLateClaim(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newDRARig(t, f, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	r.policy.set(profile(4), nil)
	r.shows(8)
	r.addPod("slice", 1) // Of a.
	late, free := shareClaim("1", "gpu-a-ts"), shareClaim("2", "gpu-b-ts")
	prepare := func(c dra.Claim) error { return r.options.DRA.Claims.Prepare(r.ctx, c) }
	for _, c := range []dra.Claim{late, free} {
		if err := prepare(c); err == nil || !strings.Contains(err.Error(), "device plugin") {
			t.Fatalf("claim %s: %v", c, err)
		}
	}
	r.await("prepared", func() bool { return prepare(free) == nil })
	r.awaitOffer(f, "gpu-a-ts(leaving) gpu-b-ts(leaving)")
	r.shows(0)
	if err := prepare(late); err == nil {
		t.Fatal("a GPU is given twice")
	}
	if pods := r.kubelet.Snapshot().Pods; len(pods) != 1 || pods[0].Phase != simkubelet.Running {
		t.Errorf("pods %+v", pods)
	}
	r.must(r.options.DRA.Claims.Unprepare(free))
	r.shows(4)
	r.deletePod("slice")
	r.await("prepared", func() bool { return prepare(late) == nil })
	r.must(r.options.DRA.Claims.Unprepare(late))
	r.shows(8)
	if err := prepare(late); err == nil { // And ends before it had anything.
		t.Fatal("a GPU of the device plugin is given to a claim at once")
	}
	r.await("given up", func() bool { return r.options.DRA.Claims.View().Paths["gpu-a"] != units.Plugin })
	r.must(r.options.DRA.Claims.Unprepare(late))
	r.shows(8)
	r.awaitOffer(f, "")
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestDRASharingMode changes the sharing mode of DRA's units: a claim's device stays listed, and no other device
// of its GPU can be allocated.
func TestDRASharingMode(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newDRARig(t, f, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	c := shareClaim("1", "gpu-a-ts")
	r.must(r.options.DRA.Claims.Prepare(r.ctx, c))
	p := draProfile(4)
	p.TimeSlicing = nil
	r.policy.set(p, nil)
	r.awaitOffer(f, "gpu-a gpu-a-ts(leaving) gpu-b")
	whole := dra.Claim{UID: "2", Results: []dra.Result{{Device: "gpu-a"}}}
	if err := r.options.DRA.Claims.Prepare(r.ctx, whole); err == nil || !strings.Contains(err.Error(), "claim ns/1 still has gpu-a-ts") {
		t.Error(err)
	}
	r.must(r.options.DRA.Claims.Unprepare(c))
	r.must(r.options.DRA.Claims.Prepare(r.ctx, whole))
	r.awaitOffer(f, "gpu-a gpu-b")
}

// TestDRAFault checks that a device is tainted while its GPU is faulty, and its claim is reported as unhealthy.
func TestDRAFault(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newDRARig(t, f, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	c := shareClaim("1", "gpu-b-ts")
	r.must(r.options.DRA.Claims.Prepare(r.ctx, c))
	r.node.set(gpus("", "XID 79"), nil)
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts(fault)")
	r.await("told", func() bool {
		got, _ := r.options.DRA.Claims.Devices()
		return len(got) == 1 && !got[0].Healthy && got[0].Reason == "XID 79"
	})
	r.must(r.options.DRA.Claims.Prepare(r.ctx, c)) // It has it already.
	if err := r.options.DRA.Claims.Prepare(r.ctx, shareClaim("2", "gpu-b-ts")); err == nil || !strings.Contains(err.Error(), "XID 79") {
		t.Error(err)
	}
	r.node.set(gpus("", ""), nil)
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
}

// TestDRAOrphans checks that a claim is removed only if it is over and the kubelet no longer has it.
func TestDRAOrphans(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{allocated: map[string][]string{"1": {"gpu-a-ts"}}}
	r := newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		r.options.DRA = draOptions(r, f, &memory{})
		r.options.DRA.Orphans = 5 * time.Millisecond
		r.startWith(draProfile(4))
	})
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	f.set(func(f *fakeDRA) { f.err = errors.New("no API server") })
	for _, c := range []dra.Claim{shareClaim("1", "gpu-a-ts"), shareClaim("2", "gpu-a-ts")} {
		r.must(r.options.DRA.Claims.Prepare(r.ctx, c))
	}
	if err := r.options.DRA.Claims.Prepare(r.ctx, dra.Claim{UID: "3", Results: []dra.Result{{Device: "gpu-a"}}}); err == nil {
		t.Error("a GPU was given beside its shares")
	}
	r.await("all there", func() bool { v := r.options.DRA.Claims.View(); return len(v.Claims) == 2 && len(v.Refused) == 1 })
	f.set(func(f *fakeDRA) { f.err = nil })
	r.await("only the first", func() bool {
		v := r.options.DRA.Claims.View()
		return len(v.Claims) == 1 && v.Claims[0].UID == "1" && len(v.Refused) == 0
	})
}

// TestWithoutDRA checks that a profile's dra section changes nothing without --dra.
func TestWithoutDRA(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.startWith(draProfile(4)) })
	r.shows(8)
	r.awaitBody("/api/v1/status", 200, "was started without --dra")
}

// TestDRAStorm flips between the device plugin and DRA while pods and claims come and go. A ledger checks that
// both never allocate the same GPU.
func TestDRAStorm(t *testing.T) {
	t.Parallel()
	steps := repeat.Times(750, 3000)
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			f, random := &fakeDRA{}, rand.New(rand.NewPCG(seed, 2))
			r := newDRARig(t, f, profile(4), func(r *rig) {
				// Pods come while lists shrink. The kubelet shows the chosen devices only at the end of an admission,
				// so admissions must be shorter than RemovalDelay, also on a busy machine.
				timing := pluginTiming()
				timing.RemovalDelay = 2 * time.Second
				r.options.Plugin = plugin.NewManager(plugin.Options{Dir: r.dir, Kubelet: r.sight, Logger: r.options.Logger, Timing: timing})
			})
			r.shows(8)
			pods, given := map[string]bool{}, map[string]dra.Claim{}
			for step := range steps {
				switch random.IntN(7) {
				case 0:
					r.policy.set([]sharing.Profile{profile(4), draProfile(4), draProfile(1), profile(2)}[random.IntN(4)], nil)
				case 1, 2:
					name := fmt.Sprint("p", random.IntN(6))
					if pods[name] {
						r.deletePod(name)
						delete(pods, name)
					} else if r.kubelet.Snapshot().Resources[gpuResource].Allocatable > 0 {
						pod := simkubelet.Pod{Namespace: "ns", Name: name, Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpuResource: 1}}}}
						_, err := r.kubelet.AddPod(r.ctx, pod)
						if pods[name] = err == nil; err != nil && strings.Contains(err.Error(), "Dynamic Resource") {
							t.Errorf("step %d: a pod is lost: %v", step, err)
						}
					}
				case 3, 4:
					uid := fmt.Sprint("c", random.IntN(6))
					if c, has := given[uid]; has {
						r.must(r.options.DRA.Claims.Unprepare(c))
						delete(given, uid)
					} else if offered := strings.Fields(f.devices()); len(offered) > 0 {
						// The scheduler avoids tainted devices, but may be late.
						c := shareClaim(uid, strings.TrimSuffix(offered[random.IntN(len(offered))], "(leaving)"))
						if random.IntN(8) == 0 { // Or very late.
							c = shareClaim(uid, []string{"gpu-a-ts", "gpu-b"}[random.IntN(2)])
						}
						// A refused claim waits, and ends without a device.
						given[uid] = c
						_ = r.options.DRA.Claims.Prepare(r.ctx, c)
					}
				case 6:
					for _, c := range given {
						_ = r.options.DRA.Claims.Prepare(r.ctx, c) // The kubelet does so again and again.
					}
				case 5:
					r.agent.planNow(r.ctx) // So that steps meet the loop at different moments.
				}
				byClaim := r.options.DRA.Claims.View().HeldUnits()
				for _, pod := range r.kubelet.Snapshot().Pods {
					for _, container := range pod.Containers {
						for _, grant := range container.Grants {
							unit, _, _ := sharing.ParseDeviceID(grant.Devices[0])
							if c, both := byClaim[strings.ToLower(unit)]; both {
								t.Fatalf("step %d: pod %s and claim %s have %s", step, pod.Name, c, unit)
							}
						}
					}
				}
			}
			for name := range pods {
				r.deletePod(name)
			}
			for _, c := range given {
				r.must(r.options.DRA.Claims.Unprepare(c))
			}
			r.policy.set(draProfile(4), nil)
			r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
			r.policy.set(profile(4), nil)
			r.shows(8)
			r.awaitOffer(f, "")
			if violations := r.kubelet.Snapshot().Violations; len(violations) > 0 {
				t.Error(violations)
			}
		})
	}
}

// noEntry is a host without a CDI entry for one unit.
type noEntry struct {
	idle
	unit string
}

func (h noEntry) Prepare(grants sharing.Grants, _ []sharing.GPU) grant.Host {
	host := grant.Host{}
	if grants.Claims {
		host.NoCDIEntry = map[string]string{h.unit: "it has no CDI entry: disk full"}
	}
	return host
}

// TestDRAWithoutCDIEntry checks that a unit without a CDI entry is withheld from claims.
func TestDRAWithoutCDIEntry(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newRig(t, func(r *rig) {
		r.options.Kubelet, r.options.Host = r.sight, noEntry{unit: "GPU-b"}
		r.options.DRA = draOptions(r, f, &memory{})
		r.startWith(draProfile(4))
	})
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts(fault)")
	if err := r.options.DRA.Claims.Prepare(r.ctx, shareClaim("1", "gpu-b-ts")); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Error(err)
	}
}
