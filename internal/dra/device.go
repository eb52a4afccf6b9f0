package dra

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

const (
	maxLabel = 63
	// maxText is the maximum length of a text attribute.
	maxText = resourceapi.DeviceAttributeMaxValueLength
)

const (
	slicesSuffix = "-ts"
	mpsSuffix    = "-mps"
)

// suffixOf returns the ending of device names in the mode.
func suffixOf(mode sharing.Mode) string {
	switch {
	case mode.Shares > 0:
		return mpsSuffix + strconv.Itoa(mode.Shares)
	case mode == sharing.TimeSliced:
		return slicesSuffix
	}
	return ""
}

// parseName is the reverse of nameOf: it returns the unit's name, and the mode.
func parseName(device string) (unitName string, mode sharing.Mode) {
	if i := strings.LastIndex(device, mpsSuffix); i >= 0 {
		if n, err := strconv.Atoi(device[i+len(mpsSuffix):]); err == nil && n > 0 {
			return device[:i], sharing.MPSMode(n)
		}
	}
	if unitName, is := strings.CutSuffix(device, slicesSuffix); is {
		return unitName, sharing.TimeSliced
	}
	return device, sharing.Exclusive
}

// UnitNameOf returns the name of the unit that is offered under this device name.
func UnitNameOf(device string) string {
	unitName, _ := parseName(device)
	return unitName
}

// ModeOf returns how claims share a device with this name.
func ModeOf(device string) sharing.Mode {
	_, mode := parseName(device)
	return mode
}

// DeviceName returns the name of the device for a GPU or a partition:
//
//	name      = "gpu-" uuid [ "-" profile "-" place ] [ "-ts" | "-mps" shares ]
//	place     = start [ "-ci" compute instance ] | "gi" GPU instance
//
// A claim refers to its device by name for its whole life, even across reboots. After a reboot, a
// partition has another UUID and a GPU may have another minor number, so a partition's name
// consists of its GPU and its place. The name also contains how the device is shared, because the
// allocator compares an exclusive device only with exclusive allocations of the same name. If a
// shared name became exclusive, the device would be allocated although shares are still in use.
func DeviceName(gpu string, p *sharing.Partition, unit sharing.Unit) string {
	return nameOf(gpu, p, unit.Mode())
}

// UnitName returns the name of a unit. It stays the same while the hardware exists, however the unit
// is shared.
func UnitName(gpu string, p *sharing.Partition) string { return nameOf(gpu, p, sharing.Exclusive) }

// NamedUnit is a unit's name and its partition; the partition is nil for a whole GPU.
type NamedUnit struct {
	Name      string
	Partition *sharing.Partition
}

// UnitNames returns the GPUs' units with their names, by UUID.
func UnitNames(gpus []sharing.GPU) map[string]NamedUnit {
	named := map[string]NamedUnit{}
	for _, gpu := range gpus {
		if !gpu.MIG {
			named[gpu.UUID] = NamedUnit{UnitName(gpu.UUID, nil), nil}
		}
		for i := range gpu.Partitions {
			p := &gpu.Partitions[i]
			named[p.UUID] = NamedUnit{UnitName(gpu.UUID, p), p}
		}
	}
	return named
}

func nameOf(gpu string, p *sharing.Partition, mode sharing.Mode) string {
	begin, suffix := strings.ToLower(gpu), suffixOf(mode)
	if p == nil {
		return begin + suffix
	}
	place := strconv.Itoa(p.Placement.Start)
	if p.Placement.Size == 0 {
		place = "gi" + strconv.Itoa(p.GI)
	}
	if p.Profile.Compute != p.Profile.Slices {
		place += "-ci" + strconv.Itoa(p.CI)
	}
	name := begin + "-" + p.Profile.Label() + "-" + place
	// The longest suffix decides, so that the name begins with the same text in all modes.
	if len(name+suffixOf(sharing.MPSMode(sharing.MaxMPSClients))) > maxLabel {
		name = begin + "-" + hash(p.Profile.String()) + "-" + place
	}
	return name + suffix
}

func hash(text string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(text))
	return fmt.Sprintf("x%08x", h.Sum32())
}

// device returns the device of a unit in the plan.
func (b *builder) device(gpu sharing.GPU, p *sharing.Partition, r sharing.Resource, unit sharing.Unit) device {
	// A request for several shares would get all of them from one unit, so it is refused if the
	// profile refuses that.
	mode := unit.Mode()
	single := r.FailRequestsGreaterThanOne && mode.Shares == 0 || r.SpreadStrict || mode.Shares > 0 && !unit.MPS.Several
	d := b.describe(gpu, p, mode, unit.Replicas, single, r.Name)
	if !unit.Health.Healthy() {
		d.Taints = []resourceapi.DeviceTaint{{
			Key:    b.Driver + "/fault",
			Value:  labelValue(unit.Health.Reason),
			Effect: resourceapi.DeviceTaintEffectNoSchedule,
		}}
	}
	return d
}

// describe returns the device of a GPU or partition, with this many shares if it is not exclusive.
func (b *builder) describe(
	gpu sharing.GPU,
	p *sharing.Partition,
	mode sharing.Mode,
	shares int,
	single bool,
	name string,
) device {
	d := device{
		gpu:      gpu.UUID,
		resource: name,
		Device:   resourceapi.Device{Name: nameOf(gpu.UUID, p, mode)},
	}
	memory := gpu.Memory
	kind := "gpu"
	uuid := gpu.UUID
	profile := ""
	placement := ""
	var has mig.Engines // For a whole GPU, the engines of its largest instances.
	for _, instance := range b.OnDemand[gpu.UUID].Engines {
		has = mig.Engines{
			Multiprocessors: max(has.Multiprocessors, instance.Multiprocessors),
			CopyEngines:     max(has.CopyEngines, instance.CopyEngines),
			Decoders:        max(has.Decoders, instance.Decoders),
			Encoders:        max(has.Encoders, instance.Encoders),
			JPEGEngines:     max(has.JPEGEngines, instance.JPEGEngines),
			OFAEngines:      max(has.OFAEngines, instance.OFAEngines),
		}
	}
	if p != nil {
		has = p.Attributes.Engines()
		memory = p.Memory
		kind = "mig"
		uuid = p.UUID
		profile = p.Profile.String()
		if p.Placement.Size > 0 {
			placement = p.Placement.String()
		}
	}
	// Every device has every attribute, because a missing one is an error in a CEL expression, and
	// that error ends the scheduling of the pod. The first eleven are the attributes of NVIDIA's
	// driver. The addressing mode is not queried from the driver.
	d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"type":                            text(kind),
		"uuid":                            text(uuid),
		"parentUUID":                      text(gpu.UUID),
		"profile":                         text(profile),
		"productName":                     text(gpu.Model),
		"brand":                           text(gpu.Brand),
		"architecture":                    text(architecture(gpu.Architecture)),
		"cudaComputeCapability":           version(gpu.ComputeCapability),
		"driverVersion":                   version(b.DriverVersion),
		"cudaDriverVersion":               version(fmt.Sprintf("%d.%d", b.CUDA/1000, b.CUDA%1000/10)),
		"addressingMode":                  text(""),
		"index":                           number(gpu.Index),
		"numaNode":                        number(gpu.NUMANode),
		"placement":                       text(placement),
		"resource":                        text(name),
		"sharing":                         text(mode.Kind.String()),
		"resource.kubernetes.io/pciBusID": text(strings.ToLower(strings.TrimPrefix(gpu.PCIBusID, "0000"))),
	}
	// Two attributes may be missing: claims use them to request devices of one PCIe root or NUMA
	// node, and all devices with an unknown value would match each other. The second one is
	// standard from Kubernetes 1.37 on (StandardDeviceAttributeNUMANode in its deviceattribute
	// package).
	if gpu.NUMANode >= 0 {
		d.Attributes["resource.kubernetes.io/numaNode"] = number(gpu.NUMANode)
	}
	if root := b.PCIeRoots[gpu.UUID]; root != "" {
		d.Attributes["resource.kubernetes.io/pcieRoot"] = text(root)
	}
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: quantity(
		memory / mebibyte * mebibyte)}}
	for name, count := range map[resourceapi.QualifiedName]int{
		"multiprocessors": has.Multiprocessors,
		"copyEngines":     has.CopyEngines,
		"decoders":        has.Decoders,
		"encoders":        has.Encoders,
		"jpegEngines":     has.JPEGEngines,
		"ofaEngines":      has.OFAEngines,
	} {
		d.Capacity[name] = partOf(count, mode)
	}
	if mode != sharing.Exclusive {
		d.AllowMultipleAllocations = new(true)
		d.Capacity[SharesCapacity] = sharesOf(shares, single)
		d.Capacity["memory"] = memoryOf(memory, mode)
	}
	return d
}

// architecture returns the name that NVIDIA's driver uses (go-nvlib, GetArchitectureAsString),
// because claims compare it.
func architecture(family string) string {
	switch family {
	case "":
		return ""
	case "ada":
		return "Ada Lovelace"
	}
	return strings.ToUpper(family[:1]) + family[1:]
}

const mebibyte = 1 << 20

// memoryOf returns the memory of a shared device as a capacity. On a time-sliced device, a request
// may reserve some memory and otherwise consumes none; without a policy the first request would
// consume all of it. An MPS share has exactly its part, whatever the request says, so it consumes
// that part, and no device fits a request for more.
func memoryOf(memory uint64, mode sharing.Mode) resourceapi.DeviceCapacity {
	c := resourceapi.DeviceCapacity{Value: quantity(memory / mebibyte * mebibyte)}
	if mode.Shares > 0 {
		if part := quantity(sharing.NewMPSLimit(1, mode.Shares, memory).PinnedMemory); !part.IsZero() {
			c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: &part, ValidValues: []resource.Quantity{part}}
		}
	} else if none, step := quantity(0), quantity(mebibyte); c.Value.Cmp(step) >= 0 {
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default:    &none,
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &none, Step: &step},
		}
	}
	return c
}

// partOf returns a device's number of multiprocessors or of one kind of engine, as a capacity. On a
// shared device, a request consumes none unless it asks for some; without a policy the first
// request would consume all.
func partOf(count int, mode sharing.Mode) resourceapi.DeviceCapacity {
	c := resourceapi.DeviceCapacity{Value: quantity(uint64(count))}
	none := quantity(0)
	one := quantity(1)
	switch {
	case mode == sharing.Exclusive:
	case count == 0: // A range needs room for a step.
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: &none, ValidValues: []resource.Quantity{none}}
	default:
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default:    &none,
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &none, Step: &one},
		}
	}
	return c
}

// sharesOf returns the number of shares as a capacity, of which each request consumes at least one.
// If only zeros were consumed, the device would count as unused.
func sharesOf(n int, single bool) resourceapi.DeviceCapacity {
	one := quantity(1)
	policy := &resourceapi.CapacityRequestPolicy{
		Default:    &one,
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one, Step: &one},
	}
	if single || n == 1 { // A range needs room for a step beyond its minimum.
		policy = &resourceapi.CapacityRequestPolicy{Default: &one, ValidValues: []resource.Quantity{one}}
	}
	return resourceapi.DeviceCapacity{Value: quantity(uint64(n)), RequestPolicy: policy}
}

// known returns a function that describes the GPUs' devices by name, including devices that have
// left the plan. It returns false for a device whose GPU or partition is gone.
func (b *builder) known() func(name string) (device, bool) {
	type unit struct {
		gpu   sharing.GPU
		p     *sharing.Partition
		takes mig.Counters
	}
	units := map[string]unit{}
	for _, gpu := range b.GPUs {
		partitions := []*sharing.Partition{nil}
		for i := range gpu.Partitions {
			partitions = append(partitions, &gpu.Partitions[i])
		}
		geometry, onDemand := b.OnDemand[gpu.UUID]
		if onDemand {
			partitions = partitions[:1]
			for _, p := range geometry.Placements() {
				partitions = append(partitions, placed(gpu, geometry, p))
			}
		}
		for _, p := range partitions {
			u := unit{gpu: gpu, p: p}
			if onDemand {
				u.takes = takes(geometry, p)
			}
			units[UnitName(gpu.UUID, p)] = u
		}
	}
	return func(name string) (device, bool) {
		unitName, mode := parseName(name)
		u, is := units[unitName]
		if !is {
			return device{}, false
		}
		d := b.describe(u.gpu, u.p, mode, 1, true, "") // The shares in use are all that exist.
		d.takes = u.takes
		return d, d.Name == name
	}
}

// gone returns a device of which only the name is known.
func (b *builder) gone(name string) device {
	unknown := sharing.GPU{Index: -1, NUMANode: -1}
	var gpu string
	for uuid := range b.gpus {
		if strings.HasPrefix(name, strings.ToLower(uuid)+"-") {
			gpu, unknown = uuid, b.gpus[uuid]
		}
	}
	mode := ModeOf(name)
	d := b.describe(unknown, nil, mode, 1, true, "")
	d.Name, d.gpu = name, gpu
	d.Attributes["type"], d.Attributes["uuid"] = text("mig"), text("")
	if d.gpu == "" {
		d.Attributes["type"] = text("")
	}
	d.Capacity["memory"] = resourceapi.DeviceCapacity{}
	return d
}

func takes(geometry mig.Geometry, p *sharing.Partition) mig.Counters {
	if p == nil {
		return geometry.Supply()
	}
	return geometry.Needs(mig.Partition{Profile: p.Profile, Placement: p.Placement})
}

func quantity(n uint64) resource.Quantity { return *resource.NewQuantity(int64(n), resource.BinarySI) }

func text(s string) resourceapi.DeviceAttribute {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return resourceapi.DeviceAttribute{StringValue: &s}
}

func number(n int) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{IntValue: new(int64(n))}
}

// version returns a version of three numbers without leading zeros, as semver.org requires:
// 580.65.6 for 580.65.06. Text that is no version becomes 0.0.0.
func version(s string) resourceapi.DeviceAttribute {
	numbers := [3]uint64{}
	for i, part := range strings.SplitN(s, ".", len(numbers)) {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil {
			numbers = [3]uint64{}
			break
		}
		numbers[i] = n
	}
	written := fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2])
	return resourceapi.DeviceAttribute{VersionValue: &written}
}

// labelValue converts the text to a valid label value.
func labelValue(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' {
			return r
		}
		return ' '
	}, s)
	s = strings.Join(strings.Fields(s), "-")
	return strings.Trim(s[:min(len(s), maxLabel)], "-_.")
}
