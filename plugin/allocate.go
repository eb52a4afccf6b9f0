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

// grant answers for one container. It reads nothing but the generation, because the
// whole node's pod handling waits for it. The error is a gRPC status, whose message
// ends up in the pod's event. sameUnit says that two of the devices are of one unit.
func (g *generation) grant(
	ids []string,
	now time.Time,
) (response *api.ContainerAllocateResponse, sameUnit bool, err error) {
	name := g.resource.Name
	if len(ids) == 0 {
		return nil, false, refusef(Internal, codes.InvalidArgument, "%s: no device requested", name)
	}
	places := make([]int, 0, min(len(ids), len(g.uses))) // A request may have millions of IDs that do not exist.
	for _, id := range ids {
		place, ok := g.choices.Index(id)
		if !ok {
			return nil, false, refusef(UnknownDevice, codes.NotFound, "%s has no device %s", name, quoteID(id))
		}
		places = append(places, place)
	}
	slices.Sort(places) // So that the same devices always give the same answer, and those of a unit are neighbours.
	var units []sharing.Unit
	timeSliced, repeated := false, ""
	shares, several := 0, true // By MPS.
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
	// The devices count as held only now that the call is going to succeed.
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

// takeBack forgets a grant that came to nothing. The kubelet had chosen the devices, so
// nobody holds them from before either.
func (g *generation) takeBack(ids []string, granted time.Time) {
	for _, id := range ids {
		place, _ := g.choices.Index(id)
		g.uses[place].granted.CompareAndSwap(granted.UnixNano(), 0)
	}
}

// What NVIDIA's container runtime reads (nvidia-container-toolkit,
// internal/config/image).
const (
	visibleDevices     = "NVIDIA_VISIBLE_DEVICES"
	driverCapabilities = "NVIDIA_DRIVER_CAPABILITIES"
	imexChannels       = "NVIDIA_IMEX_CHANNELS"
	deviceMountRoot    = "/var/run/nvidia-container-devices"
)

type allocateResponse struct {
	grantTerms
	// resource and ids are what was requested, units what stands behind it, and names
	// how a container knows these units.
	resource string
	ids      []string
	units    []sharing.Unit
	names    []string
	// mpsShares is how many shares the unit has if it is shared by MPS, and granted how many of
	// them these are.
	mpsShares, granted int
}

// response is the answer as the API has it. It depends on nothing but its receiver.
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
	// NVIDIA's plugin sets them beside the CDI entries, too (internal/plugin/server.go).
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
		// The runtime takes the names from the mounts when the variable says so.
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

// MPSAccess has a container's programs talk to the unit's daemon, with the limits of what it
// was granted; root is the host's directory of MPS. The daemon shows them one device, which is
// their ordinal 0: NVIDIA's plugin found that a limit by UUID is not applied (its release
// v0.15.0). The variable with the directory has the daemon's own value, as NVIDIA's
// documentation wants it: internal/mps has it there.
//
// Both directories are the unit's own. A client connects to the sockets and writes to a named pipe, which a
// read-only mount lets it do; NVIDIA's runtime mounts /tmp/nvidia-mps read-only, too (nvidia-container-toolkit,
// internal/discover/ipc.go). So none can put a socket of its own in the daemon's place.
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

// nodes are the device nodes, those that every container needs first. With DriverMounts
// no runtime that knows GPUs is involved, and a program may have to create nodes itself,
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

// nameEntries names the CDI entries, in the kubelet's field or in an annotation.
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

// allocationID tells the annotation of one resource from that of another in the same
// container. The same devices always have the same one. It is as long as the random
// UUID that NVIDIA's plugin uses, so that it fits into the 63 characters of a key.
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

// Host is what a node has ready for containers. It is gathered beforehand, because
// Allocate reads no files, and must not be changed once it was handed over.
type Host struct {
	// Nodes are the device nodes of each unit, by its ID: "/dev/nvidia0", and a
	// partition's capabilities. A partition has none where grants have no nodes.
	Nodes map[string][]string
	// ControlNodes are those that every container needs, as far as they exist.
	ControlNodes []string
	// DevRoot is the host's directory that the nodes' paths are relative to; empty for "/".
	DevRoot string
	// IMEXChannels are those of Grants.IMEXChannels that the node has, IMEXLacks says why one of
	// them is missing.
	IMEXChannels []string
	IMEXLacks    string
	// Extras are the qualified CDI names of those of Grants.Extras that the node has.
	Extras []string
	// Obstacles say why a unit cannot be granted now, by its ID.
	Obstacles map[string]string
	// NoCDIEntry are the units that claims cannot be given, because there is no CDI entry for
	// them, and why; nil where no claims are served.
	NoCDIEntry map[string]string
}

// CDIVendor is the vendor of the CDI entries that NVIDIA's device plugin creates. Ours
// have the same names, so that a container can restart after either plugin has taken
// the other's place
// (k8s-device-plugin, cmd/nvidia-device-plugin/plugin-manager.go).
const CDIVendor = "k8s.device-plugin.nvidia.com"

// CDIClass is the class of GPUs and partitions, IMEXClass that of IMEX channels, whose entries
// have their numbers as names.
const (
	CDIClass  = "gpu"
	IMEXClass = "imex-channel"
)

// IMEXNode is the device node of the IMEX channel of that number.
func IMEXNode(channel string) string { return "/dev/nvidia-caps-imex-channels/channel" + channel }

// CDIName is the qualified name of a CDI entry.
func CDIName(class, name string) string { return CDIVendor + "/" + class + "=" + name }

// unitNames are the names by which a container knows the units. A unit that has left
// the plan may have no known index; its UUID is always known.
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
