package configs

import (
	"slices"

	"github.com/virgate/virgate/sharing"
)

// sharedEntry is an entry of sharing.timeSlicing.resources while it is being
// checked against the others.
type sharedEntry struct {
	value value
	// replicas is the place of the number.
	replicas value
	share    sharing.Share
	// policyWritten says that the entry itself has a policy or a spread.
	policyWritten bool
}

// offeredAs is the name under which the entry's units are advertised.
func (e sharedEntry) offeredAs() string {
	if e.share.Rename != "" {
		return e.share.Rename
	}
	return e.share.Resource
}

// readSharing reads the section sharing into a profile that has its names, its
// MIG strategy and its policy.
func readSharing(v value, profile *sharing.Profile) {
	section := v.mapping(keysOf("sharing")...)
	refuseMPS(section.field("mps"))

	slicing := section.field("timeSlicing")
	f := slicing.mapping(keysOf(pathTimeSlicing)...)
	renameByDefault, _ := f.field("renameByDefault").boolean()
	profile.OneShareOnly, _ = f.field("failRequestsGreaterThanOne").boolean()
	items, ok := f.field("resources").items()
	if !slicing.absent() && (!ok || len(items) == 0) && len(f.entries) > 0 {
		slicing.note("names no resources, so nothing is time-sliced; NVIDIA's plugin refuses this")
	}
	reader := shareReader{
		profile:         profile,
		renameByDefault: renameByDefault,
		keys:            keysOf(pathShare),
		names:           madeNames(*profile),
		seen:            make(map[string]map[sharing.Selector]int),
	}
	for _, item := range items {
		if e, ok := reader.read(item); ok {
			reader.entries = append(reader.entries, e)
		}
	}
	reportUnreachable(reader.entries)
	settlePolicies(reader.entries)
	newListLimit(*profile).report(reader.entries)
	for _, e := range reader.entries {
		profile.Shares = append(profile.Shares, e.share)
	}
}

// madeNames are the names that resources makes, sorted.
func madeNames(profile sharing.Profile) []string {
	var names []string
	for _, naming := range slices.Concat(profile.GPUNames, profile.MIGNames) {
		names = append(names, naming.Name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// refuseMPS accepts the section as long as it asks for nothing.
func refuseMPS(v value) {
	f := v.mapping(keysOf(pathMPS)...)
	f.field("renameByDefault").boolean()
	f.field("failRequestsGreaterThanOne").boolean()
	resources := f.field("resources")
	if items, ok := resources.items(); ok && len(items) == 0 || resources.absent() {
		return
	}
	resources.problem("MPS is not supported yet; time-slicing is, under sharing.timeSlicing")
}
