package cdi

import (
	"cmp"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/virgate/virgate/sharing"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Claims finds which GPUs a DRA driver has allocated to a container. The kubelet knows the driver's
// names for the devices and their CDI entries; the specs with these entries name the device nodes.
// Its methods may be called from any goroutine.
type Claims struct {
	dirs []string
	gpus func() ([]sharing.GPU, error)

	mu    sync.Mutex
	files specFiles
}

// NewClaims returns Claims that gets the GPUs from inventory and reads the CDI specs in these
// folders, or in the CDI library's default folders if none is given. If inventory returns an error,
// its GPUs are still used: they are the last known ones.
func NewClaims(inventory func() ([]sharing.GPU, error), dirs ...string) *Claims {
	if len(dirs) == 0 {
		dirs = cdilib.DefaultSpecDirs
	}
	return &Claims{dirs: dirs, gpus: inventory}
}

// nvidiaDriver is the name of NVIDIA's DRA driver for GPUs. Its devices are named gpu-<minor>, or
// gpu-<minor>-mig-<MIG profile>-<its ID>-<first slot>.
const nvidiaDriver = "gpu.nvidia.com"

// otherGPUs are the DRA drivers of Intel's and AMD's GPUs.
var otherGPUs = []string{"gpu.intel.com", "gpu.amd.com"}

var (
	gpuUUID      = regexp.MustCompile(`(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
	gpuNode      = regexp.MustCompile(`^nvidia([0-9]+)$`)
	nvidiaDevice = regexp.MustCompile(`^gpu-([0-9]+)(?:-mig-.+-[0-9]+-([0-9]+))?$`)
)

// anyGPU stands for GPUs that cannot be identified.
const anyGPU = "any"

// hardwareOf returns the GPUs that the edits give a container: UUIDs, names of device nodes such as
// nvidia0, or anyGPU.
func hardwareOf(edits specs.ContainerEdits) (hardware []string) {
	for _, variable := range edits.Env {
		uuids := gpuUUID.FindAllString(variable, -1)
		hardware = append(hardware, uuids...)
		value, visible := strings.CutPrefix(variable, "NVIDIA_VISIBLE_DEVICES=")
		if visible && len(uuids) == 0 && value != "" && value != "void" && value != "none" {
			hardware = append(hardware, anyGPU) // Indexes or "all", which NVIDIA's runtime resolves.
		}
	}
	for _, node := range edits.DeviceNodes {
		if name := path.Base(cmp.Or(node.HostPath, node.Path)); gpuNode.MatchString(name) {
			hardware = append(hardware, name)
		}
	}
	return hardware
}

// Units returns the UUIDs of the GPUs and partitions that a container has through a claim, sorted;
// none if it has none of NVIDIA's. devices are the driver's names for the allocated devices, and
// names are their CDI entries.
//
// If Units cannot identify the hardware, it errs on the safe side: a partition counts as its GPU; a
// GPU counts as all GPUs, and guessed is true. An entry that no spec has counts as a GPU if its
// name or the driver's contains "gpu".
func (c *Claims) Units(driver string, devices, names []string) (units []string, guessed bool) {
	gpus, _ := c.gpus() // After an error these are the last known GPUs.
	for _, hardware := range c.hardware(driver, devices, names) {
		node := gpuNode.FindStringSubmatch(hardware)
		at := slices.IndexFunc(gpus, func(gpu sharing.GPU) bool {
			return node != nil && strconv.Itoa(gpu.Minor) == node[1]
		})
		switch {
		case node == nil && hardware != anyGPU:
			units = append(units, hardware)
		case at >= 0:
			units = append(units, unitsOf(gpus[at], driver, devices)...)
		default:
			guessed = true
		}
	}
	if guessed {
		for _, gpu := range gpus {
			units = append(units, gpu.UUID)
		}
	}
	slices.Sort(units)
	return slices.Compact(units), guessed
}

// hardware returns the hardware of the claim's devices, in the form of hardwareOf.
func (c *Claims) hardware(driver string, devices, names []string) (hardware []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.files.refresh(nil, c.dirs...)
	missing := len(names) == 0
	for _, name := range names {
		uuids := gpuUUID.FindAllString(name, -1)
		entry, found := c.files.entry(name)
		hardware = slices.Concat(hardware, uuids, entry)
		missing = missing || !found && len(uuids) == 0
	}
	if !missing {
		return hardware
	}
	for _, device := range devices {
		if match := nvidiaDevice.FindStringSubmatch(device); driver == nvidiaDriver && match != nil {
			hardware = append(hardware, "nvidia"+match[1])
		} else if strings.Contains(driver+strings.Join(names, ""), "gpu") && !slices.Contains(otherGPUs, driver) {
			hardware = append(hardware, anyGPU)
		}
	}
	return hardware
}

// unitsOf returns the GPU's partitions to which NVIDIA's DRA driver refers by these devices. For a
// device that is the GPU itself or an unknown partition of it, it returns the GPU's UUID.
func unitsOf(gpu sharing.GPU, driver string, devices []string) (units []string) {
	for _, device := range devices {
		match := nvidiaDevice.FindStringSubmatch(device)
		if driver != nvidiaDriver || match == nil || match[1] != strconv.Itoa(gpu.Minor) {
			continue
		}
		unit := gpu.UUID
		for _, p := range gpu.Partitions {
			if p.Placement.Size > 0 && strconv.Itoa(p.Placement.Start) == match[2] {
				unit = p.UUID
			}
		}
		units = append(units, unit)
	}
	if len(units) == 0 {
		return []string{gpu.UUID}
	}
	return units
}
