package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// knownGPU is a GPU's handle, with the facts that stay true while the handle is valid.
type knownGPU struct {
	device Device
	// fixed holds the facts that never change: no health, memory or MIG.
	fixed sharing.GPU
	// binding is PCIInfo's Binding.
	binding uint64
	// links counts the active NVLinks by the bus ID at the other end.
	links map[string]int
	// profiles holds the names of the GPU instance profiles by published ID; nil until MIG is first
	// seen enabled.
	profiles map[int]mig.Profile
	// last is the last whole reading, which a probe updates.
	last reading
}

type reading struct {
	// gpu is the GPU, without faults.
	gpu    sharing.GPU
	device Device
	// partitions holds the handles of gpu.Partitions, by UUID.
	partitions map[string]Device
	// findings holds the faults, by the UUID of the GPU or partition. The temperature is not among
	// them, because it has to be compared with the previous one.
	findings map[string][]finding
	// dead is true if the GPU gave no sign of life; this is also among the findings.
	dead bool
	// celsius is meaningless unless celsiusKnown is set.
	celsius      int
	celsiusKnown bool
	// slowdown is the temperature at which the hardware slows the GPU down. margin is the number of
	// degrees until then, meaningless unless marginKnown is set.
	slowdown    slowdown
	margin      int
	marginKnown bool
	// recovery is the value of RecoveryAction, meaningless unless recoveryKnown is set.
	recovery      uint32
	recoveryKnown bool
	// fabric is the GPU's place in the fabric of NVLinks, meaningless unless fabricKnown is set.
	// noFabric is true if the driver knows no fabric for this GPU.
	fabric                FabricInfo
	fabricKnown, noFabric bool
	// ready is the ready state of confidential computing, meaningless unless readyKnown is set.
	// notConfidential is true if the machine does not use confidential computing.
	ready                       uint32
	readyKnown, notConfidential bool
	marks                       Marks
	// reset is true if there is evidence that the GPU was reset since the last reading: its old
	// handle was lost, and a new one works.
	reset bool
	// problems holds the errors of the partitions that could not be read and are missing from gpu;
	// nil if there are none.
	problems error
}

func (r *reading) found(unit string, f finding) {
	r.findings[unit] = appendNew(r.findings[unit], f)
}

// identify reads the facts that do not change. The rest of the program identifies GPUs by UUID,
// product name and bus ID, so a GPU without them is unusable; the other facts may be unknown.
func identify(lib Library, device Device, index int) (*knownGPU, error) {
	gpu := sharing.GPU{
		Index:    index,
		Minor:    -1,
		NUMANode: -1,
	}
	var err error
	gpu.UUID, err = lib.DeviceGetUUID(device)
	if err != nil {
		return nil, err
	}
	gpu.Model, err = lib.DeviceGetName(device)
	if err != nil {
		return nil, err
	}
	pci, err := lib.DeviceGetPciInfo(device)
	if err != nil {
		return nil, err
	}
	gpu.PCIBusID = pci.BusID
	gpu.PCIClass = pci.Class
	gpu.PCIDevice = pci.DeviceID
	gpu.PCISubsystem = pci.SubsystemID
	if node, err := lib.DeviceGetNumaNodeId(device); err == nil {
		gpu.NUMANode = node
	}
	if architecture, err := lib.DeviceGetArchitecture(device); err == nil {
		gpu.Architecture = architecture.String()
	}
	if brand, err := lib.DeviceGetBrand(device); err == nil {
		gpu.Brand = brand.String()
	}
	if capability, err := lib.DeviceGetCudaComputeCapability(device); err == nil {
		gpu.ComputeCapability = fmt.Sprintf("%d.%d", capability.Major, capability.Minor)
	}
	return &knownGPU{
		device:  device,
		fixed:   gpu,
		binding: pci.Binding,
		links:   readLinks(lib, device),
	}, nil
}

// read makes a whole reading. An error means that the handle is useless: the GPU is lost, the
// handle names another GPU, or it cannot be read whether MIG is enabled, without which the GPU must
// not be offered at all.
func (g *knownGPU) read(lib Library) (reading, error) {
	r := reading{
		gpu:             g.fixed,
		device:          g.device,
		marks:           Marks{Binding: g.binding},
		slowdown:        g.last.slowdown,
		noFabric:        g.last.noFabric,
		notConfidential: g.last.notConfidential,
	}
	uuid, err := lib.DeviceGetUUID(g.device)
	if err != nil {
		return r, err
	}
	if uuid != g.fixed.UUID {
		return r, fmt.Errorf("the handle of %s now names %s", g.fixed.UUID, uuid)
	}
	// A change of MIG mode may give the GPU another device node, and give its old node to another
	// GPU.
	if minor, err := lib.DeviceGetMinorNumber(g.device); err == nil {
		r.gpu.Minor = minor
	}
	mode, err := lib.DeviceGetMigMode(g.device)
	if err != nil && !unsupported(err) {
		return r, err
	}
	r.gpu.MIG = mode.Current
	r.gpu.MIGPending = mode.Pending
	r.gpu.MIGCapable = err == nil
	if r.gpu.MIG {
		err = g.readPartitions(lib, &r)
		if err != nil {
			return r, err
		}
	}
	err = r.readCondition(lib)
	if err != nil {
		return r, err
	}
	r.gpu.Clique = ""
	if r.fabricKnown && r.fabric.Registered() {
		r.gpu.Clique = fmt.Sprintf("%s.%d", r.fabric.Cluster, r.fabric.Clique)
	}
	g.last = r
	return r, nil
}

// probe reads only the condition and takes the rest from the last reading. After an error the GPU
// must be read again: its handle is useless, or a partition that does not answer may be faulty or
// gone.
func (g *knownGPU) probe(lib Library) (reading, error) {
	r := g.last
	if err := r.readCondition(lib); err != nil {
		return r, err
	}
	for _, p := range r.gpu.Partitions {
		// The handle of a partition that is gone may later stand for another one.
		uuid, err := lib.DeviceGetUUID(r.partitions[p.UUID])
		if err != nil || uuid != p.UUID || len(r.findings[p.UUID]) > 0 && len(g.last.findings[p.UUID]) == 0 {
			return r, fmt.Errorf("MIG device %d does not answer as %s", p.Index, p.UUID)
		}
	}
	return r, nil
}

// unsupported reports whether the GPU or the driver does not have the call.
func unsupported(err error) bool {
	return errors.Is(err, NotSupported) || errors.Is(err, FunctionNotFound)
}

// cause returns the text for an error in a finding: the return code alone. It does not depend on
// the handle or the call, so the text stays the same.
func cause(err error) string {
	if code, ok := errors.AsType[Return](err); ok {
		return code.String()
	}
	return strings.TrimSpace(err.Error())
}

// readCondition reads the condition of the GPU and of its partitions. It returns an error if the
// GPU is lost.
func (r *reading) readCondition(lib Library) error {
	r.findings, r.dead = map[string][]finding{}, false
	r.marks.ResetAdvised, r.marks.RowRemap = "", ""
	memory, err := r.readMemory(lib, r.device, r.gpu.UUID)
	if err != nil {
		return err
	}
	r.gpu.Memory = memory
	r.celsius, err = lib.DeviceGetTemperature(r.device)
	if errors.Is(err, GPUIsLost) {
		return err
	}
	r.celsiusKnown = err == nil
	r.readMargin(lib)
	action, err := lib.DeviceGetFieldValues(r.device, RecoveryAction)
	r.recovery, r.recoveryKnown = action, err == nil
	switch {
	case err == nil && action == RecoverNone:
		r.marks.ResetAdvised = notWaiting
	case err == nil && (action == RecoverReset || action == RecoverDrainAndReset || action == RecoverBusReset):
		r.marks.ResetAdvised = waiting
	}
	r.readFabric(lib)
	if err := r.readMemoryRepairs(lib); err != nil {
		return err
	}
	// An earlier reading shares these partitions and must not change.
	r.gpu.Partitions = slices.Clone(r.gpu.Partitions)
	for i := range r.gpu.Partitions {
		p := &r.gpu.Partitions[i]
		p.Memory, err = r.readMemory(lib, r.partitions[p.UUID], p.UUID)
		if err != nil {
			return err
		}
	}
	return nil
}

// readFabric reads whether programs can use the GPU at all. On machines with NVSwitches, CUDA fails
// until the GPU has joined their fabric; with confidential computing, until the ready state is set.
// All other answers are then like those of a healthy GPU.
func (r *reading) readFabric(lib Library) {
	r.fabricKnown = false
	if !r.noFabric {
		fabric, err := lib.DeviceGetGpuFabricInfo(r.device)
		r.fabric = fabric
		r.fabricKnown = err == nil
		r.noFabric = unsupported(err)
	}
	r.readyKnown = false
	if !r.notConfidential {
		on, err := lib.SystemGetConfComputeState()
		r.notConfidential = unsupported(err) || err == nil && !on
		if on && err == nil {
			ready, err := lib.SystemGetConfComputeGpusReadyState()
			r.ready, r.readyKnown = ready, err == nil
		}
	}
}

// slowdown is the temperature at which the hardware slows the GPU down, as the driver reports it.
type slowdown struct {
	told slowdownTold
	// degrees is the threshold or the margin.
	degrees int
}

type slowdownTold int

const (
	// slowdownUnknown: it could not be read yet.
	slowdownUnknown slowdownTold = iota
	// slowdownSilent: none is reported.
	slowdownSilent
	slowdownThreshold
	slowdownByMargin
)

// readSlowdown reads the slowdown temperature. From Ada on, nvml.h asks to use margins.
func readSlowdown(lib Library, device Device) slowdown {
	missing := func(err error) bool { return unsupported(err) || errors.Is(err, InvalidArgument) }
	margin, err := lib.DeviceGetFieldValues(device, SlowdownMargin)
	if err == nil {
		_, err = lib.DeviceGetMarginTemperature(device)
	}
	if err == nil {
		return slowdown{slowdownByMargin, int(int32(margin))}
	}
	if !missing(err) {
		return slowdown{}
	}
	threshold, err := lib.DeviceGetTemperatureThreshold(device, TemperatureSlowdown)
	switch {
	case err == nil && threshold > 0:
		return slowdown{slowdownThreshold, threshold}
	case err == nil || missing(err):
		return slowdown{told: slowdownSilent}
	}
	return slowdown{}
}

func (r *reading) readMargin(lib Library) {
	if r.slowdown.told == slowdownUnknown {
		r.slowdown = readSlowdown(lib, r.device)
	}
	r.marginKnown = false
	switch r.slowdown.told {
	case slowdownThreshold:
		r.margin, r.marginKnown = r.slowdown.degrees-r.celsius, r.celsiusKnown
	case slowdownByMargin:
		margin, err := lib.DeviceGetMarginTemperature(r.device)
		r.margin, r.marginKnown = margin-r.slowdown.degrees, err == nil
	}
}

// readMemory returns the device's memory in bytes, 0 if unknown. A failing memory query is a
// finding, because it is a device's simplest sign of life. It returns an error if the GPU is lost.
func (r *reading) readMemory(lib Library, device Device, unit string) (bytes uint64, err error) {
	memory, err := lib.DeviceGetMemoryInfo(device)
	switch {
	case err == nil:
		return memory.Total, nil
	case errors.Is(err, GPUIsLost):
		return 0, err
	case unsupported(err), errors.Is(err, NoPermission):
		// GPUs that share the host's memory have none of their own to report, and only privileged
		// programs may read the memory of a GPU with MIG.
		r.gpu.Denied = r.gpu.Denied || !unsupported(err)
		return 0, nil
	}
	r.found(unit, finding{cause: sharing.CauseMemory, text: "memory query: " + cause(err)})
	r.dead = r.dead || unit == r.gpu.UUID
	return 0, nil
}

// readMemoryRepairs checks for memory repairs that wait for a reset. Until then the GPU works
// around the faulty location, and its next error may be worse. A GPU that does not report this is
// assumed to need no repair. It returns an error if the GPU is lost.
func (r *reading) readMemoryRepairs(lib Library) error {
	rows, err := lib.DeviceGetRemappedRows(r.device)
	switch {
	case errors.Is(err, GPUIsLost):
		return err
	case err == nil:
		r.marks.RowRemap = waits(rows.Pending)
		if rows.Failed {
			r.found(r.gpu.UUID, finding{cause: sharing.CauseMemory, text: "row remapping failed"})
		}
	}
	pending, err := lib.DeviceGetRetiredPagesPendingStatus(r.device)
	switch {
	case errors.Is(err, GPUIsLost):
		return err
	case err == nil && pending:
		r.found(r.gpu.UUID, finding{cause: sharing.CauseMemory, text: "page retirement waits for a reset"})
	}
	return nil
}

// readPartitions reads the GPU's MIG devices. One that cannot be read does not hide the others; the
// errors are in the reading's problems. It returns an error if the GPU is lost.
func (g *knownGPU) readPartitions(lib Library, r *reading) (err error) {
	if g.profiles == nil {
		g.profiles, err = readProfiles(lib, g.device)
		if err != nil {
			return err
		}
	}
	r.partitions = map[string]Device{}
	var failed []error
	err = eachMIGDevice(lib, g.device, func(index int, device Device, err error) error {
		var partition sharing.Partition
		if err == nil {
			partition, err = g.readPartition(lib, r, device, index)
		}
		switch {
		case errors.Is(err, GPUIsLost):
			return err
		case err != nil:
			failed = append(failed, fmt.Errorf("read MIG device %d: %w", index, err))
		default:
			r.gpu.Partitions = append(r.gpu.Partitions, partition)
			r.partitions[partition.UUID] = device
		}
		return nil
	})
	r.problems = errors.Join(failed...)
	return err
}

// eachMIGDevice calls do for each index of the GPU's MIG devices, until do returns an error. do
// gets the handle at the index, or the error for it. Indices have holes, for which drivers return
// NOT_FOUND or INVALID_ARGUMENT (go-nvlib, pkg/nvlib/device, VisitMigDevices), so all indices are
// tried.
func eachMIGDevice(lib Library, gpu Device, do func(index int, device Device, err error) error) error {
	most, err := lib.DeviceGetMaxMigDeviceCount(gpu)
	for index := 0; index < most && err == nil; index++ {
		device, failed := lib.DeviceGetMigDeviceHandleByIndex(gpu, index)
		if !errors.Is(failed, NotFound) && !errors.Is(failed, InvalidArgument) {
			err = do(index, device, failed)
		}
	}
	return err
}

func identifyPartition(lib Library, device Device, index int) (p sharing.Partition, err error) {
	p.Index = index
	p.UUID, err = lib.DeviceGetUUID(device)
	if err == nil {
		p.GI, err = lib.DeviceGetGpuInstanceId(device)
	}
	if err == nil {
		p.CI, err = lib.DeviceGetComputeInstanceId(device)
	}
	return p, err
}

// readPartition reads the MIG device. Drivers that do not name profiles still put the name at the
// end of the device's product name, "NVIDIA A100-SXM4-40GB MIG 1g.5gb". Programs without permission
// to read the device's instances also get the name this way, but not the placement.
func (g *knownGPU) readPartition(lib Library, r *reading, device Device, index int) (sharing.Partition, error) {
	p, err := identifyPartition(lib, device, index)
	if err != nil {
		return p, err
	}
	if attributes, err := lib.DeviceGetAttributes(device); err == nil {
		p.Attributes = attributes
	}
	err = g.readInstances(lib, &p)
	if errors.Is(err, NoPermission) {
		r.gpu.Denied = true
	} else if err != nil || !p.Profile.IsZero() {
		return p, err
	}
	name, err := lib.DeviceGetName(device)
	if err != nil {
		return p, err
	}
	_, profile, found := strings.Cut(name, " MIG ")
	if !found {
		return p, fmt.Errorf("product name %q tells no MIG profile", name)
	}
	p.Profile, err = mig.ParseProfile(profile)
	return p, err
}

// readInstances reads the placement of the partition's GPU instance, and the partition's profile:
// the driver's name for the GPU instance's profile, if it has one, with the compute slices of the
// compute instance.
func (g *knownGPU) readInstances(lib Library, p *sharing.Partition) error {
	handle, err := lib.DeviceGetGpuInstanceById(g.device, p.GI)
	if err != nil {
		return err
	}
	instance, err := lib.GpuInstanceGetInfo(handle)
	if err != nil {
		return err
	}
	p.Placement = instance.placement()
	profile, named := g.profiles[instance.ProfileID]
	if !named {
		return nil
	}
	compute, err := lib.GpuInstanceGetComputeInstanceById(handle, p.CI)
	if err != nil {
		return err
	}
	info, err := lib.ComputeInstanceGetInfo(compute)
	profile.Compute = info.Slices
	if err == nil {
		p.Profile = profile
	}
	return err
}

// readProfiles reads the GPU's GPU instance profiles in NVML's enumeration, which has holes. It
// leaves out profiles whose name this program cannot parse.
func readProfiles(lib Library, device Device) (map[int]mig.Profile, error) {
	profiles := map[int]mig.Profile{}
	for enum := range enumerationBound {
		info, err := lib.DeviceGetGpuInstanceProfileInfo(device, enum)
		switch {
		case errors.Is(err, InvalidArgument) && enum >= knownProfiles:
			return profiles, nil
		case errors.Is(err, GPUIsLost):
			return nil, err
		case err != nil:
			continue
		}
		if profile, err := info.named(); err == nil {
			profiles[info.ID] = profile
		}
	}
	return profiles, nil
}

// named parses the driver's name of the profile, which starts with "MIG " in some drivers.
func (p GPUInstanceProfile) named() (mig.Profile, error) {
	return mig.ParseProfile(strings.TrimPrefix(p.Name, "MIG "))
}

const (
	// enumerationBound ends an enumeration if the driver never returns INVALID_ARGUMENT.
	enumerationBound = 64
	// knownProfiles and knownComputeProfiles are the numbers of profiles in nvml.h
	// (NVML_GPU_INSTANCE_PROFILE_COUNT, NVML_COMPUTE_INSTANCE_PROFILE_COUNT). Among these profiles
	// INVALID_ARGUMENT is a hole too, as in NVIDIA's go-nvlib. A newer driver may have more.
	knownProfiles        = 18
	knownComputeProfiles = 9
	// knownLinks is the number of NVLinks that a GPU can have by nvml.h (NVML_NVLINK_MAX_LINKS). A
	// newer driver may have more.
	knownLinks = 18
)

// readLinks counts the GPU's active NVLinks by the bus ID at the other end. A link that cannot be
// read counts as inactive, whatever the code, and the next one is read. Beyond knownLinks, a link
// that cannot be read ends the list.
func readLinks(lib Library, device Device) map[string]int {
	links := map[string]int{}
	for link := range enumerationBound {
		active, err := lib.DeviceGetNvLinkState(device, link)
		if errors.Is(err, GPUIsLost) || errors.Is(err, Timeout) || err != nil && link >= knownLinks {
			break
		}
		if !active {
			continue
		}
		if remote, err := lib.DeviceGetNvLinkRemotePciInfo(device, link); err == nil {
			links[strings.ToUpper(remote.BusID)]++
		}
	}
	return links
}

// nvLinks returns the number of NVLinks that data between two GPUs can use: the direct links, and
// through each switch as many as both GPUs have to it. gpus holds the bus IDs of the GPUs; any
// other end of a link is a switch.
func nvLinks(a, b *knownGPU, gpus map[string]bool) int {
	count := a.links[busKey(b)]
	for remote, ofA := range a.links {
		if !gpus[remote] {
			count += min(ofA, b.links[remote])
		}
	}
	return count
}

func busKey(g *knownGPU) string { return strings.ToUpper(g.fixed.PCIBusID) }

// topology is how the GPUs are connected. Levels are kept while the handles are valid, because
// GPUs do not move on the bus.
type topology struct {
	lib    Library
	levels map[[2]Device]string
}

// links returns the links of each GPU to the others, by its UUID.
func (t *topology) links(gpus []*knownGPU) map[string][]sharing.Link {
	onBus, handles := map[string]bool{}, map[Device]bool{}
	for _, g := range gpus {
		onBus[busKey(g)], handles[g.device] = true, true
	}
	maps.DeleteFunc(t.levels, func(pair [2]Device, _ string) bool { return !handles[pair[0]] || !handles[pair[1]] })
	linked := map[string][]sharing.Link{}
	for _, from := range gpus {
		for _, to := range gpus {
			if from == to {
				continue
			}
			linked[from.fixed.UUID] = append(linked[from.fixed.UUID], sharing.Link{
				Peer:    to.fixed.UUID,
				NVLinks: nvLinks(from, to, onBus),
				Level:   t.level(from.device, to.device),
			})
		}
		slices.SortFunc(linked[from.fixed.UUID], func(a, b sharing.Link) int { return cmp.Compare(a.Peer, b.Peer) })
	}
	return linked
}

// level returns the topology level in one word; empty if the driver does not report it.
func (t *topology) level(a, b Device) string {
	pair := [2]Device{min(a, b), max(a, b)}
	level, known := t.levels[pair]
	if !known {
		if answer, err := t.lib.DeviceGetTopologyCommonAncestor(pair[0], pair[1]); err == nil {
			level = answer.String()
		}
		t.levels[pair] = level
	}
	return level
}
