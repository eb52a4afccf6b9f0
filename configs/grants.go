package configs

import (
	"slices"

	"github.com/virgate/virgate/sharing"
)

// newGrants resolves what a container receives.
func newGrants(set settings) sharing.Grants {
	grants := sharing.Grants{
		DeviceNodes:         set.on(pathDeviceNodes),
		GDRCopy:             set.on(pathGDRCopy),
		GDS:                 set.on(pathGDS),
		MOFED:               set.on(pathMOFED),
		AnnotationPrefix:    set[pathAnnotationPrefix],
		DriverHostPath:      set[pathDriverHostPath],
		DriverContainerPath: set[pathDriverContainerPath],
	}
	for _, item := range listItems(set[pathDeviceList]) {
		if strategy := sharing.ListStrategy(item); !slices.Contains(grants.Strategies, strategy) {
			grants.Strategies = append(grants.Strategies, strategy)
		}
	}
	return grants
}
