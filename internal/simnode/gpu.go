package simnode

import (
	"crypto/sha1"
	"fmt"
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// normalTemperature is a GPU's temperature by default, in degrees Celsius.
const normalTemperature = 34

// normalPower is a GPU's power by default, in milliwatts: the power of an idle A100.
const normalPower = 55_000

// simGPU is a simulated GPU. The Node's lock guards it.
type simGPU struct {
	model
	// ordinal is the GPU's number in the order of creation. It is never reused; the UUID and the
	// PCI address are derived from it.
	ordinal int
	uuid    string
	// deviceMinor is the N of /dev/nvidiaN, which may differ from the index.
	deviceMinor int
	numaNode    int
	// geometry has no profiles on a GPU without MIG.
	geometry mig.Geometry
	// handle is the valid handle; a reset replaces it.
	handle nvml.Device
	// opened is true if a program has looked the GPU up since the driver was opened.
	opened bool
	// lost is true if the GPU fell off the bus. healed is true if it has come back since, which
	// shows only after the driver is opened again.
	lost, healed bool
	removed      bool
	// persistence is true if the GPU is in persistence mode, in which the driver keeps it open.
	persistence bool
	temperature int
	// rows (from Ampere on) or pagesPending (before) is the state of the GPU's
	// memory repair.
	rows         nvml.RemappedRows
	pagesPending bool
	// binding changes each time the kernel driver is bound to the GPU. recovery is the recovery
	// action that the driver advises.
	binding  uint64
	recovery uint32
	// fabric is the GPU's place in the NVLink fabric.
	fabric nvml.FabricInfo
	// mig is the current mode, migPending the mode after the next reset.
	mig, migPending bool
	// computeMode and timeSlice are lost with a reset.
	computeMode nvml.ComputeMode
	timeSlice   sharing.TimeSlice
	instances   []*gpuInstance
	// migDevicesMade is the number of MIG devices created so far; their UUIDs are derived from it.
	migDevicesMade int
	processes      []nvml.Process
	utilization    utilization
	clockReasons   nvml.ClockReasons
	meter          meter
	// errors are the memory errors that ECC found.
	errors map[nvml.MemoryErrorCounter]uint64
}

// meter has the power of a GPU and the energy that it has used since the driver was loaded.
type meter struct {
	milliwatts int
	// millijoules is the energy used until at, which is in microseconds.
	millijoules float64
	at          uint64
}

// read returns the energy used until now, in millijoules.
func (m *meter) read() uint64 {
	at := now()
	m.millijoules += float64(m.milliwatts) * float64(at-m.at) / 1e6
	m.at = at
	return uint64(m.millijoules)
}

// load resets a GPU's counts as loading the kernel driver does.
func (g *simGPU) load() {
	g.meter.millijoules, g.meter.at = 0, now()
	maps.DeleteFunc(g.errors, func(c nvml.MemoryErrorCounter, _ uint64) bool { return !c.Aggregate })
}

type gpuInstance struct {
	id        int
	handle    nvml.GPUInstance
	info      mig.ProfileInfo
	placement mig.Placement
	computes  []*computeInstance
	// lingers is true if its last compute instance has only just been destroyed.
	lingers bool
}

// computeInstance is a compute instance, which is a MIG device.
type computeInstance struct {
	instance *gpuInstance
	id       int
	// start is the first of its slices in the GPU instance.
	start, slices int
	uuid          string
	// index is the MIG device index on the GPU.
	index          int
	handle         nvml.Device
	instanceHandle nvml.ComputeInstance
	processes      []nvml.Process
}

func (n *Node) newGPU(m model, numaNode int) *simGPU {
	g := &simGPU{
		model:       m,
		ordinal:     n.gpusMade,
		deviceMinor: n.gpusMade ^ 1,
		numaNode:    numaNode,
		geometry:    m.geometry(),
		uuid:        "GPU-" + nameUUID(fmt.Sprintf("%s/gpu/%d", n.name, n.gpusMade)),
		temperature: normalTemperature,
		persistence: n.is("persistence"),
		meter:       meter{milliwatts: normalPower, at: now()},
		errors:      map[nvml.MemoryErrorCounter]uint64{},
	}
	n.gpusMade++
	n.bind(g)
	n.renewHandles(g)
	return g
}

// bind binds the kernel driver to the GPU.
func (n *Node) bind(g *simGPU) {
	n.bindingsMade++
	g.binding = n.bindingsMade
}

const gpusPerDomain = 15

// busID returns the PCI address. Addresses ascend with the ordinals, because the driver enumerates
// GPUs by address.
func (g *simGPU) busID() string {
	return fmt.Sprintf("%08X:%02X:00.0", g.ordinal/gpusPerDomain, 0x07+0x10*(g.ordinal%gpusPerDomain))
}

// memoryOf returns the memory of an instance with that many memory slots, in bytes. If no recording
// of the model has it, the instance gets its share of the GPU's memory; real instances have less,
// because the driver keeps some.
func (g *simGPU) memoryOf(slots int) uint64 {
	if mebibytes, known := mebibytesOfModel[g.PCI][slots]; known {
		return mebibytes << 20
	}
	return g.Mebibytes * uint64(slots) / uint64(g.geometry.Slots) << 20
}

// usedBy returns the memory of the processes in bytes.
func usedBy(processes []nvml.Process) uint64 {
	var used uint64
	for _, p := range processes {
		if p.Memory != nvml.MemoryUnknown {
			used += p.Memory
		}
	}
	return used
}

// nameUUID returns a UUID that is derived from the name, similar to version 5 (RFC 9562, section
// 5.5).
func nameUUID(name string) string {
	sum := sha1.Sum([]byte("virgate/simnode/" + name))
	id := sum[:16]
	id[6] = id[6]&0x0F | 0x50
	id[8] = id[8]&0x3F | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:16])
}

// profileInfo returns the GPU instance profile with that published ID.
func (g *simGPU) profileInfo(profile int) (mig.ProfileInfo, bool) {
	return first(g.geometry.Profiles, func(p mig.ProfileInfo) bool { return p.ID == profile })
}

// computes returns the MIG devices, one GPU instance after the other.
func (g *simGPU) computes() []*computeInstance {
	var computes []*computeInstance
	for _, i := range g.instances {
		computes = append(computes, i.computes...)
	}
	return computes
}

// profile returns the profile of the MIG device.
func (c *computeInstance) profile() mig.Profile {
	p := c.instance.info.Profile
	p.Compute = c.slices
	return p
}

// addInstance creates a GPU instance; the caller has checked that it fits. Like the driver it
// reuses IDs.
func (n *Node) addInstance(g *simGPU, info mig.ProfileInfo, at mig.Placement) *gpuInstance {
	id := lowest(1, func(id int) bool { return g.instance(id) == nil })
	i := &gpuInstance{
		id:        id,
		info:      info,
		placement: at,
	}
	n.newInstanceHandles(g, i)
	g.instances = append(g.instances, i)
	return i
}

// newInstanceHandles gives the instance and its compute instances new handles.
func (n *Node) newInstanceHandles(g *simGPU, i *gpuInstance) {
	i.handle = nvml.GPUInstance(n.handle(target{gpu: g, instance: i}))
	for _, c := range i.computes {
		c.instanceHandle = nvml.ComputeInstance(n.handle(target{
			gpu:      g,
			instance: i,
			compute:  c,
		}))
	}
}

// addCompute creates a compute instance; the caller has checked that it fits. Its UUID has not been
// used before, and depends only on the history of the node.
func (n *Node) addCompute(g *simGPU, i *gpuInstance, slices int) *computeInstance {
	start, _ := i.findSlices(slices)
	c := &computeInstance{
		instance: i,
		start:    start,
		slices:   slices,
		id:       lowest(0, func(id int) bool { return i.compute(id) == nil }),
		index:    lowest(0, func(index int) bool { return g.computeAt(index) == nil }),
		uuid:     "MIG-" + nameUUID(fmt.Sprintf("%s/gpu/%d/mig/%d", n.name, g.ordinal, g.migDevicesMade)),
	}
	c.handle = nvml.Device(n.handle(target{gpu: g, compute: c}))
	c.instanceHandle = nvml.ComputeInstance(n.handle(target{
		gpu:      g,
		instance: i,
		compute:  c,
	}))
	g.migDevicesMade++
	i.computes = append(i.computes, c)
	return c
}

// lowest returns the lowest free number, starting at first.
func lowest(first int, free func(int) bool) int {
	for !free(first) {
		first++
	}
	return first
}

// first returns the first element that matches; ok is false if none does.
func first[T any](list []T, matches func(T) bool) (found T, ok bool) {
	if at := slices.IndexFunc(list, matches); at >= 0 {
		return list[at], true
	}
	return found, false
}

// find is first for pointers. It returns nil if none matches.
func find[T any](list []*T, matches func(*T) bool) *T {
	found, _ := first(list, matches)
	return found
}

func (g *simGPU) instance(id int) *gpuInstance {
	return find(g.instances, func(i *gpuInstance) bool { return i.id == id })
}

func (g *simGPU) computeAt(index int) *computeInstance {
	return find(g.computes(), func(c *computeInstance) bool { return c.index == index })
}

func (i *gpuInstance) compute(id int) *computeInstance {
	return find(i.computes, func(c *computeInstance) bool { return c.id == id })
}

// findSlices returns the place in the GPU instance for a compute instance of that many slices; ok
// is false if there is no room. It picks the last place, which leaves most room for larger ones. A
// compute instance starts at a multiple of the next power of two. Real drivers
// also do more than count free slices: each has its own list of places (nvidia-smi mig -lcipp).
func (i *gpuInstance) findSlices(slices int) (start int, ok bool) {
	align := 1
	for align < slices {
		align *= 2
	}
	for at := 0; at+slices <= i.info.Profile.Slices; at += align {
		overlaps := func(c *computeInstance) bool { return at < c.start+c.slices && c.start < at+slices }
		if find(i.computes, overlaps) == nil {
			start, ok = at, true
		}
	}
	return start, ok
}
