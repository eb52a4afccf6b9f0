package agent

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

// onDemandRig is a node whose partitions are made for claims.
type onDemandRig struct {
	*migRig
	api    *fakeDRA
	claims *claims.Table
}

func onDemandProfile() sharing.Profile {
	p := migProfile(sharing.MIGConfig{Manage: true})
	p.DRA = sharing.DRAConfig{All: true, DynamicMIG: true}
	return p
}

func newOnDemandRig(t *testing.T, node string, adjust ...func(*Options)) *onDemandRig {
	return newOnDemandRigOn(t, node, onDemandProfile(), &fakeDRA{}, &memory{}, adjust...)
}

// newOnDemandRigOn starts with the store of an earlier run, under this profile and API server.
func newOnDemandRigOn(t *testing.T, node string, profile sharing.Profile, api *fakeDRA, store *memory, adjust ...func(*Options)) *onDemandRig {
	o := &onDemandRig{api: api}
	o.migRig = newTimedMIGRig(t, node, profile, pluginTiming(), append(adjust, func(options *Options) {
		o.claims = claims.NewTable(claims.Options{Store: store, Driver: dra.DriverName, Holders: options.Kubelet.Held})
		options.DRA = drapath.Options{
			Driver: o.api, Quiet: time.Millisecond, Claims: o.claims,
			Node: func() dra.Node { return dra.Node{Name: "node", Driver: dra.DriverName} },
		}
	})...)
	return o
}

// wholeGPU is the name of the node's first GPU as a device.
func wholeGPU(t *testing.T, node string) string {
	t.Helper()
	sim, err := simnode.New(node)
	if err != nil {
		t.Fatal(err)
	}
	return strings.ToLower(sim.GPUs()[0].UUID)
}

// device is the name of the GPU's device at the place; "" is the whole GPU.
func (o *onDemandRig) device(gpu int, partition string) string {
	name := strings.ToLower(o.sim.GPUs()[gpu].UUID)
	if partition != "" {
		name += "-" + partition
	}
	return name
}

func (o *onDemandRig) awaitOffered(devices ...string) {
	o.t.Helper()
	o.await(fmt.Sprint("offered: ", devices), func() bool {
		offered := strings.Fields(o.api.devices())
		return !slices.ContainsFunc(devices, func(d string) bool { return !slices.Contains(offered, d) })
	})
}

func (o *onDemandRig) scan() []sharing.GPU {
	o.t.Helper()
	gpus, err := nvml.Scan(o.sim)
	o.must(err)
	return gpus
}

// at is the UUID of the partition at the device's place; "" without one.
func (o *onDemandRig) at(device string) string {
	for id, named := range dra.UnitNames(o.scan()) {
		if named.Name == device {
			return id
		}
	}
	return ""
}

func exclusiveClaim(uid string, devices ...string) dra.Claim {
	c := dra.Claim{UID: uid, Namespace: "ns", Name: uid}
	for i, device := range devices {
		c.Results = append(c.Results, dra.Result{Request: fmt.Sprint("r", i), Device: device})
	}
	return c
}

func (o *onDemandRig) prepare(c dra.Claim) { o.t.Helper(); o.must(o.claims.Prepare(o.ctx, c)) }

func (o *onDemandRig) unprepare(list ...dra.Claim) {
	o.t.Helper()
	for _, c := range list {
		o.must(o.claims.Unprepare(c))
	}
}

func (o *onDemandRig) refuses(c dra.Claim, want string) {
	o.t.Helper()
	if err := o.claims.Prepare(o.ctx, c); err == nil || !strings.Contains(err.Error(), want) {
		o.t.Errorf("claim %s: %v, want %q", c, err, want)
	}
}

// TestPartitionsOnDemand checks that claims divide a GPU: a claim's partition is created, stays after the claim,
// and is removed when another claim needs the room. A partition in use by a claim is neither touched nor given
// twice, and the offer stays the same.
func TestPartitionsOnDemand(t *testing.T) {
	t.Parallel()
	o := newOnDemandRig(t, "h100")
	whole, small, medium, large := o.device(0, ""), o.device(0, "1g10gb-4"), o.device(0, "2g20gb-0"), o.device(0, "3g40gb-4")
	o.awaitOffered(whole, small, medium, large)
	offered := o.api.devices()
	first, second := exclusiveClaim("first", small), exclusiveClaim("second", medium)
	o.prepare(first)
	made := o.at(small)
	if made == "" {
		t.Fatalf("not made: %+v", o.scan())
	}
	o.prepare(second)
	o.prepare(first) // Again.
	if o.at(small) != made || o.at(medium) == "" {
		t.Errorf("%s is %s, was %s; %s is %s", small, o.at(small), made, medium, o.at(medium))
	}
	o.unprepare(first)
	calls := o.sim.Calls("DeviceCreateGpuInstanceWithPlacement")
	o.prepare(exclusiveClaim("reuses", small))
	if o.at(small) != made || o.sim.Calls("DeviceCreateGpuInstanceWithPlacement") != calls {
		t.Error("an idle partition was not used again")
	}
	o.unprepare(exclusiveClaim("reuses", small))
	o.prepare(exclusiveClaim("large", large))
	if o.at(small) != "" || o.at(large) == "" || o.at(medium) == "" {
		t.Errorf("partitions %+v", o.scan()[0].Partitions)
	}
	o.unprepare(exclusiveClaim("large", large), second)
	o.prepare(exclusiveClaim("whole", whole))
	if gpu := o.scan()[0]; gpu.MIG {
		t.Errorf("the GPU is not whole: %+v", gpu)
	}
	// For a moment, a GPU whose MIG mode changes may seem faulty.
	o.await("offered as before", func() bool { return o.api.devices() == offered })
	// The scheduler does this only if its view is out of date.
	o.refuses(first, "claim ns/whole has "+whole)
	o.unprepare(exclusiveClaim("whole", whole))
	o.prepare(first)
	o.refuses(exclusiveClaim("whole", whole), "claim ns/first has "+small+", beside which the GPU has no room")
	o.refuses(exclusiveClaim("large", large), "no room for "+large)
	o.refuses(exclusiveClaim("twice", medium, o.device(0, "4g40gb-0")), "no room")
	o.unprepare(exclusiveClaim("whole", whole), exclusiveClaim("large", large), exclusiveClaim("twice"))
	// Back to the device plugin, as far as the claim allows.
	o.policy.set(migProfile(sharing.MIGConfig{}), nil)
	o.awaitOffered(small + "(leaving)")
	o.unprepare(first)
	o.awaitAllocatable(oneG, 1)
	if paths := o.claims.View().Paths; len(paths) != 0 {
		t.Errorf("paths %v", paths)
	}
}

// TestOnDemandAfterRestart checks that a program offers at once what the last run offered.
func TestOnDemandAfterRestart(t *testing.T) {
	t.Parallel()
	whole := wholeGPU(t, "h100+all-balanced")
	store := &memory{data: fmt.Appendf(nil, `{"paths": {%q: "dra"}, "claims": [{"uid": "1", "namespace": "ns", "name": "1", "results": [{"device": %q}]}]}`, whole, whole+"-1g10gb-0")}
	o := newOnDemandRigOn(t, "h100+all-balanced", onDemandProfile(), &fakeDRA{}, store)
	o.await("offered", func() bool { return o.api.devices() != "" })
	o.api.set(func(f *fakeDRA) {
		if offered := f.first; !strings.Contains(offered, "7g80gb-0") || strings.Contains(offered, "(leaving)") {
			t.Errorf("first offered: %s", offered)
		}
	})
	if path := o.claims.View().Paths[whole]; path != units.DRA {
		t.Errorf("path %q", path)
	}
	o.prepare(exclusiveClaim("large", whole+"-3g40gb-4"))
}

// TestOnDemandAfterReboot checks a node that comes back without its partitions: each claim's own partition is
// created again, in any order of the pods, while the kubelet shows all claims at once.
func TestOnDemandAfterReboot(t *testing.T) {
	t.Parallel()
	whole := wholeGPU(t, "h100")
	small, large := exclusiveClaim("small", whole+"-1g10gb-4"), exclusiveClaim("large", whole+"-3g40gb-0")
	store := &memory{data: fmt.Appendf(nil, `{"paths": {%q: "dra"}, "claims": [
		{"uid": "small", "namespace": "ns", "name": "small", "results": [{"request": "r0", "device": %q}]},
		{"uid": "large", "namespace": "ns", "name": "large", "results": [{"request": "r0", "device": %q}]}]}`,
		whole, small.Results[0].Device, large.Results[0].Device)}
	o := newOnDemandRigOn(t, "h100", onDemandProfile(), &fakeDRA{}, store)
	o.awaitOffered(small.Results[0].Device, large.Results[0].Device)
	for _, c := range []dra.Claim{large, small, large} {
		o.prepare(c)
	}
	for _, c := range []dra.Claim{small, large} {
		if o.at(c.Results[0].Device) == "" {
			t.Errorf("%s is not made: %+v", c.Results[0].Device, o.scan())
		}
	}
	o.refuses(exclusiveClaim("other", whole+"-4g40gb-0"), "no room")
}

// TestLateClaimOnDemand moves a GPU divided on demand to the device plugin while claims have parts that do not
// exist yet. These are created one after another, the plugin waits for their ends, and no other part is offered
// to claims.
func TestLateClaimOnDemand(t *testing.T) {
	t.Parallel()
	o := newOnDemandRig(t, "h100")
	small, large := o.device(0, "1g10gb-4"), o.device(0, "3g40gb-4")
	o.awaitOffered(small, large)
	first, second, overlaps := exclusiveClaim("first", small), exclusiveClaim("second", o.device(0, "2g20gb-0")), exclusiveClaim("overlaps", large)
	o.api.set(func(f *fakeDRA) { // The scheduler gave them away, the kubelet has not asked yet.
		f.allocated = map[string][]string{"first": {small}, "second": {second.Results[0].Device}, "overlaps": {large}}
	})
	o.policy.set(migProfile(sharing.MIGConfig{}), nil)
	o.await("leaving", func() bool {
		return o.claims.View().Paths[o.device(0, "")] == units.LeavingDRA && o.api.devices() == ""
	})
	o.prepare(first)
	o.await("said that it leaves", func() bool { return o.api.devices() == small+"(leaving)" })
	o.prepare(second)
	made := o.at(small)
	o.refuses(overlaps, "no room")
	o.unprepare(overlaps)
	if made == "" || o.at(small) != made || o.at(second.Results[0].Device) == "" {
		t.Errorf("partitions %+v", o.scan()[0].Partitions)
	}
	o.unprepare(first, second)
	o.api.set(func(f *fakeDRA) { f.allocated = nil })
	o.awaitAllocatable(oneG, 1)
	o.await("the device plugin's", func() bool { return len(o.claims.View().Paths) == 0 })
	// After that, nothing is created: the profile no longer has it.
	o.refuses(exclusiveClaim("later", large), "the node has no "+large+" now")
	o.unprepare(exclusiveClaim("later", large))
}

// TestLateClaimAfterRestart starts the program when the profile no longer divides GPUs on demand, but claims have
// parts that do not exist: just allocated, or gone since a reboot.
func TestLateClaimAfterRestart(t *testing.T) {
	t.Parallel()
	whole := wholeGPU(t, "h100")
	first, second := exclusiveClaim("first", whole+"-1g10gb-4"), exclusiveClaim("second", whole+"-3g40gb-0")
	allocated := map[string][]string{"first": {first.Results[0].Device}, "second": {second.Results[0].Device}}
	byDRA := migProfile(sharing.MIGConfig{Manage: true})
	byDRA.DRA = sharing.DRAConfig{All: true}
	for name, test := range map[string]struct {
		path    units.Path
		kept    []dra.Claim
		profile sharing.Profile
		after   func(o *onDemandRig)
	}{
		"restarted while it leaves": {units.LeavingDRA, []dra.Claim{}, migProfile(sharing.MIGConfig{}), func(o *onDemandRig) { o.awaitAllocatable(oneG, 1) }},
		"rebooted while it leaves":  {units.LeavingDRA, []dra.Claim{first, second}, migProfile(sharing.MIGConfig{}), func(o *onDemandRig) { o.awaitAllocatable(oneG, 1) }},
		"rebooted, to a layout":     {units.LeavingDRA, []dra.Claim{first, second}, migProfile(layoutNamed("all-1g.10gb")), func(o *onDemandRig) { o.awaitAllocatable(oneG, 7) }},
		"rebooted, to static DRA":   {units.DRA, []dra.Claim{first, second}, byDRA, func(o *onDemandRig) { o.awaitOffered(first.Results[0].Device, second.Results[0].Device) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &memory{}
			if err := store.WriteOrForget("", map[string]any{"paths": map[string]units.Path{whole: test.path}, "claims": test.kept}); err != nil {
				t.Fatal(err)
			}
			api := &fakeDRA{allocated: allocated}
			o := newOnDemandRigOn(t, "h100", test.profile, api, store)
			for _, c := range []dra.Claim{first, second, first} {
				o.await("prepared: "+c.String(), func() bool { return o.claims.Prepare(o.ctx, c) == nil })
			}
			made := o.at(first.Results[0].Device)
			if made == "" || o.at(second.Results[0].Device) == "" {
				t.Errorf("partitions %+v", o.scan()[0].Partitions)
			}
			o.unprepare(second)
			o.prepare(first)
			if o.at(first.Results[0].Device) != made {
				t.Errorf("the first claim's partition was made anew: %+v", o.scan()[0].Partitions)
			}
			o.unprepare(first)
			api.set(func(f *fakeDRA) { f.allocated = nil })
			test.after(o)
		})
	}
}

// TestLeavesAfterTheChange checks that the device plugin does not get a GPU while a partition for an ended claim
// is still being created.
func TestLeavesAfterTheChange(t *testing.T) {
	t.Parallel()
	o := newOnDemandRig(t, "h100")
	whole, first := o.device(0, ""), exclusiveClaim("first", o.device(0, "1g10gb-4"))
	o.awaitOffered(first.Results[0].Device)
	answer := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(answer) })
	t.Cleanup(goOn)
	o.sim.InjectFault("DeviceSetMigMode", simnode.Fault{Until: answer, Times: 1})
	prepared := make(chan error, 1)
	go func() { prepared <- o.claims.Prepare(o.ctx, first) }()
	o.await("being made", func() bool { return o.agent.mig.Changing(o.sim.GPUs()[0].UUID) })
	o.policy.set(migProfile(sharing.MIGConfig{}), nil)
	o.await("leaving", func() bool { return o.claims.View().Paths[whole] == units.LeavingDRA })
	o.unprepare(first)
	o.api.set(func(f *fakeDRA) { f.asked = 0 })
	o.await("asked who has it", func() bool {
		o.api.mu.Lock()
		defer o.api.mu.Unlock()
		return o.api.asked > 2
	})
	if path := o.claims.View().Paths[whole]; path != units.LeavingDRA {
		t.Errorf("the GPU is on %q while it is being changed", path)
	}
	goOn()
	if err := <-prepared; err == nil {
		t.Error("a claim that has ended was prepared")
	}
	o.await("the device plugin's", func() bool { return len(o.claims.View().Paths) == 0 })
}

// TestOnDemandSparesWhatIsUsed checks that a partition without a claim is left alone while a process uses it.
func TestOnDemandSparesWhatIsUsed(t *testing.T) {
	t.Parallel()
	o := newOnDemandRig(t, "h100")
	small, large := o.device(0, "1g10gb-4"), exclusiveClaim("large", o.device(0, "3g40gb-4"))
	o.awaitOffered(small)
	o.prepare(exclusiveClaim("first", small))
	o.unprepare(exclusiveClaim("first", small))
	o.must(o.sim.AddProcess(0, 0, 4711, 1<<20))
	o.refuses(large, "1g.10gb at 4:1 is in the way and in use")
	if got := o.claims.View(); len(got.Refused) != 1 || got.Refused["large"].Cause != claims.NotMade {
		t.Errorf("%+v", got)
	}
	o.must(o.sim.RemoveProcess(0, 0, 4711))
	o.prepare(large)
	if got := o.claims.View(); len(got.Refused) != 0 || o.at(large.Results[0].Device) == "" {
		t.Errorf("%+v, %+v", got, o.scan())
	}
}

// TestOnDemandAfterErrors has each call fail once: the claim is refused, and the kubelet's next try gets the
// partition.
func TestOnDemandAfterErrors(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"DeviceSetMigMode", "ComputeInstanceDestroy", "GpuInstanceDestroy", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			o := newOnDemandRig(t, "h100")
			small, large := o.device(0, "1g10gb-4"), o.device(0, "3g40gb-4")
			o.awaitOffered(small)
			if call != "DeviceSetMigMode" {
				o.prepare(exclusiveClaim("first", small))
				o.unprepare(exclusiveClaim("first", small))
			}
			o.sim.InjectFault(call, simnode.Fault{Return: nvml.Unknown, Times: 1})
			c := exclusiveClaim("large", large)
			if err := o.claims.Prepare(o.ctx, c); err != nil && claims.CauseOf(err) != claims.NotMade {
				t.Errorf("%v", err)
			}
			o.await("prepared", func() bool { return o.claims.Prepare(o.ctx, c) == nil })
			if o.at(large) == "" {
				t.Errorf("%+v", o.scan())
			}
		})
	}
}

// TestOnDemandUnderPods moves a divided GPU to DRA while a pod uses it. Until the pod has ended, claims get only
// existing, free partitions; afterwards, any.
func TestOnDemandUnderPods(t *testing.T) {
	t.Parallel()
	o := newOnDemandRig(t, "h100+all-1g.10gb")
	byPlugin := migProfile(sharing.MIGConfig{Manage: true})
	o.policy.set(byPlugin, nil)
	o.awaitAllocatable(oneG, 7)
	status, err := o.kubelet.AddPod(o.ctx, migPod("stays", oneG, 1))
	o.must(err)
	held := status.Containers[0].Devices(oneG)[0]
	var free, taken string
	for id, named := range dra.UnitNames(o.scan()) {
		if id == held {
			taken = named.Name
		} else {
			free = named.Name
		}
	}
	o.policy.set(onDemandProfile(), nil)
	o.awaitOffered(free)
	o.refuses(exclusiveClaim("early", taken), "device plugin")
	o.unprepare(exclusiveClaim("early", taken))
	o.prepare(exclusiveClaim("free", free))
	if offered := strings.Fields(o.api.devices()); len(offered) != 6 {
		t.Errorf("offered %v", offered)
	}
	// The whole GPU was moving to DRA, but no profile has it any more.
	o.policy.set(byPlugin, nil)
	o.awaitAllocatable(oneG, 6)
	o.policy.set(onDemandProfile(), nil)
	o.must(o.kubelet.DeletePod("default", "stays"))
	o.awaitOffered(o.device(0, "7g80gb-0"), free)
	o.refuses(exclusiveClaim("all", o.device(0, "7g80gb-0")), "no room")
	if o.at(free) == "" {
		t.Error("a claim's partition is gone")
	}
}

// TestOnDemandStorm lets claims come and go on two GPUs, several at a time, and checks that a claim's partition
// exists as long as the claim and overlaps no other.
func TestOnDemandStorm(t *testing.T) {
	t.Parallel()
	steps := repeat.Times(20, 60)
	o := newOnDemandRig(t, "h100x2")
	o.awaitOffered(o.device(0, ""), o.device(1, "1g10gb-4"))
	offered := strings.Fields(o.api.devices())
	var wait sync.WaitGroup
	for worker := range 3 {
		wait.Go(func() {
			random, given, prepared := rand.New(rand.NewPCG(uint64(worker), 7)), map[string]dra.Claim{}, map[string]string{}
			for step := range steps {
				uid := fmt.Sprintf("w%d-%d", worker, random.IntN(3))
				if c, has := given[uid]; has && random.IntN(2) == 0 {
					if err := o.claims.Unprepare(c); err != nil {
						t.Error(err)
					}
					delete(given, uid)
					delete(prepared, uid)
				} else if !has {
					given[uid] = exclusiveClaim(uid, offered[random.IntN(len(offered))])
				}
				for uid, c := range given {
					err := o.claims.Prepare(o.ctx, c)
					if _, was := prepared[uid]; err != nil && was {
						t.Errorf("step %d: claim %s has lost its device: %v", step, c, err)
					}
					if err != nil {
						continue
					}
					id := o.at(c.Results[0].Device)
					if id == "" || prepared[uid] != "" && prepared[uid] != id {
						t.Errorf("step %d: %s of claim %s is %q, was %q", step, c.Results[0].Device, c, id, prepared[uid])
					}
					prepared[uid] = id
				}
			}
			for _, c := range given {
				if err := o.claims.Unprepare(c); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	o.prepare(exclusiveClaim("last", o.device(0, ""), o.device(1, "")))
}
