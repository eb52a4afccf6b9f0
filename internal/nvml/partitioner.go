package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Partitioner lists how GPUs are partitioned and changes that, one step at a time. It decides
// nothing: the caller decides which steps to make and whether they are safe. All of its methods may
// be called from any goroutine, but Apply for one GPU only from one at a time. The result of State
// may be out of date if the GPU is being changed.
type Partitioner struct {
	lib         Library
	pauseEvents func(ctx context.Context, gpu string) (resume func(), err error)
	// ProcessesHidden is copied into each MIGState.
	ProcessesHidden bool
	// NotPermitted returns the value for each MIGState; nil means permitted.
	NotPermitted func() bool
	// Clients returns the programs that have the device node of the GPU with that minor number
	// open. Its error says why some may be missing. It is called when the driver returns IN_USE but
	// lists no process; nil if this cannot be determined.
	Clients func(minor int) ([]string, error)
}

// NewPartitioner returns a partitioner for the library, which it opens for each call. If a Node has
// the library open, this costs nothing, because the driver counts how often it is opened. The
// library should have deadlines, so that a call ends soon after its context. pauseEvents makes this
// program close a GPU before its MIG mode changes, see Node.PauseEvents; nil if nothing else in
// this program uses the GPU.
func NewPartitioner(
	lib Library,
	pauseEvents func(ctx context.Context, gpu string) (resume func(), err error),
) *Partitioner {
	if pauseEvents == nil {
		pauseEvents = func(context.Context, string) (func(), error) { return func() {}, nil }
	}
	return &Partitioner{lib: lib, pauseEvents: pauseEvents}
}

// State returns how the GPU with that UUID is partitioned. The result is exact or an error: State
// does not leave out what it cannot list. An error for a lack of permission wraps
// mig.ErrNoPermission.
func (p *Partitioner) State(ctx context.Context, gpu string) (sharing.MIGState, error) {
	var state sharing.MIGState
	err := p.with(ctx, gpu, func(g *migGPU) (err error) {
		state, err = g.state()
		state.ProcessesHidden = p.ProcessesHidden
		state.NotPermitted = p.NotPermitted != nil && p.NotPermitted()
		return err
	})
	if err != nil {
		return sharing.MIGState{}, fmt.Errorf("list the partitions of %s: %w", gpu, withMeaning(err))
	}
	return state, nil
}

// Apply makes the step on the GPU with that UUID. If the object to destroy no longer exists, the
// step counts as done; if another object is in its place, that is an error. The outcome of a step
// that fails with Timeout is unknown: call State before the next step.
//
// An error wraps mig.ErrInUse, mig.ErrUnlistedClient with it, mig.ErrNoPermission or
// mig.ErrResetRequired if one of them applies. After ErrResetRequired the mode is the pending one.
func (p *Partitioner) Apply(ctx context.Context, gpu string, step mig.Step) error {
	var do func(*migGPU) error
	switch step.Action {
	case mig.EnableMIG, mig.DisableMIG:
		resume, err := p.pauseEvents(ctx, gpu)
		if err != nil {
			return fmt.Errorf("%s of %s: let go of the GPU: %w", step, gpu, err)
		}
		defer resume()
		do = func(g *migGPU) error { return g.setMode(step.Action == mig.EnableMIG) }
	case mig.DestroyCompute:
		do = func(g *migGPU) error { return g.destroyCompute(step.UUID) }
	case mig.DestroyInstance:
		do = func(g *migGPU) error { return g.destroyInstance(ctx, step) }
	case mig.CreateInstance:
		do = func(g *migGPU) error { return g.createInstance(step) }
	case mig.CreateCompute:
		do = func(g *migGPU) error { return g.createCompute(step) }
	default:
		return fmt.Errorf("no step %q", step.Action)
	}
	if err := p.with(ctx, gpu, do); err != nil {
		return fmt.Errorf("%s on %s: %w", step, gpu, withMeaning(err))
	}
	return nil
}

// Processes returns the IDs of the processes that the driver lists on the GPU with that UUID and on
// its partitions. The error means that they are unknown.
func (p *Partitioner) Processes(ctx context.Context, gpu string) (pids []int, err error) {
	err = p.with(ctx, gpu, func(g *migGPU) error {
		processes, err := listProcesses(g.lib, g.device)
		pids = pidsOf(processes)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the processes on %s: %w", gpu, err)
	}
	return pids, nil
}

func pidsOf(processes []Process) (pids []int) {
	for _, p := range processes {
		pids = append(pids, p.PID)
	}
	return pids
}

var errNoGPU = errors.New("the driver does not list the GPU")

// with opens the driver, finds the GPU and calls do. The driver calls end soon after ctx.
func (p *Partitioner) with(ctx context.Context, gpu string, do func(*migGPU) error) (err error) {
	lib := Until(ctx, p.lib)
	if err := lib.Init(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lib.Shutdown()) }()
	count, err := lib.DeviceGetCount()
	if err != nil {
		return err
	}
	// Another GPU that cannot be read must not block this one.
	var unread error
	for index := range count {
		device, err := lib.DeviceGetHandleByIndex(index)
		if err == nil {
			var uuid string
			uuid, err = lib.DeviceGetUUID(device)
			if err == nil && uuid == gpu {
				g := &migGPU{
					lib:    lib,
					device: device,
					index:  index,
				}
				return p.withUsers(g, do(g))
			}
		}
		if err != nil {
			unread = fmt.Errorf("read GPU %d: %w", index, err)
		}
	}
	return errors.Join(errNoGPU, unread)
}

// withMeaning adds the meaning for a step to a return code.
func withMeaning(err error) error {
	for code, what := range map[Return]error{
		InUse:         mig.ErrInUse,
		NoPermission:  mig.ErrNoPermission,
		ResetRequired: mig.ErrResetRequired,
	} {
		if errors.Is(err, code) {
			return fmt.Errorf("%w: %w", what, err)
		}
	}
	return err
}

// migGPU is a GPU during one listing or one step.
type migGPU struct {
	lib    Library
	device Device
	index  int
	// inUse is the MIG device that a step concerns, 0 for the whole GPU: programs on other MIG
	// devices do not block the step.
	inUse Device
	// profiles holds the GPU's possible GPU instance profiles, by published ID; geometry fills it.
	profiles map[int]instanceProfile
}

// instanceProfile has a zero profile if this program cannot parse the driver's name for it.
type instanceProfile struct {
	GPUInstanceProfile
	profile mig.Profile
}

func (g *migGPU) state() (sharing.MIGState, error) {
	var state sharing.MIGState
	pci, err := g.lib.DeviceGetPciInfo(g.device)
	if err != nil {
		return state, err
	}
	state.GPU = sharing.GPUID{
		Index:     g.index,
		Device:    pci.DeviceID,
		Subsystem: pci.SubsystemID,
	}
	mode, err := g.lib.DeviceGetMigMode(g.device)
	if unsupported(err) {
		return state, nil
	}
	if err != nil {
		return state, err
	}
	state.Enabled, state.Pending = mode.Current, mode.Pending
	// From Hopper on, no reset is needed. If the driver does not report the virtualization mode,
	// the change is tried.
	virtualization, _ := g.lib.DeviceGetVirtualizationMode(g.device)
	architecture, _ := g.lib.DeviceGetArchitecture(g.device)
	state.NeedsReboot = virtualization == Passthrough && architecture < Hopper
	state.Geometry, err = g.geometry()
	if err != nil {
		return state, err
	}
	state.Geometry.Unlisted = state.Geometry.Unlisted && !state.Enabled
	if !state.Enabled {
		state.Busy = g.busy(g.device)
		return state, nil
	}
	state.Instances, err = g.instances()
	return state, err
}

// errNotListed means that a listing is not exact: some driver calls report that there is nothing
// when they cannot tell.
var errNotListed = errors.New("the driver does not list")

// instances lists the GPU instances, by placement. It returns an error if a MIG device is in none
// of them.
func (g *migGPU) instances() ([]mig.Instance, error) {
	devices, err := g.migDevices()
	if err != nil {
		return nil, err
	}
	var list []mig.Instance
	for _, id := range slices.Sorted(maps.Keys(g.profiles)) {
		handles, err := listed(g.lib.DeviceGetGpuInstances(g.device, id))
		if err != nil {
			return nil, err
		}
		for _, handle := range handles {
			instance, err := g.instance(handle, g.profiles[id], devices)
			if err != nil {
				return nil, err
			}
			for _, c := range instance.Computes {
				delete(devices, migDeviceKey{instance.GI, c.CI})
			}
			list = append(list, instance)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(devices), migDeviceKey.compare) {
		return nil, fmt.Errorf("MIG device %s is in GPU instance %d, compute instance %d, which %w", devices[key].uuid,
			key.gi, key.ci, errNotListed)
	}
	slices.SortFunc(list, func(a, b mig.Instance) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	return list, nil
}

func (g *migGPU) instance(
	handle GPUInstance,
	profile instanceProfile,
	devices map[migDeviceKey]migDevice,
) (mig.Instance, error) {
	info, err := g.lib.GpuInstanceGetInfo(handle)
	if err != nil {
		return mig.Instance{}, err
	}
	instance := mig.Instance{
		GI:        info.ID,
		Profile:   profile.profile,
		Placement: info.placement(),
	}
	if instance.Profile.IsZero() {
		instance.Profile = mig.Profile{
			Compute:  profile.Slices,
			Slices:   profile.Slices,
			MemoryGB: int(profile.MemoryMB >> 10),
		}
	}
	computes := map[int]ComputeInstanceInfo{}
	err = g.eachComputeProfile(handle, func(way ComputeInstanceProfile) error {
		handles, err := listed(g.lib.GpuInstanceGetComputeInstances(handle, way.ID))
		for _, handle := range handles {
			var info ComputeInstanceInfo
			info, err = g.lib.ComputeInstanceGetInfo(handle)
			if err != nil {
				return err
			}
			computes[info.ID] = info
		}
		return err
	})
	if err != nil {
		return mig.Instance{}, err
	}
	for _, id := range slices.Sorted(maps.Keys(computes)) {
		device, known := devices[migDeviceKey{info.ID, id}]
		instance.Computes = append(instance.Computes, mig.Compute{
			CI:     id,
			Slices: computes[id].Slices,
			UUID:   device.uuid,
			// An instance whose profile has no name could not be created again, so it is not
			// touched.
			Busy: !known || profile.profile.IsZero() || g.busy(device.handle),
		})
	}
	return instance, nil
}

// listed returns an empty list for the errors by which drivers report that a profile has no
// instances.
func listed[T any](list []T, err error) ([]T, error) {
	if unsupported(err) || errors.Is(err, NotFound) || errors.Is(err, InvalidArgument) {
		return nil, nil
	}
	return list, err
}

// enumerate calls do for each profile of an enumeration, which has holes. The first
// INVALID_ARGUMENT after the known profiles ends it.
func enumerate[T any](known int, get func(enum int) (T, error), do func(enum int, info T) error) error {
	for enum := range enumerationBound {
		info, err := get(enum)
		switch {
		case errors.Is(err, InvalidArgument) && enum >= known:
			return nil
		case errors.Is(err, InvalidArgument), unsupported(err):
			continue
		case err == nil:
			err = do(enum, info)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// eachComputeProfile calls do for each compute instance profile that the GPU instance can have.
func (g *migGPU) eachComputeProfile(instance GPUInstance, do func(ComputeInstanceProfile) error) error {
	return enumerate(knownComputeProfiles, func(enum int) (ComputeInstanceProfile, error) {
		return g.lib.GpuInstanceGetComputeInstanceProfileInfo(instance, enum)
	}, func(_ int, profile ComputeInstanceProfile) error { return do(profile) })
}

// migDeviceKey identifies a MIG device by the IDs of its instances. IDs are reused, so use it only
// with a listing that was just made.
type migDeviceKey struct{ gi, ci int }

func (k migDeviceKey) compare(other migDeviceKey) int {
	return cmp.Or(cmp.Compare(k.gi, other.gi), cmp.Compare(k.ci, other.ci))
}

type migDevice struct {
	handle Device
	uuid   string
}

func (g *migGPU) migDevices() (map[migDeviceKey]migDevice, error) {
	devices := map[migDeviceKey]migDevice{}
	err := eachMIGDevice(g.lib, g.device, func(index int, handle Device, err error) error {
		if err != nil {
			return err
		}
		p, err := identifyPartition(g.lib, handle, index)
		if err != nil {
			return fmt.Errorf("MIG device %d: %w", index, err)
		}
		devices[migDeviceKey{p.GI, p.CI}] = migDevice{handle: handle, uuid: p.UUID}
		return nil
	})
	return devices, err
}

// busy reports whether processes use the GPU or the MIG device. It also returns true if the driver
// does not tell.
func (g *migGPU) busy(device Device) bool {
	processes, err := listProcesses(g.lib, device)
	return err != nil || len(processes) > 0
}

// withUsers adds to IN_USE the processes that use the GPU according to the driver, or else the
// programs that have it open.
func (p *Partitioner) withUsers(g *migGPU, err error) error {
	if !errors.Is(err, InUse) {
		return err
	}
	processes, _ := listProcesses(g.lib, cmp.Or(g.inUse, g.device))
	if pids := pidsOf(processes); pids != nil {
		return fmt.Errorf("%w, by the processes %d", err, pids)
	}
	minor, unknown := g.lib.DeviceGetMinorNumber(g.device)
	if unknown != nil || p.Clients == nil {
		return fmt.Errorf("%w, %w%s", err, &mig.UnlistedClientError{}, someClients)
	}
	clients, unknown := p.Clients(minor)
	return fmt.Errorf("%w, %w%s", err, &mig.UnlistedClientError{Programs: clients}, openedBy(clients, unknown))
}

// someClients ends the sentence when the programs are unknown.
const someClients = ", such as DCGM or the persistence daemon"

// OpenedBy names, as the end of a sentence, the programs that have the device node of the GPU with
// that minor number open.
func (p *Partitioner) OpenedBy(minor int) string {
	if p.Clients == nil {
		return someClients
	}
	return openedBy(p.Clients(minor))
}

func openedBy(clients []string, unknown error) string {
	switch {
	case len(clients) > 0:
		return ": " + strings.Join(clients, ", ")
	case unknown != nil:
		return someClients + "; which is unknown: " + unknown.Error()
	}
	return ", nor has one its device node open: perhaps a module of the kernel, such as nvidia_drm"
}

// geometry returns how the GPU can be partitioned, according to its driver, because the driver
// knows profiles and GPUs that this program does not. Some drivers list no profiles while MIG mode
// is off, and old drivers do not name them. The published geometry of the GPU fills these gaps. It
// also corrects the numbers of instances, because some drivers report too few (mig-parted,
// cmd/nvidia-mig-parted/… discovery).
func (g *migGPU) geometry() (mig.Geometry, error) {
	pci, err := g.lib.DeviceGetPciInfo(g.device)
	if err != nil {
		return mig.Geometry{}, err
	}
	published, known := mig.GeometryOf(uint16(pci.DeviceID >> 16))
	g.profiles = map[int]instanceProfile{}
	geometry := mig.Geometry{Memory: map[mig.Profile]uint64{}, Engines: map[mig.Profile]mig.Engines{}}
	err = enumerate(knownProfiles, func(enum int) (GPUInstanceProfile, error) {
		return g.lib.DeviceGetGpuInstanceProfileInfo(g.device, enum)
	}, func(enum int, info GPUInstanceProfile) error {
		profile, err := g.profileInfo(enum, info, published)
		g.profiles[info.ID] = instanceProfile{info, profile.Profile}
		if len(profile.Starts) > 0 && !profile.Profile.IsZero() {
			geometry.Profiles = append(geometry.Profiles, profile)
			geometry.Memory[profile.Profile], geometry.Engines[profile.Profile] = info.MemoryMB, info.Engines
		}
		return err
	})
	if err != nil {
		return mig.Geometry{}, err
	}
	geometry.Unlisted = len(g.profiles) == 0
	if len(geometry.Profiles) == 0 && known {
		published.Unlisted = geometry.Unlisted
		for _, p := range published.Profiles {
			g.profiles[p.ID] = instanceProfile{GPUInstanceProfile{ID: p.ID, Slices: p.Profile.Slices}, p.Profile}
		}
		return published, nil
	}
	for _, p := range geometry.Profiles {
		geometry.Slices = max(geometry.Slices, p.Profile.Slices)
		geometry.Slots = max(geometry.Slots, slices.Max(p.Starts)+p.Size)
	}
	slices.SortFunc(geometry.Profiles, func(a, b mig.ProfileInfo) int { return a.Profile.Compare(b.Profile) })
	geometry.Renamed = renamed(geometry, published)
	return geometry, nil
}

// renamed returns the published profiles for which the driver has another name, as drivers have for
// GPUs that share a PCI device ID but have more or less memory. NVML's number of the profile is the
// same.
func renamed(own, published mig.Geometry) (names map[mig.Profile]mig.Profile) {
	for _, p := range published.Profiles {
		if _, same := own.ProfileInfo(p.Profile); same {
			continue
		}
		i := slices.IndexFunc(own.Profiles, func(info mig.ProfileInfo) bool { return info.Enum == p.Enum })
		if i < 0 {
			continue
		}
		if names == nil {
			names = map[mig.Profile]mig.Profile{}
		}
		names[p.Profile] = own.Profiles[i].Profile
	}
	return names
}

func (g *migGPU) profileInfo(enum int, info GPUInstanceProfile, published mig.Geometry) (mig.ProfileInfo, error) {
	p := mig.ProfileInfo{
		Enum: enum,
		ID:   info.ID,
		Max:  info.Instances,
	}
	if profile, err := info.named(); err == nil {
		p.Profile = profile.Instance()
	}
	for _, other := range published.Profiles {
		if other.Enum == enum && p.Profile.IsZero() {
			p.Profile = other.Profile
		}
		if other.Enum == enum && p.Profile == other.Profile {
			p.Max = max(p.Max, other.Max)
		}
	}
	placements, err := listed(g.lib.DeviceGetGpuInstancePossiblePlacements(g.device, info.ID))
	for _, at := range placements {
		p.Size = at.Size
		p.Starts = append(p.Starts, at.Start)
	}
	slices.Sort(p.Starts)
	return p, err
}

// profileOf returns the driver's GPU instance profile for the partition.
func (g *migGPU) profileOf(partition mig.Profile) (instanceProfile, error) {
	if _, err := g.geometry(); err != nil {
		return instanceProfile{}, err
	}
	for _, p := range g.profiles {
		if p.profile == partition.Instance() {
			return p, nil
		}
	}
	return instanceProfile{}, fmt.Errorf("%s: %w", partition, mig.ErrUnknownProfile)
}

// setMode changes the MIG mode. The driver reports in two places whether it could.
func (g *migGPU) setMode(on bool) error {
	activation, err := g.lib.DeviceSetMigMode(g.device, on)
	if err != nil {
		return err
	}
	if activation != Success {
		return &Error{Call: "DeviceSetMigMode: activation", Return: activation}
	}
	return nil
}

// destroyCompute destroys the compute instance that is the MIG device with that UUID. It uses the
// UUID because IDs of compute instances are reused.
func (g *migGPU) destroyCompute(migUUID string) error {
	devices, err := g.migDevices()
	if err != nil {
		return err
	}
	for key, device := range devices {
		if device.uuid != migUUID {
			continue
		}
		instance, err := g.lib.DeviceGetGpuInstanceById(g.device, key.gi)
		if err != nil {
			return err
		}
		compute, err := g.lib.GpuInstanceGetComputeInstanceById(instance, key.ci)
		if err == nil {
			g.inUse = device.handle
			err = g.lib.ComputeInstanceDestroy(compute)
		}
		return gone(err)
	}
	return nil
}

// destroyInstance destroys the GPU instance with the step's ID if it has the step's placement.
func (g *migGPU) destroyInstance(ctx context.Context, step mig.Step) error {
	instance, err := g.lib.DeviceGetGpuInstanceById(g.device, step.GI)
	if err != nil {
		return gone(err)
	}
	info, err := g.lib.GpuInstanceGetInfo(instance)
	if err != nil {
		return err
	}
	if at := info.placement(); at != step.Placement {
		return fmt.Errorf("GPU instance %d is at %s now", step.GI, at)
	}
	// For a moment after its last compute instance has gone, the driver reports a GPU instance as in
	// use. The pauses are 0.3 s in all.
	retry := wait.Backoff{
		Duration: 5 * time.Millisecond,
		Factor:   2,
		Steps:    6,
	}
	for {
		err := g.lib.GpuInstanceDestroy(instance)
		if !errors.Is(err, InUse) || retry.Steps == 0 {
			return gone(err)
		}
		if !wake.Sleep(ctx, retry.Step()) {
			return err
		}
	}
}

// gone returns nil if there was nothing to destroy, which counts as success.
func gone(err error) error {
	if errors.Is(err, NotFound) {
		return nil
	}
	return err
}

func (g *migGPU) createInstance(step mig.Step) error {
	profile, err := g.profileOf(step.Profile)
	if err == nil {
		_, err = g.lib.DeviceCreateGpuInstanceWithPlacement(g.device, profile.ID, step.Placement)
	}
	return err
}

func (g *migGPU) createCompute(step mig.Step) error {
	profile, err := g.profileOf(step.Profile)
	if err != nil {
		return err
	}
	instances, err := g.lib.DeviceGetGpuInstances(g.device, profile.ID)
	if err != nil {
		return err
	}
	for _, instance := range instances {
		info, err := g.lib.GpuInstanceGetInfo(instance)
		if err != nil {
			return err
		}
		if info.placement() != step.Placement {
			continue
		}
		compute := -1
		err = g.eachComputeProfile(instance, func(p ComputeInstanceProfile) error {
			if compute < 0 && p.Slices == step.Profile.Compute {
				compute = p.ID
			}
			return nil
		})
		switch {
		case err != nil:
			return err
		case compute < 0:
			return fmt.Errorf("the GPU instance has no compute instances of %d slices", step.Profile.Compute)
		}
		_, err = g.lib.GpuInstanceCreateComputeInstance(instance, compute)
		return err
	}
	return fmt.Errorf("there is no GPU instance %s at %s", step.Profile.Instance(), step.Placement)
}

func (i GPUInstanceInfo) placement() mig.Placement {
	return mig.Placement{Start: i.Start, Size: i.Size}
}
