package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
	"google.golang.org/grpc/codes"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// grant answers for one container. It reads only the generation, because pod admission on the whole
// node waits for it. The error is a gRPC status, whose message appears in the pod's event. sameUnit
// reports whether two of the devices are on one unit that is not shared by MPS.
func (g *generation) grant(
	ids []string,
	now time.Time,
) (response *api.ContainerAllocateResponse, sameUnit bool, err error) {
	name := g.resource.Name
	if len(ids) == 0 {
		return nil, false, refusef(Internal, codes.InvalidArgument, "%s: no device requested", name)
	}
	places := make([]int, 0, min(len(ids), len(g.uses))) // A request may list millions of IDs that do not exist.
	for _, id := range ids {
		place, ok := g.choices.Index(id)
		if !ok {
			return nil, false, refusef(UnknownDevice, codes.NotFound, "%s has no device %s", name, quoteID(id))
		}
		places = append(places, place)
	}
	slices.Sort(places) // So the same devices always give the same answer, and one unit's devices are adjacent.
	var units []sharing.Unit
	timeSliced, repeated := false, ""
	shares, several := 0, true // Both are for MPS only.
	for _, place := range places {
		e := &g.list.Entries[place]
		unit := g.units[e.Unit]
		if !unit.Health.Healthy() {
			return nil, false, refusef(UnhealthyDevice, codes.Unavailable, "%s: device %s must not be used: %s", name,
				e.ID, unit.Health.Reason)
		}
		if reason := g.withheld[e.Unit]; reason != "" && !e.Switching {
			return nil, false, refusef(NotReady, codes.Unavailable, "%s: device %s must not be used: %s", name, e.ID,
				reason)
		}
		if e.Closed {
			return nil, false, closedDevice(name, e.ID)
		}
		if of := e.Mode.Shares; of > 0 {
			shares, several = of, several && unit.MPS.Several
		} else {
			timeSliced = timeSliced || e.Mode == sharing.TimeSliced
		}
		if last := len(units) - 1; last >= 0 && units[last].ID == e.Unit {
			repeated = e.Unit
			continue
		}
		units = append(units, unit)
	}
	if g.resource.FailRequestsGreaterThanOne && timeSliced && len(ids) > 1 {
		return nil, false, refusef(TooMany, codes.InvalidArgument,
			"%s is shared: a container may request 1, not %d (more shares give access to the same GPU, not more of "+
				"it; failRequestsGreaterThanOne is set)", name, len(ids))
	}
	if shares > 0 && !several && len(ids) > 1 {
		return nil, false, refusef(TooMany, codes.InvalidArgument,
			"%s is shared by MPS: a container may request 1, not %d (sharing.mps.failRequestsGreaterThanOne is set, "+
				"as it is by default)", name, len(ids))
	}
	if shares > 0 && len(units) > 1 {
		return nil, false, refusef(SeveralUnits, codes.ResourceExhausted,
			"%s is shared by MPS: a container's shares are all of one GPU, and none has %d free (a program talks to "+
				"the daemon of one GPU)", name, len(ids))
	}
	if g.resource.SpreadStrict && repeated != "" {
		return nil, false, refusef(SameUnit, codes.ResourceExhausted,
			"%s: %d devices were requested on distinct GPUs, but only devices of %d are free (two of them are on %s; "+
				"spread is strict)", name, len(ids), len(units), repeated)
	}
	if g.terms.grants.Nodes() {
		for _, u := range units {
			if len(g.terms.host.Nodes[u.ID]) == 0 {
				return nil, false, refusef(NotReady, codes.Unavailable,
					"%s: device %s must not be used: its device node is not known", name, u.ID)
			}
		}
	}
	// Record the grant only now that the call is going to succeed: from here on the devices count
	// as held.
	at := now.UnixNano()
	for _, place := range places {
		g.uses[place].granted.Store(at)
	}
	return allocateResponse{
		grantTerms: g.terms,
		resource:   name,
		ids:        ids,
		units:      units,
		names:      unitNames(units, g.resource.DeviceIDs),
		mpsShares:  shares,
		granted:    len(slices.Compact(places)),
	}.response(), repeated != "" && shares == 0, nil
}

// takeBack undoes the grant of a call that failed afterwards. The kubelet had chosen the devices as
// free, so no pod holds them from an earlier grant either.
func (g *generation) takeBack(ids []string, granted time.Time) {
	for _, id := range ids {
		place, _ := g.choices.Index(id)
		g.uses[place].granted.CompareAndSwap(granted.UnixNano(), 0)
	}
}

// Environment variables and the mount directory that NVIDIA's container runtime reads
// (nvidia-container-toolkit, internal/config/image).
const (
	visibleDevices     = "NVIDIA_VISIBLE_DEVICES"
	driverCapabilities = "NVIDIA_DRIVER_CAPABILITIES"
	imexChannels       = "NVIDIA_IMEX_CHANNELS"
	deviceMountRoot    = "/var/run/nvidia-container-devices"
)

type allocateResponse struct {
	grantTerms
	// resource and ids are the request, units are the units of the requested devices, and names are
	// the names by which a container addresses these units.
	resource string
	ids      []string
	units    []sharing.Unit
	names    []string
	// mpsShares is the number of shares of the unit if it is shared by MPS, and granted is how many
	// of them this container gets.
	mpsShares, granted int
}

// response returns the answer in the API's form. It depends only on its receiver.
func (a allocateResponse) response() *api.ContainerAllocateResponse {
	response := &api.ContainerAllocateResponse{}
	if a.grants.CDI() {
		a.nameEntries(response)
	}
	if a.mpsShares > 0 {
		unit := a.units[0]
		response.Envs, response.Mounts = MPSAccess(a.grants.MPSRoot, unit.ID,
			sharing.NewMPSLimit(a.granted, a.mpsShares, unit.Memory))
	}
	if response.Envs == nil {
		response.Envs = map[string]string{}
	}
	// NVIDIA's plugin, too, sets these variables beside the CDI entries (internal/plugin/server.go).
	for _, extra := range a.grants.Extras() {
		response.Envs["NVIDIA_"+strings.ToUpper(extra)] = "enabled"
	}
	if a.grants.OnlyCDI() {
		return response
	}
	response.Envs[visibleDevices] = strings.Join(a.names, ",")
	if a.grants.Uses(sharing.Envvar) && len(a.host.IMEXChannels) > 0 {
		response.Envs[imexChannels] = strings.Join(a.host.IMEXChannels, ",")
	}
	if a.grants.Uses(sharing.VolumeMounts) {
		// This value of the variable tells the runtime to read the names from the mounts.
		response.Envs[visibleDevices] = deviceMountRoot
		for _, name := range a.names {
			response.Mounts = append(response.Mounts,
				&api.Mount{HostPath: "/dev/null", ContainerPath: deviceMountRoot + "/" + name})
		}
		for _, channel := range a.host.IMEXChannels {
			response.Mounts = append(response.Mounts,
				&api.Mount{HostPath: "/dev/null", ContainerPath: deviceMountRoot + "/imex/" + channel})
		}
	}
	if a.grants.Uses(sharing.DriverMounts) {
		response.Envs[driverCapabilities] = "compute,utility"
		response.Mounts = append(response.Mounts, &api.Mount{
			HostPath:      a.grants.DriverHostPath,
			ContainerPath: a.grants.DriverContainerPath,
			ReadOnly:      true,
		})
	}
	if a.grants.Nodes() {
		response.Devices = a.nodes()
	}
	return response
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
func MPSAccess(root, unit string, limit sharing.MPSLimit) (envs map[string]string, mounts []*api.Mount) {
	pipe := path.Join("/mps", unit, "pipe")
	envs = map[string]string{
		"CUDA_MPS_PIPE_DIRECTORY":           pipe,
		"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": strconv.Itoa(limit.ThreadPercentage),
	}
	if limit.PinnedMemory > 0 {
		envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = "0=" + strconv.FormatUint(limit.PinnedMemory>>20, 10) + "M"
	}
	return envs, []*api.Mount{
		{
			HostPath:      path.Join(root, unit, "pipe"),
			ContainerPath: pipe,
			ReadOnly:      true,
		},
		{HostPath: path.Join(root, unit, "shm"), ContainerPath: "/dev/shm"},
	}
}

// nodes returns the device nodes, starting with the ones that every container needs. With
// DriverMounts no GPU-aware runtime is involved, and a program may have to create nodes itself,
// hence the permission m (mknod).
func (a allocateResponse) nodes() []*api.DeviceSpec {
	permissions := "rw"
	if a.grants.Uses(sharing.DriverMounts) {
		permissions = "rwm"
	}
	paths := slices.Clone(a.host.ControlNodes)
	for _, u := range a.units {
		for _, path := range a.host.Nodes[u.ID] {
			if !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
	}
	for _, channel := range a.host.IMEXChannels {
		paths = append(paths, IMEXNode(channel))
	}
	specs := make([]*api.DeviceSpec, len(paths))
	for i, path := range paths {
		specs[i] = &api.DeviceSpec{
			ContainerPath: path,
			HostPath:      strings.TrimSuffix(a.host.DevRoot, "/") + path,
			Permissions:   permissions,
		}
	}
	return specs
}

// nameEntries adds the names of the CDI entries to the response: in the kubelet's field, in an
// annotation, or in both.
func (a allocateResponse) nameEntries(response *api.ContainerAllocateResponse) {
	entries := make([]string, 0, len(a.names)+len(a.host.IMEXChannels)+len(a.host.Extras))
	for _, name := range a.names {
		entries = append(entries, CDIName(CDIClass, name))
	}
	for _, channel := range a.host.IMEXChannels {
		entries = append(entries, CDIName(IMEXClass, channel))
	}
	entries = append(entries, a.host.Extras...)
	if a.grants.Uses(sharing.CDIAnnotations) {
		key := a.grants.AnnotationPrefix + "nvidia-device-plugin_" + allocationID(a.resource, a.ids)
		response.Annotations = map[string]string{key: strings.Join(entries, ",")}
	}
	if a.grants.Uses(sharing.CDICRI) {
		for _, entry := range entries {
			response.CdiDevices = append(response.CdiDevices, &api.CDIDevice{Name: entry})
		}
	}
}

// allocationID makes the annotations of two resources in one container differ. The same devices
// always get the same ID. It is as long as the random UUID that NVIDIA's plugin uses, so that the
// key stays within its limit of 63 characters.
func allocationID(resource string, ids []string) string {
	hash := sha256.New()
	hash.Write([]byte(resource))
	for _, id := range slices.Sorted(slices.Values(ids)) {
		hash.Write([]byte{0})
		hash.Write([]byte(id))
	}
	const length = 36
	return hex.EncodeToString(hash.Sum(nil))[:length]
}

// Host is what a node provides for containers. It is gathered beforehand, because Allocate reads no
// files. It must not be changed after it was passed to a Manager.
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

// IMEXNode returns the device node of the IMEX channel with that number.
func IMEXNode(channel string) string { return "/dev/nvidia-caps-imex-channels/channel" + channel }

// CDIName returns the qualified name of a CDI entry.
func CDIName(class, name string) string { return CDIVendor + "/" + class + "=" + name }

// unitNames returns the names by which a container addresses the units. A unit that has left the
// plan may have no known index; its UUID is always known.
func unitNames(units []sharing.Unit, by sharing.DeviceIDStrategy) []string {
	names := make([]string, len(units))
	for i, u := range units {
		names[i] = u.ID
		if by == sharing.ByIndex && u.Index != "" {
			names[i] = u.Index
		}
	}
	return names
}
