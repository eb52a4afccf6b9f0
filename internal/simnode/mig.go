package simnode

import (
	"slices"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// DeviceGetMigMode returns NOT_SUPPORTED on a GPU without MIG.
func (n driver) DeviceGetMigMode(d nvml.Device) (nvml.MIGMode, error) {
	g := n.gpu(d)
	if g.geometry.Profiles == nil {
		return nvml.MIGMode{}, nvml.NotSupported
	}
	return nvml.MIGMode{Current: g.mig, Pending: g.migPending}, nil
}

// DeviceGetVirtualizationMode returns the mode of the node's world.
func (n driver) DeviceGetVirtualizationMode(nvml.Device) (nvml.VirtualizationMode, error) {
	if n.node.is("passthrough") {
		return nvml.Passthrough, nil
	}
	return 0, nil
}

// DeviceSetMigMode turns MIG mode on or off. The pending mode changes in any case. NVML returns
// separately whether the call failed and why the mode is not active yet: RESET_REQUIRED before
// Hopper if the GPU cannot be reset, and IN_USE while there are GPU instances or processes.
func (n driver) DeviceSetMigMode(d nvml.Device, on bool) (nvml.Return, error) {
	g := n.gpu(d)
	if g.geometry.Profiles == nil {
		return nvml.Success, nvml.NotSupported
	}
	g.migPending = on
	switch {
	case g.mig == on:
		return nvml.Success, nil
	case n.node.is("passthrough") && g.Architecture < nvml.Hopper:
		return nvml.ResetRequired, nil
	case len(g.instances) > 0 || len(g.processes) > 0 || n.node.hasClient():
		return nvml.InUse, nil
	}
	g.mig = on
	g.computeMode = nvml.ComputeDefault
	g.timeSlice = ""
	if n.node.is("moving-minors") {
		free := func(minor int) bool {
			return find(n.node.gpus, func(g *simGPU) bool { return g.deviceMinor == minor }) == nil
		}
		g.deviceMinor = lowest(0, free)
	}
	return nvml.Success, nil
}

// DeviceGetMaxMigDeviceCount returns 0 with MIG off.
func (n driver) DeviceGetMaxMigDeviceCount(d nvml.Device) (int, error) {
	if !n.gpu(d).mig {
		return 0, nil
	}
	return n.gpu(d).geometry.Slices, nil
}

func (n driver) DeviceGetMigDeviceHandleByIndex(parent nvml.Device, index int) (nvml.Device, error) {
	g := n.gpu(parent)
	c := g.computeAt(index)
	switch {
	case g.geometry.Profiles == nil:
		return 0, nvml.NotSupported
	case index < 0 || index >= g.geometry.Slices:
		return 0, nvml.InvalidArgument
	case c == nil:
		return 0, nvml.NotFound
	}
	return c.handle, nil
}

func (n driver) DeviceGetGpuInstanceId(d nvml.Device) (int, error) {
	return n.migDevice(d).instance.id, nil
}

func (n driver) DeviceGetComputeInstanceId(d nvml.Device) (int, error) { return n.migDevice(d).id, nil }

// DeviceGetAttributes returns the attributes of the GPU instance, which its compute instances
// share, except for the multiprocessors.
func (n driver) DeviceGetAttributes(d nvml.Device) (nvml.Attributes, error) {
	c, g := n.migDevice(d), n.gpu(d)
	gi := c.instance.info.Profile.Slices
	has := g.figures(c.instance.info)
	return nvml.Attributes{
		MemoryMiB:       g.memoryOf(c.instance.placement.Size) >> 20,
		Multiprocessors: has.Multiprocessors * c.slices / gi,
		GPUSlices:       gi,
		ComputeSlices:   c.slices,
		CopyEngines:     has.CopyEngines,
		Decoders:        has.Decoders,
		Encoders:        has.Encoders,
		JPEGEngines:     has.JPEGEngines,
		OFAEngines:      has.OFAEngines,
	}, nil
}

// profileCount is the number of GPU instance profiles that NVML enumerates
// (nvml.h, NVML_GPU_INSTANCE_PROFILE_COUNT).
const profileCount = 18

func (n driver) DeviceGetGpuInstanceProfileInfo(d nvml.Device, enum int) (nvml.GPUInstanceProfile, error) {
	if enum < 0 || enum >= profileCount {
		return nvml.GPUInstanceProfile{}, nvml.InvalidArgument
	}
	g := n.gpu(d)
	info, ok := first(g.geometry.Profiles, func(p mig.ProfileInfo) bool { return p.Enum == enum })
	if !ok || !g.mig && n.node.is("late-profiles") {
		return nvml.GPUInstanceProfile{}, nvml.NotSupported
	}
	return nvml.GPUInstanceProfile{
		ID:        info.ID,
		Slices:    info.Profile.Slices,
		Instances: info.Max,
		MemoryMB:  g.memoryOf(info.Size) >> 20,
		Engines:   g.figures(info),
		Name:      info.Profile.String(),
	}, nil
}

// DeviceGetGpuInstancePossiblePlacements returns the placements of an empty GPU.
func (n driver) DeviceGetGpuInstancePossiblePlacements(d nvml.Device, profile int) ([]mig.Placement, error) {
	g := n.gpu(d)
	info, known := g.profileInfo(profile)
	switch {
	case g.geometry.Profiles == nil:
		return nil, nvml.NotSupported
	case !known:
		return nil, nvml.InvalidArgument
	}
	var placements []mig.Placement
	for _, start := range info.Starts {
		placements = append(placements, mig.Placement{Start: start, Size: info.Size})
	}
	return placements, nil
}

// DeviceGetGpuInstances returns the instances in the order of their creation.
func (n driver) DeviceGetGpuInstances(d nvml.Device, profile int) ([]nvml.GPUInstance, error) {
	g := n.gpu(d)
	if !g.mig {
		return nil, nvml.NotSupported
	}
	if _, known := g.profileInfo(profile); !known {
		return nil, nvml.InvalidArgument
	}
	var handles []nvml.GPUInstance
	for _, i := range g.instances {
		if i.info.ID == profile {
			handles = append(handles, i.handle)
		}
	}
	return handles, nil
}

func (n driver) DeviceGetGpuInstanceById(parent nvml.Device, id int) (nvml.GPUInstance, error) {
	g := n.gpu(parent)
	if !g.mig {
		return 0, nvml.NotSupported
	}
	i := g.instance(id)
	if i == nil {
		return 0, nvml.NotFound
	}
	return i.handle, nil
}

// DeviceCreateGpuInstanceWithPlacement returns INSUFFICIENT_RESOURCES if there is no room or the
// slot is taken, and NOT_SUPPORTED with MIG off.
func (n driver) DeviceCreateGpuInstanceWithPlacement(
	d nvml.Device,
	profile int,
	at mig.Placement,
) (nvml.GPUInstance, error) {
	g := n.gpu(d)
	info, known := g.profileInfo(profile)
	switch {
	case !g.mig:
		return 0, nvml.NotSupported
	case !known || info.Size != at.Size || !slices.Contains(info.Starts, at.Start):
		return 0, nvml.InvalidArgument
	case !g.fits(info, at):
		return 0, nvml.InsufficientResources
	}
	return n.node.addInstance(g, info, at).handle, nil
}

func (n driver) GpuInstanceGetInfo(handle nvml.GPUInstance) (nvml.GPUInstanceInfo, error) {
	i := n.instance(handle)
	return nvml.GPUInstanceInfo{
		ID:        i.id,
		ProfileID: i.info.ID,
		Start:     i.placement.Start,
		Size:      i.placement.Size,
	}, nil
}

// GpuInstanceDestroy returns IN_USE while there are compute instances, at the first call after the
// last of them was destroyed, and while another program has the GPU open.
func (n driver) GpuInstanceDestroy(handle nvml.GPUInstance) error {
	t := n.node.targets[uint64(handle)]
	if len(t.instance.computes) > 0 || t.instance.lingers || n.node.hasClient() {
		t.instance.lingers = false
		return nvml.InUse
	}
	t.gpu.instances = slices.DeleteFunc(t.gpu.instances, func(other *gpuInstance) bool { return other == t.instance })
	delete(n.node.targets, uint64(handle))
	return nil
}

// computeSlices maps NVML's enumeration to numbers of compute slices. The enumeration is also the
// published ID here (nvml.h, NVML_COMPUTE_INSTANCE_PROFILE_*).
var computeSlices = [...]int{1, 2, 3, 4, 7}

// computeProfileCount is the number of compute instance profiles that NVML
// enumerates (nvml.h, NVML_COMPUTE_INSTANCE_PROFILE_COUNT).
const computeProfileCount = 9

// computeSlices returns the slices of a compute instance with the profile, or NOT_SUPPORTED if the
// GPU instance cannot have it.
func (i *gpuInstance) computeSlices(profile int) (int, error) {
	switch {
	case profile < 0 || profile >= computeProfileCount:
		return 0, nvml.InvalidArgument
	case profile >= len(computeSlices) || computeSlices[profile] > i.info.Profile.Slices:
		return 0, nvml.NotSupported
	}
	return computeSlices[profile], nil
}

func (n driver) GpuInstanceGetComputeInstanceProfileInfo(
	handle nvml.GPUInstance,
	enum int,
) (nvml.ComputeInstanceProfile, error) {
	i := n.instance(handle)
	count, err := i.computeSlices(enum)
	if err != nil {
		return nvml.ComputeInstanceProfile{}, err
	}
	return nvml.ComputeInstanceProfile{
		ID:        enum,
		Slices:    count,
		Instances: i.info.Profile.Slices / count,
	}, nil
}

// GpuInstanceGetComputeInstances returns the instances in the order of their creation.
func (n driver) GpuInstanceGetComputeInstances(
	handle nvml.GPUInstance,
	profile int,
) (handles []nvml.ComputeInstance, err error) {
	i := n.instance(handle)
	count, err := i.computeSlices(profile)
	for _, c := range i.computes {
		if c.slices == count {
			handles = append(handles, c.instanceHandle)
		}
	}
	return handles, err
}

func (n driver) GpuInstanceGetComputeInstanceById(handle nvml.GPUInstance, id int) (nvml.ComputeInstance, error) {
	c := n.instance(handle).compute(id)
	if c == nil {
		return 0, nvml.NotFound
	}
	return c.instanceHandle, nil
}

func (n driver) GpuInstanceCreateComputeInstance(handle nvml.GPUInstance, profile int) (nvml.ComputeInstance, error) {
	t := n.node.targets[uint64(handle)]
	count, err := t.instance.computeSlices(profile)
	if err != nil {
		return 0, err
	}
	if _, ok := t.instance.findSlices(count); !ok {
		return 0, nvml.InsufficientResources
	}
	return n.node.addCompute(t.gpu, t.instance, count).instanceHandle, nil
}

func (n driver) ComputeInstanceGetInfo(handle nvml.ComputeInstance) (nvml.ComputeInstanceInfo, error) {
	c := n.node.targets[uint64(handle)].compute
	return nvml.ComputeInstanceInfo{ID: c.id, Slices: c.slices}, nil
}

// ComputeInstanceDestroy returns IN_USE while a process runs on the instance, or another program
// has the GPU open.
func (n driver) ComputeInstanceDestroy(handle nvml.ComputeInstance) error {
	t := n.node.targets[uint64(handle)]
	if len(t.compute.processes) > 0 || n.node.hasClient() {
		return nvml.InUse
	}
	t.instance.computes = slices.DeleteFunc(t.instance.computes,
		func(other *computeInstance) bool { return other == t.compute })
	t.instance.lingers = len(t.instance.computes) == 0
	delete(n.node.targets, uint64(handle))
	delete(n.node.targets, uint64(t.compute.handle))
	return nil
}

// fits reports whether the GPU has room for another GPU instance at the place.
func (g *simGPU) fits(info mig.ProfileInfo, at mig.Placement) bool {
	var kept []mig.Partition
	for _, i := range g.instances {
		if i.placement.Overlaps(at) {
			return false
		}
		kept = append(kept, mig.Partition{Profile: i.info.Profile, Placement: i.placement})
	}
	// The limits on count, slices and media engines do not depend on the place.
	one := mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: info.Profile, Count: 1}}}
	_, err := g.geometry.Place(one, kept)
	return err == nil
}
