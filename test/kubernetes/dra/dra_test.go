package dra

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/apis/resource"
	resourcev1 "k8s.io/kubernetes/pkg/apis/resource/v1"
	"k8s.io/kubernetes/pkg/apis/resource/validation"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func problemsOf(t *testing.T, offer dra.Offer) (problems field.ErrorList) {
	t.Helper()
	for i := range offer.Slices {
		var slice resource.ResourceSlice
		if err := resourcev1.Convert_v1_ResourceSlice_To_resource_ResourceSlice(&offer.Slices[i], &slice, nil); err != nil {
			t.Fatal(err)
		}
		problems = append(problems, validation.ValidateResourceSlice(&slice)...)
	}
	for i := range offer.Classes {
		var class resource.DeviceClass
		if err := resourcev1.Convert_v1_DeviceClass_To_resource_DeviceClass(&offer.Classes[i], &class, nil); err != nil {
			t.Fatal(err)
		}
		problems = append(problems, validation.ValidateDeviceClass(&class)...)
	}
	return problems
}

// TestValid checks the offers of all simulated nodes by the API server's validation, also when all devices
// of the previous profile are held.
func TestValid(t *testing.T) {
	profiles := map[string]sharing.Profile{
		"exclusive": everything(false), "on demand": everything(true),
		"shared":           everything(false, shared("nvidia.com/gpu", 4, "nvidia.com/gpu.shared"), shared("nvidia.com/mig-1g.10gb", 2, "")),
		"shared on demand": everything(true, shared("nvidia.com/gpu", 2, ""), shared("nvidia.com/mig-1g.10gb", 10, "example.com/A_b")),
	}
	single := everything(true, shared("nvidia.com/gpu", 3, ""))
	single.FailRequestsGreaterThanOne = true
	profiles["one share each"] = single
	for _, name := range simnode.Names() {
		for _, layout := range []string{"", "+all-balanced"} {
			if _, err := simnode.New(name + layout); err != nil {
				continue // It has no MIG.
			}
			var held []string
			for _, profile := range slices.Sorted(maps.Keys(profiles)) {
				p := profiles[profile]
				n := node(t, name+layout, p)
				for i := range n.GPUs[:len(n.GPUs)/2] {
					n.GPUs[i].Health = sharing.Faulty("XID 79: the GPU has fallen off the bus, " + strings.Repeat("and more ", 20))
				}
				n.Plan = sharing.NewPlan(n.GPUs, p)
				n.Held = held
				offer, err := dra.Build(n)
				if err != nil {
					t.Fatal(err)
				}
				if problems := problemsOf(t, offer); len(problems) > 0 {
					t.Errorf("%s%s, %s: %v", name, layout, profile, problems.ToAggregate())
				}
				for _, slice := range offer.Slices {
					for _, d := range slice.Spec.Devices {
						held = append(held, d.Name)
					}
				}
			}
		}
	}
}

// TestValidationIsTheServers checks that the validation finds a slice which the API server would refuse.
func TestValidationIsTheServers(t *testing.T) {
	offer, err := dra.Build(node(t, "h100", everything(false, shared("nvidia.com/gpu", 4, ""))))
	if err != nil {
		t.Fatal(err)
	}
	shares := offer.Slices[0].Spec.Devices[0].Capacity["shares"]
	shares.Value.Set(1)
	offer.Slices[0].Spec.Devices[0].Capacity["shares"] = shares
	if problems := problemsOf(t, offer); len(problems) != 1 {
		t.Errorf("%v, want that a range of one share has no room for a step", problems)
	}
}

// layouts calls visit with every set of partitions that fit on a GPU together.
func layouts(g mig.Geometry, visit func([]mig.Partition)) {
	all, supply := g.Placements(), g.Supply()
	var grow func(from int, have []mig.Partition, used mig.Counters)
	grow = func(from int, have []mig.Partition, used mig.Counters) {
		if len(have) > 0 {
			visit(have)
		}
		for i := from; i < len(all); i++ {
			if next := plus(used, g.Needs(all[i])); within(next, supply) {
				grow(i+1, append(have[:len(have):len(have)], all[i]), next)
			}
		}
	}
	grow(0, nil, mig.Counters{})
}

func plus(a, b mig.Counters) mig.Counters {
	sum := mig.Counters{}
	for name := range a {
		sum[name] += a[name]
	}
	for name := range b {
		sum[name] += b[name]
	}
	return sum
}

func within(a, supply mig.Counters) bool {
	for name, n := range a {
		if n > supply[name] {
			return false
		}
	}
	return true
}

// TestEveryLayout reaches each of the 2,318 layouts of a GPU with seven slices by a claim that names the
// places, and checks that a further place is only given if it fits.
func TestEveryLayout(t *testing.T) {
	n := node(t, "h100", everything(true))
	g := n.OnDemand[n.GPUs[0].UUID]
	c := newCluster(t, n)
	count := 0
	layouts(g, func(layout []mig.Partition) {
		if count++; testing.Short() && count%20 != 0 {
			return
		}
		var want []string
		claim := resourceapi.DeviceClaim{}
		used := mig.Counters{}
		for i, p := range layout {
			claim.Requests = append(claim.Requests, request(fmt.Sprintf("r%d", i), "any", placedBy(p, 0)))
			want = append(want, dra.DeviceName(n.GPUs[0].UUID, &sharing.Partition{Profile: p.Profile, Placement: p.Placement}, sharing.Unit{}))
			used = plus(used, g.Needs(p))
		}
		if got := c.allocate("layout", claim); !slices.Equal(got, want) {
			t.Fatalf("%v: %v", layout, got)
		}
		// One more place, a different one for each layout.
		next := g.Placements()[count%len(g.Placements())]
		if got := c.one("next", "any", placedBy(next, 0)); (got != nil) != (within(plus(used, g.Needs(next)), g.Supply()) && !slices.Contains(layout, next)) {
			t.Fatalf("%v beside %v: %v", next, layout, got)
		}
		if got := c.one("whole", "nvidia.com/gpu"); got != nil {
			t.Fatalf("the whole GPU beside %v", layout)
		}
		clear(c.allocated)
	})
	if count != 2318 {
		t.Errorf("%d layouts", count)
	}
	if c.one("whole", "nvidia.com/gpu") == nil || c.one("part", "nvidia.com/mig-1g.10gb") != nil {
		t.Error("the whole GPU is not free, or not alone")
	}
}

// TestEveryMixture reaches each fitting number of partitions of each profile by claims that only name the
// resource, as a pod with an extended resource does, large ones first.
func TestEveryMixture(t *testing.T) {
	n := node(t, "h100", everything(true))
	g := n.OnDemand[n.GPUs[0].UUID]
	c := newCluster(t, n)
	seen := map[string]bool{}
	layouts(g, func(layout []mig.Partition) {
		var profiles []mig.Profile
		for _, p := range slices.Backward(layout) {
			profiles = append(profiles, p.Profile)
		}
		mixture := fmt.Sprint(profiles)
		if seen[mixture] {
			return
		}
		seen[mixture] = true
		for i, p := range profiles {
			if c.one(fmt.Sprint(i), "nvidia.com/"+p.ResourceName()) == nil {
				t.Errorf("%s: no room for %s, after %v", mixture, p, c.held())
			}
		}
		clear(c.allocated)
	})
	if len(seen) != 127 {
		t.Errorf("%d mixtures, want 127", len(seen))
	}
}

// TestShares checks that a device has as many shares as the profile says, and that a request for two gets
// two GPUs.
func TestShares(t *testing.T) {
	c := newCluster(t, node(t, "h100x2", everything(false, shared("nvidia.com/gpu", 3, "nvidia.com/gpu.shared"))))
	var got []string
	for i := range 7 {
		got = append(got, c.one(fmt.Sprint(i), "nvidia.com/gpu.shared")...)
	}
	first, second := got[0], got[len(got)-1]
	if want := []string{first, first, first, second, second, second}; !slices.Equal(got, want) || first == second {
		t.Errorf("shares: %v", got)
	}
	c.free("0")
	two := resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{request("r", "nvidia.com/gpu.shared")}}
	two.Requests[0].Exactly.Count = 2
	if got := c.allocate("two", two); got != nil {
		t.Errorf("two shares: %v, with one GPU free", got)
	}
	c.free("3")
	if got := c.allocate("two", two); len(got) != 2 || got[0] == got[1] {
		t.Errorf("two shares: %v", got)
	}
	clear(c.allocated)
	two.Requests[0].Exactly.Count, two.Requests[0].Exactly.Capacity = 1, capacity("shares", "2")
	if c.allocate("a", two) == nil || c.allocate("b", two) == nil {
		t.Error("two shares of one GPU are not to be had")
	}
	if got := append(c.one("c", "nvidia.com/gpu.shared"), c.one("d", "nvidia.com/gpu.shared")...); !slices.Equal(got, []string{first, second}) || c.one("e", "nvidia.com/gpu.shared") != nil {
		t.Errorf("beside two of each GPU: %v", got)
	}
	// Two requests that must get different GPUs.
	apart := resourceapi.DeviceClaim{
		Requests:    []resourceapi.DeviceRequest{request("a", "nvidia.com/gpu.shared"), request("b", "nvidia.com/gpu.shared")},
		Constraints: []resourceapi.DeviceConstraint{{DistinctAttribute: new(resourceapi.FullyQualifiedName(dra.DriverName + "/parentUUID"))}},
	}
	clear(c.allocated)
	if got := c.allocate("apart", apart); len(got) != 2 || got[0] == got[1] {
		t.Errorf("apart: %v", got)
	}
}

// TestMemory checks that memory is a minimum for a device that a claim has alone, and the amount that a
// share consumes.
func TestMemory(t *testing.T) {
	ask := func(amount string) resourceapi.DeviceClaim {
		r := request("r", "any", fmt.Sprintf("device.driver == '%s'", dra.DriverName))
		r.Exactly.Capacity = capacity("memory", amount)
		return resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{r}}
	}
	c := newCluster(t, node(t, "h100+all-balanced", everything(false)))
	if got := c.allocate("a", ask("16Gi")); len(got) != 1 || !strings.Contains(got[0], "-2g20gb-") {
		t.Errorf("at least 16Gi: %v", got)
	}
	if got := c.allocate("b", ask("100Gi")); got != nil {
		t.Errorf("at least 100Gi: %v", got)
	}
	c = newCluster(t, node(t, "h100", everything(false, shared("nvidia.com/gpu", 10, ""))))
	if c.allocate("a", ask("50Gi")) == nil || c.allocate("b", ask("50Gi")) != nil || c.allocate("c", ask("20Gi")) == nil || c.one("d", "nvidia.com/gpu") == nil {
		t.Errorf("what is booked: %v", c.held())
	}
}

// TestSharesOnDemand checks that a shared partition takes its place once, and gives it back with its last
// share.
func TestSharesOnDemand(t *testing.T) {
	c := newCluster(t, node(t, "h100", everything(true, shared("nvidia.com/mig-7g.80gb", 2, "nvidia.com/big"))))
	if a, b := c.one("a", "nvidia.com/big"), c.one("b", "nvidia.com/big"); a == nil || !slices.Equal(a, b) || c.one("c", "nvidia.com/big") != nil {
		t.Errorf("%v and %v", a, b)
	}
	c.free("a")
	if got := c.one("small", "nvidia.com/mig-1g.10gb"); got != nil {
		t.Errorf("%v beside a share of all", got)
	}
	c.free("b")
	if c.one("small", "nvidia.com/mig-1g.10gb") == nil || c.one("a", "nvidia.com/big") != nil {
		t.Error("the last share has not given the GPU back")
	}
}

// TestNVIDIANames checks that claims made for NVIDIA's driver get devices under its name: by the classes of
// its chart, and by its attributes.
func TestNVIDIANames(t *testing.T) {
	n := node(t, "h100x2", everything(true))
	n.Driver = dra.NVIDIADriver
	c := newCluster(t, n)
	for _, kind := range []string{"gpu", "mig"} {
		class := &resourceapi.DeviceClass{}
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '%s'", kind),
		}}}
		c.classes[kind+".nvidia.com"] = class
	}
	whole := strings.ToLower(n.GPUs[1].UUID)
	if got := c.one("whole", "gpu.nvidia.com", "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*h100.*$')", "device.capacity['gpu.nvidia.com'].multiprocessors.compareTo(quantity('90')) >= 0"); !slices.Equal(got, []string{whole}) {
		t.Errorf("a whole GPU is %v, want %s", got, whole)
	}
	for i, profile := range []string{"1g.10gb", "3g.40gb", "3g.40gb"} {
		got := c.one(fmt.Sprint(i), "mig.nvidia.com", "device.attributes['gpu.nvidia.com'].profile == '"+profile+"'", "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('4Gi')) >= 0",
			"device.capacity['gpu.nvidia.com'].multiprocessors.isGreaterThan(quantity('10')) && device.capacity['gpu.nvidia.com'].encoders.compareTo(quantity('0')) >= 0",
			"device.attributes['gpu.nvidia.com'].addressingMode != 'HMM'")
		if i < 2 && len(got) != 1 || i == 2 && got != nil {
			t.Errorf("%s is %v", profile, got)
		}
	}
}

// TestGathering checks that partitions gather on the first GPU and whole GPUs come last.
func TestGathering(t *testing.T) {
	n := node(t, "h100x4", everything(true))
	c := newCluster(t, n)
	name := func(gpu int) string { return strings.ToLower(n.GPUs[gpu].UUID) }
	for i, want := range []string{name(0), name(3), name(0), name(2), name(0)} {
		class := []string{"nvidia.com/mig-2g.20gb", "nvidia.com/gpu"}[i%2]
		if got := c.one(fmt.Sprint(i), class); len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("claim %d: %v, want it on %s", i, got, want)
		}
	}
}

// TestIll checks that a faulty GPU is not allocated until it has recovered.
func TestIll(t *testing.T) {
	n := node(t, "h100", everything(true))
	c := newCluster(t, n)
	n.Plan.Health = map[string]sharing.Health{n.GPUs[0].UUID: sharing.Faulty("XID 79")}
	c.publish(n)
	for name := range c.classes {
		if name != "any" && c.one("a", name) != nil {
			t.Errorf("%s of a faulty GPU", name)
		}
	}
	n.Plan.Health = nil
	if c.publish(n); c.one("a", "nvidia.com/gpu") == nil {
		t.Error("nothing of a GPU that has recovered")
	}
}

// TestChangedWhileHeld changes the sharing mode of two GPUs, one of them held. The held one is not
// allocated under its new name until its claim is gone, the other one at once.
func TestChangedWhileHeld(t *testing.T) {
	exclusive, sharedBy4 := node(t, "h100x2", everything(false)), node(t, "h100x2", everything(false, shared("nvidia.com/gpu", 2, "nvidia.com/gpu.shared")))
	for _, test := range []struct {
		name     string
		from, to dra.Node
		class    string
		next     string
		fits     int
	}{
		{"exclusive to shared", exclusive, sharedBy4, "nvidia.com/gpu", "nvidia.com/gpu.shared", 2},
		{"shared to exclusive", sharedBy4, exclusive, "nvidia.com/gpu.shared", "nvidia.com/gpu", 1},
	} {
		c := newCluster(t, test.from)
		held := c.one("old", test.class)
		c.publish(test.to)
		for i := range test.fits + 1 {
			got := c.one(fmt.Sprint(i), test.next)
			if (got != nil) != (i < test.fits) || got != nil && strings.TrimSuffix(got[0], "-ts") == strings.TrimSuffix(held[0], "-ts") {
				t.Errorf("%s: claim %d gets %v beside %v", test.name, i, got, held)
			}
		}
		// A toleration of everything does not help.
		tolerant := request("r", "any", fmt.Sprintf("device.driver == '%s'", dra.DriverName))
		tolerant.Exactly.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
		if got := c.allocate("tolerant", resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{tolerant}}); got != nil {
			t.Errorf("%s: a tolerant claim gets %v", test.name, got)
		}
		c.free("old")
		c.publish(test.to)
		if got := c.one("after", test.next); got == nil {
			t.Errorf("%s: nothing when the old claim is gone", test.name)
		}
	}
}

// TestMPSShares checks what claims get of a GPU that is shared by MPS: a share has its even part of the
// memory, whatever it asks for, and a request for more memory gets no device.
func TestMPSShares(t *testing.T) {
	for _, several := range []bool{false, true} {
		entry := shared("nvidia.com/gpu", 4, "")
		entry.MPS, entry.SeveralShares = true, several
		n := node(t, "h100", everything(false, entry))
		c := newCluster(t, n)
		part := sharing.NewMPSLimit(1, 4, n.GPUs[0].Memory).PinnedMemory
		ask := func(claim, name, amount string) []string {
			r := request("r", "nvidia.com/gpu")
			r.Exactly.Capacity = capacity(name, amount)
			return c.allocate(claim, resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{r}})
		}
		if got := ask("more", "memory", fmt.Sprint(part+1)); got != nil {
			t.Errorf("more memory than a share has: %v", got)
		}
		if got := ask("a", "memory", "1Gi"); !slices.Equal(got, []string{strings.ToLower(n.GPUs[0].UUID) + "-mps4"}) {
			t.Errorf("at least 1Gi: %v", got)
		}
		consumed := c.allocated["a"][0].ConsumedCapacity
		memory, shares := consumed["memory"], consumed["shares"]
		if memory.Value() != int64(part) || shares.Value() != 1 {
			t.Errorf("a share takes %v and %v", &memory, &shares)
		}
		if ask("b", "memory", fmt.Sprint(part)) == nil {
			t.Error("a share's memory is not to be had")
		}
		if got := ask("two", "shares", "2"); (got != nil) != several {
			t.Errorf("several %t: two shares: %v", several, got)
		}
		for i := range 2 {
			if got := c.one(fmt.Sprint(i), "nvidia.com/gpu"); (got == nil) != several {
				t.Errorf("several %t: share %d: %v", several, i, got)
			}
		}
		if c.one("fifth", "nvidia.com/gpu") != nil {
			t.Error("a fifth share of four")
		}
	}
}
