package sharing

import "slices"

// Grants says what a container receives for its devices.
type Grants struct {
	// Strategies are the ways in which a container learns its devices, in the order of
	// the document, each once; none means Envvar.
	Strategies []DeviceListStrategy
	// DeviceNodes grants the units' device nodes too (passDeviceSpecs). With OnlyCDI
	// it has no effect, as CDI entries include them.
	DeviceNodes bool
	// GDRCopy, GDS and MOFED ask for GDRCopy, GPUDirect Storage and Mellanox's network stack.
	GDRCopy, GDS, MOFED bool
	// AnnotationPrefix begins the key of a CDI annotation: "cdi.k8s.io/".
	AnnotationPrefix string
	// DriverHostPath is the host's directory of the driver for DriverMounts,
	// DriverContainerPath where it is mounted in the container.
	DriverHostPath, DriverContainerPath string
}

// DeviceListStrategy is a way to tell a container its devices. The names are those of
// NVIDIA's device plugin, except for DriverMounts.
type DeviceListStrategy string

const (
	// Envvar names the devices in NVIDIA_VISIBLE_DEVICES, for NVIDIA's runtime.
	Envvar DeviceListStrategy = "envvar"
	// VolumeMounts names them by mounts below /var/run/nvidia-container-devices, for
	// the same runtime. Unlike a variable, a pod cannot set them itself.
	VolumeMounts DeviceListStrategy = "volume-mounts"
	// CDIAnnotations names their CDI entries in an annotation.
	CDIAnnotations DeviceListStrategy = "cdi-annotations"
	// CDICRI names their CDI entries in the kubelet's request to the runtime.
	CDICRI DeviceListStrategy = "cdi-cri"
	// DriverMounts mounts the driver and the device nodes, without help from the
	// runtime. It is what GKE's plugin does; the name is Virgate's.
	DriverMounts DeviceListStrategy = "driver-mounts"
)

// Uses says that the strategy is one of those in force.
func (g Grants) Uses(s DeviceListStrategy) bool {
	return slices.Contains(g.Strategies, s) || s == Envvar && len(g.Strategies) == 0
}

// CDI says whether a strategy needs CDI entries.
func (g Grants) CDI() bool { return g.Uses(CDIAnnotations) || g.Uses(CDICRI) }

// OnlyCDI says whether all strategies need CDI entries.
func (g Grants) OnlyCDI() bool {
	return g.CDI() && !g.Uses(Envvar) && !g.Uses(VolumeMounts) && !g.Uses(DriverMounts)
}

// Nodes says whether containers receive device nodes.
func (g Grants) Nodes() bool { return g.DeviceNodes && !g.OnlyCDI() || g.Uses(DriverMounts) }

// Extras are the CDI classes of GDRCopy, GDS and MOFED as far as on, in NVIDIA's order.
func (g Grants) Extras() []string {
	var extras []string
	for _, extra := range []struct {
		on    bool
		class string
	}{{g.GDRCopy, "gdrcopy"}, {g.GDS, "gds"}, {g.MOFED, "mofed"}} {
		if extra.on {
			extras = append(extras, extra.class)
		}
	}
	return extras
}

// warn warns that two resources in one container may conflict: of two values of one
// variable, the kubelet takes either one at random at each start of the container.
// Grants without a strategy are from no document, and get no warning.
func (g Grants) warn(resources []Resource, warn *warnings) {
	alone := slices.Contains(g.Strategies, Envvar) && !g.Uses(VolumeMounts) && !g.CDI() && !g.Uses(DriverMounts)
	if !alone || len(resources) < 2 {
		return
	}
	warn.addf("deviceListStrategy %s: a container that asks for two resources of this node sees the devices of one of them, another one at every start; %s and %s have no such limit",
		Envvar, VolumeMounts, CDICRI)
}
