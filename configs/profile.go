package configs

import (
	"cmp"
	"slices"

	"github.com/virgate/virgate/sharing"
)

const versionV1 = "v1"

// readProfile reads a device-plugin document. What it returns is of use only if
// no problem was reported. layouts are MIG layouts that stand elsewhere.
func readProfile(root value, overrides Overrides, layouts MIGConfigs) Config {
	document := root.mapping("version", "flags", "resources", "sharing", "imex", "exclude", "mig", "health")
	readVersion(document.field("version"))
	set := readSettings(document, overrides)
	profile := sharing.Profile{
		MIGStrategy: sharing.MIGStrategy(set[pathMIGStrategy]),
		Policy:      sharing.Policy(set[pathPolicy]),
		DeviceIDs:   sharing.DeviceIDStrategy(set[pathDeviceIDs]),
		Grants:      newGrants(set),
		Exclude:     readExclude(document.field("exclude")),
		Health:      readHealth(document.field("health"), overrides),
	}
	profile.GPUNames, profile.MIGNames = readNames(document.field("resources"))
	readSharing(document.field("sharing"), &profile)
	profile.MIG, layouts = readMIG(document.field("mig"), layouts)

	notes := root.source.notes
	slices.SortStableFunc(notes, func(a, b Note) int { return cmp.Compare(a.Line, b.Line) })
	return Config{Profile: profile, Process: newProcess(set), Layouts: layouts, Notes: notes}
}

func newProcess(set settings) Process {
	return Process{
		FailOnInitError:         set.on(pathFailOnInitError),
		DriverRoot:              set[pathDriverRoot],
		DevRoot:                 cmp.Or(set[pathDevRoot], set[pathDriverRoot]),
		ContainerDriverRoot:     set[pathContainerDriverRoot],
		DeviceDiscoveryStrategy: set[pathDiscovery],
		CDIHookPath:             set[pathCDIHook],
		CDIFeatures:             set[pathCDIFeatures],
	}
}

// readVersion takes a missing version for v1, as NVIDIA's plugin does.
func readVersion(v value) {
	if version, ok := v.text(); ok && version != versionV1 {
		v.problem("expected " + versionV1)
	}
}

// readExclude reads the selectors of what is never offered.
func readExclude(v value) []sharing.Selector {
	items, ok := v.items()
	if !ok || len(items) == 0 {
		return nil
	}
	v.note("Virgate's own: these are never offered; NVIDIA's plugin has no such key")
	seen := make(map[sharing.Selector]int)
	return readSelectors(items, seen)
}

// readSelectors reads selectors and reports those that were seen before, here
// or in the caller's earlier lists; seen has the lines.
func readSelectors(items []value, seen map[sharing.Selector]int) []sharing.Selector {
	selectors := make([]sharing.Selector, 0, len(items))
	for _, item := range items {
		selector, ok := readSelector(item)
		if !ok {
			continue
		}
		if line, again := seen[selector]; again {
			item.problem(alreadySelected(line))
			continue
		}
		seen[selector] = item.line
		selectors = append(selectors, selector)
	}
	return selectors
}
