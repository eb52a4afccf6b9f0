package configs

import (
	"cmp"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// newGrants resolves what a container receives. An empty path or prefix is the
// default one.
func newGrants(set settings) sharing.Grants {
	grants := sharing.Grants{
		DeviceNodes:         set.on(pathDeviceNodes),
		GDRCopy:             set.on(pathGDRCopy),
		GDS:                 set.on(pathGDS),
		MOFED:               set.on(pathMOFED),
		AnnotationPrefix:    cmp.Or(set[pathAnnotationPrefix], "cdi.k8s.io/"),
		DriverHostPath:      cmp.Or(set[pathDriverHostPath], "/usr/local/nvidia"),
		DriverContainerPath: cmp.Or(set[pathDriverContainerPath], "/usr/local/nvidia"),
	}
	for _, item := range listItems(set[pathDeviceList]) {
		if strategy := sharing.ListStrategy(item); !slices.Contains(grants.Strategies, strategy) {
			grants.Strategies = append(grants.Strategies, strategy)
		}
	}
	return grants
}
