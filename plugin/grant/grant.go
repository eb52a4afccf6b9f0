// Package grant makes the answer to an Allocate call for one container: environment variables, CDI
// names, mounts and device nodes. It also has the names that others share with these answers.
//
// It reads no files and takes no lock, because pod admission on the whole node waits for an answer.
// Whether a container may have its devices is decided before: see package plugin.
package grant

import (
	"crypto/sha256"
	"encoding/hex"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/sharing"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Host is what a node provides for containers. It is gathered beforehand, because Allocate reads no
// files. It must not be changed after it was passed to a plugin.Manager.
type Host struct {
	// Nodes are the device nodes of each unit, by its ID: "/dev/nvidia0", and a partition's
	// capability nodes. A partition has none if grants do not use device nodes.
	Nodes map[string][]string
	// ControlNodes are the existing device nodes that every container needs.
	ControlNodes []string
	// DevRoot is the host directory that the paths of nodes are relative to; empty for "/".
	DevRoot string
	// IMEXChannels are the channels in Grants.IMEXChannels that exist on the node. IMEXLacks says
	// why one of them is missing.
	IMEXChannels []string
	IMEXLacks    string
	// Extras are the qualified CDI names of the Grants.Extras that exist on the node.
	Extras []string
	// Obstacles gives, by unit ID, the reason why a unit cannot be granted now.
	Obstacles map[string]string
	// NoCDIEntry gives, by unit ID, the reason why a unit has no CDI entry and so cannot be given
	// to claims; nil if no claims are served.
	NoCDIEntry map[string]string
}

// Allocation is what a container was allocated of one resource, and what its answer depends on.
type Allocation struct {
	Grants sharing.Grants
	Host   *Host
	// Resource and IDs are the request. Units are the units of the requested devices, each once.
	Resource sharing.Resource
	IDs      []string
	Units    []sharing.Unit
	// MPSShares is the number of shares of the unit if it is shared by MPS, else 0. Granted is how
	// many of them this container gets.
	MPSShares, Granted int
}

// Environment variables and the mount directory that NVIDIA's container runtime reads
// (nvidia-container-toolkit, internal/config/image).
const (
	visibleDevices     = "NVIDIA_VISIBLE_DEVICES"
	driverCapabilities = "NVIDIA_DRIVER_CAPABILITIES"
	imexChannels       = "NVIDIA_IMEX_CHANNELS"
	deviceMountRoot    = "/var/run/nvidia-container-devices"
)

// Response returns the answer for the container. It depends only on its receiver.
func (a Allocation) Response() *api.ContainerAllocateResponse {
	response := &api.ContainerAllocateResponse{Envs: map[string]string{}}
	names := a.names()
	if a.Grants.CDI() {
		a.nameEntries(names, response)
	}
	if a.MPSShares > 0 {
		unit := a.Units[0]
		mps := MPSAccess(a.Grants.MPSRoot, unit.ID, sharing.NewMPSLimit(a.Granted, a.MPSShares, unit.Memory))
		response.Envs, response.Mounts = mps.Env, mps.Mounts
	}
	// NVIDIA's plugin, too, sets these variables beside the CDI entries (internal/plugin/server.go).
	for _, extra := range a.Grants.Extras() {
		response.Envs["NVIDIA_"+strings.ToUpper(extra)] = "enabled"
	}
	if a.Grants.OnlyCDI() {
		return response
	}
	response.Envs[visibleDevices] = strings.Join(names, ",")
	if a.Grants.Uses(sharing.Envvar) && len(a.Host.IMEXChannels) > 0 {
		response.Envs[imexChannels] = strings.Join(a.Host.IMEXChannels, ",")
	}
	if a.Grants.Uses(sharing.VolumeMounts) {
		// This value of the variable tells the runtime to read the names from the mounts.
		response.Envs[visibleDevices] = deviceMountRoot
		for _, channel := range a.Host.IMEXChannels {
			names = append(names, "imex/"+channel)
		}
		for _, name := range names {
			response.Mounts = append(response.Mounts,
				&api.Mount{HostPath: "/dev/null", ContainerPath: deviceMountRoot + "/" + name})
		}
	}
	if a.Grants.Uses(sharing.DriverMounts) {
		response.Envs[driverCapabilities] = "compute,utility"
		response.Mounts = append(response.Mounts, &api.Mount{
			HostPath:      a.Grants.DriverHostPath,
			ContainerPath: a.Grants.DriverContainerPath,
			ReadOnly:      true,
		})
	}
	if a.Grants.Nodes() {
		response.Devices = a.nodes()
	}
	return response
}

// names returns the names by which the container addresses its units. A unit that has left the plan
// may have no known index; its UUID is always known.
func (a Allocation) names() []string {
	names := make([]string, len(a.Units))
	for i, u := range a.Units {
		names[i] = u.ID
		if a.Resource.DeviceIDs == sharing.ByIndex && u.Index != "" {
			names[i] = u.Index
		}
	}
	return names
}

// nodes returns the device nodes, starting with the ones that every container needs. With
// DriverMounts no GPU-aware runtime is involved, and a program may have to create nodes itself,
// hence the permission m (mknod).
func (a Allocation) nodes() []*api.DeviceSpec {
	permissions := "rw"
	if a.Grants.Uses(sharing.DriverMounts) {
		permissions = "rwm"
	}
	paths := slices.Clone(a.Host.ControlNodes)
	for _, u := range a.Units {
		for _, path := range a.Host.Nodes[u.ID] {
			if !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
	}
	for _, channel := range a.Host.IMEXChannels {
		paths = append(paths, IMEXNode(channel))
	}
	specs := make([]*api.DeviceSpec, len(paths))
	for i, path := range paths {
		specs[i] = &api.DeviceSpec{
			ContainerPath: path,
			HostPath:      strings.TrimSuffix(a.Host.DevRoot, "/") + path,
			Permissions:   permissions,
		}
	}
	return specs
}

// nameEntries adds the names of the CDI entries to the response: in the kubelet's field, in an
// annotation, or in both.
func (a Allocation) nameEntries(names []string, response *api.ContainerAllocateResponse) {
	entries := make([]string, 0, len(names)+len(a.Host.IMEXChannels)+len(a.Host.Extras))
	for _, name := range names {
		entries = append(entries, CDIName(CDIClass, name))
	}
	for _, channel := range a.Host.IMEXChannels {
		entries = append(entries, CDIName(IMEXClass, channel))
	}
	entries = append(entries, a.Host.Extras...)
	if a.Grants.Uses(sharing.CDIAnnotations) {
		key := a.Grants.AnnotationPrefix + "nvidia-device-plugin_" + a.id()
		response.Annotations = map[string]string{key: strings.Join(entries, ",")}
	}
	if a.Grants.Uses(sharing.CDICRI) {
		for _, entry := range entries {
			response.CdiDevices = append(response.CdiDevices, &api.CDIDevice{Name: entry})
		}
	}
}

// id makes the annotations of two resources in one container differ. The same devices always get
// the same ID. It is as long as the random UUID that NVIDIA's plugin uses, so that the key stays
// within its limit of 63 characters.
func (a Allocation) id() string {
	hash := sha256.New()
	hash.Write([]byte(a.Resource.Name))
	for _, id := range slices.Sorted(slices.Values(a.IDs)) {
		hash.Write([]byte{0})
		hash.Write([]byte(id))
	}
	const length = 36
	return hex.EncodeToString(hash.Sum(nil))[:length]
}

// Edits are environment variables and mounts that a container gets, by Allocate or by a CDI entry.
type Edits struct {
	Env    map[string]string
	Mounts []*api.Mount
}

// MPSAccess returns what a container's programs need to talk to the unit's MPS daemon, with the
// limits of the container's grant. root is the MPS directory on the host. The daemon shows its
// clients a single device, ordinal 0; the memory limit uses the ordinal, because NVIDIA's plugin
// found that a limit by UUID is not applied (its release v0.15.0). CUDA_MPS_PIPE_DIRECTORY has the
// same value as in the daemon, as NVIDIA's documentation requires; internal/mps uses this path.
//
// Both directories belong to this unit alone. A client connects to the sockets and writes to a
// named pipe. A read-only mount allows both, and NVIDIA's runtime mounts /tmp/nvidia-mps read-only,
// too (nvidia-container-toolkit, internal/discover/ipc.go). So no client can replace the daemon's
// socket with one of its own.
func MPSAccess(root, unit string, limit sharing.MPSLimit) Edits {
	pipe := path.Join("/mps", unit, "pipe")
	env := map[string]string{
		"CUDA_MPS_PIPE_DIRECTORY":           pipe,
		"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": strconv.Itoa(limit.ThreadPercentage),
	}
	if limit.PinnedMemory > 0 {
		env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = "0=" + strconv.FormatUint(limit.PinnedMemory>>20, 10) + "M"
	}
	return Edits{
		Env: env,
		Mounts: []*api.Mount{
			{
				HostPath:      path.Join(root, unit, "pipe"),
				ContainerPath: pipe,
				ReadOnly:      true,
			},
			{HostPath: path.Join(root, unit, "shm"), ContainerPath: "/dev/shm"},
		},
	}
}

// CDIVendor is the vendor of the CDI entries that NVIDIA's device plugin creates. Virgate's entries
// have the same names, so that a container can restart after one of the two plugins has replaced
// the other (k8s-device-plugin, cmd/nvidia-device-plugin/plugin-manager.go).
const CDIVendor = "k8s.device-plugin.nvidia.com"

// CDIClass is the class of GPUs and partitions. IMEXClass is the class of IMEX channels, whose
// entries are named by channel number.
const (
	CDIClass  = "gpu"
	IMEXClass = "imex-channel"
)

// CDIName returns the qualified name of a CDI entry.
func CDIName(class, name string) string { return CDIVendor + "/" + class + "=" + name }

// GPUNode returns the device node of the GPU with that minor number.
func GPUNode(minor int) string { return "/dev/nvidia" + strconv.Itoa(minor) }

// IMEXNode returns the device node of the IMEX channel with that number.
func IMEXNode(channel string) string { return "/dev/nvidia-caps-imex-channels/channel" + channel }
