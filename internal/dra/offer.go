// Package dra decides what a node offers by Dynamic Resource Allocation: the ResourceSlices and
// DeviceClasses for its GPUs and its plan.
//
// It is pure: it reads nothing, writes nothing and serves nothing. The same node gives the same
// slices, byte for byte, because the allocator takes the first device that fits. The order of
// devices is a driver's only way to influence the choice.
//
// Read offer.go first, then device.go (the description of a device) and ondemand.go (partitions
// that are made once they are allocated to a claim). docs/internals/dra.md has the reasons.
package dra

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// DriverName is the driver's name, unless an operator chooses the name of NVIDIA's own driver.
const (
	DriverName   = "gpu.virgate.github.io"
	NVIDIADriver = "gpu.nvidia.com"
)

// Node is the input for the slices.
type Node struct {
	// Name is the name of the Node object, Driver the name of the DRA driver.
	Name, Driver string
	GPUs         []sharing.GPU
	Profile      sharing.Profile
	// Plan is the node's plan, with faults for units that cannot be granted now.
	Plan sharing.Plan
	// DriverVersion is, for example, "580.65.06"; empty when unknown. CUDA is the newest version
	// that the driver runs, 12080 for 12.8; 0 when unknown.
	DriverVersion string
	CUDA          int
	// PCIeRoots are the known PCIe roots by the GPU's UUID: "pci0000:3a".
	PCIeRoots map[string]string
	// OnDemand are the GPUs whose partitions are made for claims, by UUID; see OnDemand.
	OnDemand map[string]mig.Geometry
	// Foreign are the partitions of those GPUs that must not be destroyed for a claim: a container
	// without one of our claims holds them, or the profile excludes them.
	Foreign map[string][]mig.Partition
	// Held are the names of devices that are allocated to claims or may be about to be. They
	// include devices of claims that were refused when they were prepared, until these claims are
	// gone, and withdrawn devices, until the scheduler must know of the withdrawal.
	Held []string
}

// Offer is what a node offers.
type Offer struct {
	// Slices are the slices of the pool, with generation 1, in the order of their names. There is
	// at least one, so that the pool exists.
	Slices []resourceapi.ResourceSlice
	// Classes let pods request the resources by their usual names. They belong to the cluster: one
	// class per name serves all nodes.
	Classes []resourceapi.DeviceClass
	// Warnings describe what the profile asks for and the node cannot offer.
	Warnings []string
}

// device is a device and its relation to its GPU.
type device struct {
	resourceapi.Device
	// gpu is the GPU's UUID; empty if the GPU is gone.
	gpu string
	// resource is the name under which the device is offered; empty for a device that is only still
	// held.
	resource string
	// takes is what the device consumes of the GPU's counters; nil if no other device can conflict
	// with it.
	takes mig.Counters
}

// The limits of k8s.io/api/resource/v1. A slice with taints or counters can have only half as many
// devices as others. All slices use the lower limit, because a fault must not move devices between
// slices.
const (
	maxDevices     = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	maxCounterSets = resourceapi.ResourceSliceMaxCounterSets
	maxPoolName    = resourceapi.PoolNameMaxLength
)

// PoolName returns the name of the node's pool. The allocator stores counters only by the name of
// the pool (kubernetes 1.36.3, structured/internal/incubating, availableCounters), so no other
// driver may use the same name.
func PoolName(node, driver string) string { return node + "/" + driver }

// Build returns what the node offers. With an error, nothing can be offered at all.
func Build(n Node) (Offer, error) {
	pool := PoolName(n.Name, n.Driver)
	if n.Name == "" || n.Driver == "" {
		return Offer{}, errors.New("a ResourceSlice needs a node's and a driver's name")
	}
	if len(pool) > maxPoolName {
		return Offer{}, fmt.Errorf("the pool's name %q is longer than %d characters", pool, maxPoolName)
	}
	n.GPUs = slices.SortedFunc(slices.Values(n.GPUs), func(a, b sharing.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	b := builder{
		Node:     n,
		gpus:     map[string]sharing.GPU{},
		held:     map[string]bool{},
		supplies: map[string]mig.Counters{},
	}
	for _, gpu := range n.GPUs {
		b.gpus[gpu.UUID] = gpu
	}
	for _, name := range n.Held {
		b.held[name] = true
	}
	b.planned()
	b.onDemand()
	b.leaving()
	return Offer{
		Slices:   b.slices(pool),
		Classes:  b.classes(),
		Warnings: b.warned(),
	}, nil
}

type builder struct {
	Node
	gpus map[string]sharing.GPU
	held map[string]bool
	// devices are in the order in which the allocator should try them.
	devices []device
	// supplies are the counters of GPUs whose devices cannot all be used at once.
	supplies map[string]mig.Counters
	warnings []string
}

func (b *builder) warnf(format string, arguments ...any) {
	b.warnings = append(b.warnings, fmt.Sprintf(format, arguments...))
}

// add adds a device, unless its name is invalid or already used.
func (b *builder) add(d device) {
	if validation.IsDNS1123Label(d.Name) != nil ||
		slices.ContainsFunc(b.devices, func(other device) bool { return other.Name == d.Name }) {
		b.warnf("%s: not offered by DRA: its name is no DNS label, or another device's", d.Name)
		return
	}
	b.devices = append(b.devices, d)
}

// planned adds the units of the plan's resources that DRA should offer.
func (b *builder) planned() {
	for _, r := range b.Plan.Resources {
		if !b.Profile.DRA.Offers(r.Name) {
			continue
		}
		for _, unit := range inOrder(r) {
			gpu, known := b.gpus[unit.GPU]
			if _, onDemand := b.OnDemand[unit.GPU]; onDemand || !known {
				continue
			}
			b.add(b.device(gpu, partitionOf(gpu, unit.ID), r, unit))
		}
	}
}

// inOrder returns the resource's units in the order in which the allocator should try them. The
// allocator takes the first that fits, so devices in their plain order fill one GPU after the
// other. To spread partitions, the first partition of each GPU comes first, then the second ones.
// All shares of a unit are one device, so they always fill one unit before the next.
func inOrder(r sharing.Resource) []sharing.Unit {
	if r.Policy == sharing.Packed {
		return r.Units
	}
	rank, count := map[string]int{}, map[string]int{}
	for _, u := range r.Units {
		rank[u.ID] = count[u.GPU]
		count[u.GPU]++
	}
	return slices.SortedStableFunc(slices.Values(r.Units),
		func(a, b sharing.Unit) int { return cmp.Compare(rank[a.ID], rank[b.ID]) })
}

func partitionOf(gpu sharing.GPU, id string) *sharing.Partition {
	i := slices.IndexFunc(gpu.Partitions, func(p sharing.Partition) bool { return p.UUID == id })
	if i < 0 {
		return nil
	}
	return &gpu.Partitions[i]
}

// leaving adds devices that claims have and the node no longer offers: they have another sharing
// mode, their resource is no longer offered by DRA, or their GPU is gone. The allocator counts only
// listed devices, so without them their GPUs would be allocated again. Meanwhile a counter protects
// the GPU's other devices from new claims, and a taint protects these devices.
func (b *builder) leaving() {
	missing := maps.Clone(b.held)
	for _, d := range b.devices {
		delete(missing, d.Name)
	}
	if len(missing) == 0 {
		return
	}
	known := b.known()
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		if validation.IsDNS1123Label(name) != nil {
			continue
		}
		d, ok := known(name)
		if !ok {
			d = b.gone(name)
		}
		d.Taints = []resourceapi.DeviceTaint{{
			Key:    b.Driver + "/leaving",
			Effect: resourceapi.DeviceTaintEffectNoSchedule,
		}}
		b.devices = append(b.devices, d)
		if d.gpu == "" {
			continue
		}
		// A leaving device excludes the rest of its GPU, unless the GPU's parts are counted
		// already.
		if _, counted := b.supplies[d.gpu]; !counted {
			b.exclude(d.gpu)
		}
		if last := &b.devices[len(b.devices)-1]; last.takes == nil {
			last.takes = maps.Clone(b.supplies[d.gpu])
		}
	}
}

// exclude gives the GPU a counter. Each offered device consumes one of it, a leaving device all. If
// nothing is offered, there is nothing to exclude.
func (b *builder) exclude(gpu string) {
	var units []int
	for i, d := range b.devices {
		if d.gpu == gpu && d.resource != "" {
			units = append(units, i)
		}
	}
	if units == nil {
		return
	}
	// Either the whole GPU exists or its partitions, so each device has an equal part.
	b.supplies[gpu] = mig.Counters{"units": len(units)}
	for _, i := range units {
		b.devices[i].takes = mig.Counters{"units": 1}
	}
}

// counterSets returns the supplies minus what foreign partitions consume, but never less than what
// claims have. A single negative counter would stop the allocator for the whole pool.
func (b *builder) counterSets() []resourceapi.CounterSet {
	var sets []resourceapi.CounterSet
	for _, gpu := range b.GPUs {
		supply := maps.Clone(b.supplies[gpu.UUID])
		if supply == nil {
			continue
		}
		var instances []mig.Placement
		for _, partition := range b.Foreign[gpu.UUID] {
			if slices.Contains(instances, partition.Placement) {
				continue // Another compute instance of the same GPU instance.
			}
			instances = append(instances, partition.Placement)
			for name, n := range b.OnDemand[gpu.UUID].Needs(partition) {
				supply[name] -= min(n, supply[name])
			}
		}
		held := mig.Counters{}
		for _, d := range b.devices {
			if d.gpu == gpu.UUID && b.held[d.Name] {
				for name, n := range d.takes {
					held[name] += n
				}
			}
		}
		for name := range supply {
			supply[name] = max(supply[name], held[name])
		}
		sets = append(sets, resourceapi.CounterSet{Name: counterSet(gpu.UUID), Counters: counters(supply)})
	}
	return sets
}

func counterSet(gpu string) string { return strings.ToLower(gpu) }

func counters(amounts mig.Counters) map[string]resourceapi.Counter {
	all := map[string]resourceapi.Counter{}
	for name, n := range amounts {
		all[name] = resourceapi.Counter{Value: quantity(uint64(n))}
	}
	return all
}

// slices returns the slices of the pool: first the counters, then the devices in order. Consecutive
// devices of a GPU are in one slice, so a fault changes only one slice. A change of two slices
// would need a new generation, for which all slices are written.
func (b *builder) slices(pool string) []resourceapi.ResourceSlice {
	var specs []resourceapi.ResourceSliceSpec
	for sets := range slices.Chunk(b.counterSets(), maxCounterSets) {
		specs = append(specs, resourceapi.ResourceSliceSpec{SharedCounters: sets})
	}
	var open []resourceapi.Device
	for i := 0; i < len(b.devices); {
		end := i + 1
		for end < len(b.devices) && b.devices[end].gpu == b.devices[i].gpu {
			end++
		}
		end = min(end, i+maxDevices)
		if len(open)+end-i > maxDevices {
			specs, open = append(specs, resourceapi.ResourceSliceSpec{Devices: open}), nil
		}
		for ; i < end; i++ {
			d := b.devices[i]
			if d.takes != nil {
				d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
					CounterSet: counterSet(d.gpu),
					Counters:   counters(d.takes),
				}}
			}
			open = append(open, d.Device)
		}
	}
	if open != nil || specs == nil {
		specs = append(specs, resourceapi.ResourceSliceSpec{Devices: open})
	}
	all := make([]resourceapi.ResourceSlice, len(specs))
	for i, spec := range specs {
		spec.Driver, spec.NodeName = b.Driver, &b.Name
		spec.Pool = resourceapi.ResourcePool{
			Name:               pool,
			Generation:         1,
			ResourceSliceCount: int64(len(specs)),
		}
		all[i] = resourceapi.ResourceSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
			// The ResourceSlice controller starts names in the same way and appends a random part
			// (resourceslicecontroller.go, encodeIndex).
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s", i, b.Driver, b.Name)},
			Spec:       spec,
		}
	}
	return all
}

// classes returns the classes of the resources that the node offers.
func (b *builder) classes() []resourceapi.DeviceClass {
	var all []resourceapi.DeviceClass
	for _, name := range b.names() {
		all = append(all, Class(b.Driver, name))
	}
	return all
}

func (b *builder) names() []string {
	var names []string
	for _, d := range b.devices {
		if d.resource != "" {
			names = append(names, d.resource)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Class returns the DeviceClass of a resource. With it, DRA allocates devices to pods that request,
// for example, nvidia.com/gpu on nodes whose device plugin does not offer that. Its name differs
// from the names of NVIDIA's driver, which has a gpu.nvidia.com.
func Class(driver, name string) resourceapi.DeviceClass {
	domain, short, _ := strings.Cut(name, "/")
	object := strings.ToLower("virgate-" + short + "." + domain)
	if clean := strings.ReplaceAll(object, "_", "-"); clean != object || object != "virgate-"+short+"."+domain ||
		validation.IsDNS1123Subdomain(object) != nil {
		// Two resource names may differ only in characters that an object's name cannot have.
		object = "virgate-" + hash(name) + "." + domain
	}
	return resourceapi.DeviceClass{
		TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "DeviceClass"},
		ObjectMeta: metav1.ObjectMeta{Name: object},
		Spec: resourceapi.DeviceClassSpec{
			ExtendedResourceName: &name,
			// The driver comes first. Devices of other drivers have no such attribute, so the rest
			// would be an error for them, which stops the pod on every node.
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: fmt.Sprintf("device.driver == '%s' && device.attributes['%s'].resource == '%s'", driver,
					driver, name),
			}}},
		},
	}
}

func (b *builder) warned() []string {
	names := b.names()
	if dra := b.Profile.DRA; !dra.All && dra.Resources == nil {
		b.warnf("dra.resources names nothing, so nothing is offered by DRA")
	}
	for _, name := range b.Profile.DRA.Resources {
		if !slices.Contains(names, name) {
			b.warnf("dra.resources: %s: nothing on this node has this name", name)
		}
	}
	slices.Sort(b.warnings)
	return slices.Compact(b.warnings)
}
