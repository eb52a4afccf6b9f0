package sharing

import "slices"

// Grants says what a container receives for its devices.
type Grants struct {
	// Strategies are the ways in which a container is told its devices, in the
	// order of the document, each once; none means Envvar.
	Strategies []ListStrategy
	// DeviceNodes grants the units' device nodes too (passDeviceSpecs). It means
	// nothing where OnlyCDI, as CDI entries bring them.
	DeviceNodes bool
	// GDRCopy, GDS and MOFED ask the container runtime for GDRCopy, GPUDirect
	// Storage and Mellanox' network stack.
	GDRCopy, GDS, MOFED bool
	// AnnotationPrefix begins the key of a CDI annotation: "cdi.k8s.io/".
	AnnotationPrefix string
	// DriverHostPath is the host's folder with the driver that DriverMounts
	// mounts, DriverContainerPath where the container sees it.
	DriverHostPath, DriverContainerPath string
}

// ListStrategy is a way to tell a container its devices. The names are those of
// NVIDIA's device plugin, but for DriverMounts.
type ListStrategy string

const (
	// Envvar names the devices in NVIDIA_VISIBLE_DEVICES, for NVIDIA's container
	// runtime.
	Envvar ListStrategy = "envvar"
	// VolumeMounts names them by mounts below /var/run/nvidia-container-devices,
	// for the same runtime. A pod cannot give itself such a mount by an
	// environment variable.
	VolumeMounts ListStrategy = "volume-mounts"
	// CDIAnnotations names their CDI entries in an annotation.
	CDIAnnotations ListStrategy = "cdi-annotations"
	// CDICRI names their CDI entries in the kubelet's request to the runtime.
	CDICRI ListStrategy = "cdi-cri"
	// DriverMounts mounts the driver and the device nodes, and needs no help of
	// the runtime. It is Virgate's own name for what GKE's plugin does.
	DriverMounts ListStrategy = "driver-mounts"
)

// By says that the strategy is one of those in force.
func (g Grants) By(s ListStrategy) bool {
	return slices.Contains(g.Strategies, s) || s == Envvar && len(g.Strategies) == 0
}

// CDI says that a strategy needs CDI entries.
func (g Grants) CDI() bool { return g.By(CDIAnnotations) || g.By(CDICRI) }

// OnlyCDI says that no strategy does without CDI entries.
func (g Grants) OnlyCDI() bool {
	return g.CDI() && !g.By(Envvar) && !g.By(VolumeMounts) && !g.By(DriverMounts)
}

// Nodes says that containers receive device nodes.
func (g Grants) Nodes() bool { return g.DeviceNodes && !g.OnlyCDI() || g.By(DriverMounts) }

// Extras are the CDI classes of GDRCopy, GDS and MOFED that are switched on, in
// this order, which is that of NVIDIA's plugin.
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

// warn mentions that two resources in one container can come into conflict. The
// kubelet takes one of two different values of a variable, at random for each
// start of the container. Grants that name no strategy come from no document,
// and are not judged.
func (g Grants) warn(resources []Resource, notes *warnings) {
	alone := slices.Contains(g.Strategies, Envvar) && !g.By(VolumeMounts) && !g.CDI() && !g.By(DriverMounts)
	if !alone || len(resources) < 2 {
		return
	}
	notes.addf("deviceListStrategy %s: a container that asks for two resources of this node sees the devices of one of them, another one at every start; %s and %s have no such limit",
		Envvar, VolumeMounts, CDICRI)
}
