package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/virgate/virgate/sharing"
)

// What NVIDIA's container runtime reads (nvidia-container-toolkit,
// internal/config/image).
const (
	visibleDevices     = "NVIDIA_VISIBLE_DEVICES"
	driverCapabilities = "NVIDIA_DRIVER_CAPABILITIES"
	deviceMountRoot    = "/var/run/nvidia-container-devices"
)

// answer is what one container receives.
type answer struct {
	grants sharing.Grants
	host   *Host
	// resource and ids are what was requested, names the units that stand behind
	// it as a container knows them.
	resource string
	ids      []string
	units    []sharing.Unit
	names    []string
}

// response writes the answer out. It depends on nothing but its receiver.
func (a answer) response() *api.ContainerAllocateResponse {
	response := &api.ContainerAllocateResponse{}
	if a.grants.CDI() {
		a.nameEntries(response)
	}
	if a.grants.OnlyCDI() {
		return response
	}
	response.Envs = map[string]string{visibleDevices: strings.Join(a.names, ",")}
	if a.grants.By(sharing.VolumeMounts) {
		// The runtime takes the names from the mounts when the variable says so.
		response.Envs[visibleDevices] = deviceMountRoot
		for _, name := range a.names {
			response.Mounts = append(response.Mounts, &api.Mount{HostPath: "/dev/null", ContainerPath: deviceMountRoot + "/" + name})
		}
	}
	if a.grants.By(sharing.DriverMounts) {
		response.Envs[driverCapabilities] = "compute,utility"
		response.Mounts = append(response.Mounts, &api.Mount{
			HostPath: a.grants.DriverHostPath, ContainerPath: a.grants.DriverContainerPath, ReadOnly: true,
		})
	}
	if a.grants.Nodes() {
		response.Devices = a.nodes()
	}
	for _, extra := range a.grants.Extras() {
		response.Envs["NVIDIA_"+strings.ToUpper(extra)] = "enabled"
	}
	return response
}

// nodes are the device nodes, those that every container needs first. Without
// a runtime that knows GPUs a program may have to make its own (m).
func (a answer) nodes() []*api.DeviceSpec {
	permissions := "rw"
	if a.grants.By(sharing.DriverMounts) {
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
	specs := make([]*api.DeviceSpec, len(paths))
	for i, path := range paths {
		specs[i] = &api.DeviceSpec{ContainerPath: path, HostPath: a.host.onHost(path), Permissions: permissions}
	}
	return specs
}

// nameEntries names the CDI entries, to the kubelet or in an annotation.
func (a answer) nameEntries(response *api.ContainerAllocateResponse) {
	entries := make([]string, 0, len(a.names)+len(a.host.Extras))
	for _, name := range a.names {
		entries = append(entries, CDIName(CDIClass, name))
	}
	entries = append(entries, a.host.Extras...)
	if a.grants.By(sharing.CDIAnnotations) {
		key := a.grants.AnnotationPrefix + "nvidia-device-plugin_" + allocationID(a.resource, a.ids)
		response.Annotations = map[string]string{key: strings.Join(entries, ",")}
	}
	if a.grants.By(sharing.CDICRI) {
		for _, entry := range entries {
			response.CdiDevices = append(response.CdiDevices, &api.CDIDevice{Name: entry})
		}
	}
}

// allocationID tells the annotation of one resource from that of another in the
// same container. It is the same whenever the same devices are allocated, and
// as long as the random UUID that NVIDIA's plugin takes, which the 63
// characters of a key leave room for.
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
