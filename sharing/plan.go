package sharing

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/mig"
)

// NewPlan decides what a node with these GPUs advertises under the profile. Each step works on the
// result of the previous one:
//
//  1. exclude: drop the GPUs and partitions that Profile.Exclude names
//  2. offer: by MIG strategy, as whole GPUs, as partitions or not at all
//  3. name: the resource each unit belongs to
//  4. assign: give each unit to the first entry that selects it
//  5. replicate and rename: one resource per final name, with its devices
//  6. copy each unit's health to its devices
//
// Health comes last, so it never changes which devices are advertised, only whether they are
// healthy. Planning cannot fail. Anything that the profile asks for and the node lacks, or that the
// node has and cannot offer, becomes a warning. The order of GPUs and partitions does not matter,
// and gpus is not modified.
func NewPlan(gpus []GPU, p Profile) Plan {
	plan := withoutDevices(gpus, p)
	for i := range plan.Resources {
		plan.Resources[i].Devices = devices(plan.Resources[i].Units)
	}
	return plan
}

// TooLong returns the entries of the profile whose units do not all fit into one list. It returns
// LeftOut of a new plan without listing the plan's devices.
func TooLong(gpus []GPU, p Profile) []LeftOut { return withoutDevices(gpus, p).LeftOut }

func withoutDevices(gpus []GPU, p Profile) Plan {
	gpus = ordered(gpus)
	plan := Plan{
		Health:      healthByUnit(gpus),
		Grants:      p.Grants,
		RetireAfter: p.RetireAfter,
	}

	var warn warnings
	p.DeviceIDs = safeDeviceIDs(gpus, p.DeviceIDs, &warn)
	if text := Renumbering(gpus); text != "" {
		warn.addf("%s", text)
	}
	if p.MIG.LeftTo != "" {
		warn.addf("mig.manage has no effect: %s", p.MIG.LeftTo)
	}
	reportPatterns(gpus, p, &warn)
	gpus = exclude(gpus, p.Exclude, &warn)
	units := offer(gpus, p.MIGStrategy, &warn)
	nameUnits(units, p)
	assignEntries(units, p.TimeSlicing, &warn)
	units = refuseTooManyClients(units, p.TimeSlicing, &warn)
	plan.Resources = resources(units, p, &warn)
	plan.LeftOut = warn.leftOut
	plan.Unmatched = first(sorted(warn.unmatched), warningsShown)
	plan.Warnings = sorted(append(warn.all, plan.Unmatched...))
	return plan
}

// safeDeviceIDs returns how grants name units. A container runtime reads an index as the driver's
// current index. While the driver's indexes differ from the first ones, an index would select
// another GPU for the container, so units are named by UUID.
func safeDeviceIDs(gpus []GPU, wanted DeviceIDStrategy, warn *warnings) DeviceIDStrategy {
	if wanted == ByIndex && slices.ContainsFunc(gpus, func(g GPU) bool { return g.DriverIndex != "" }) {
		warn.addf(
			"deviceIDStrategy index: units are granted by UUID while the driver does not list all GPUs under their " +
				"first indexes; " +
				"a container that was granted an index before may get another GPU when it restarts")
		return ByUUID
	}
	return wanted
}

// Renumbering describes which GPUs have other driver indexes now; "" for none.
func Renumbering(gpus []GPU) string {
	var moved []string
	for _, g := range gpus {
		if g.DriverIndex != "" && g.DriverIndex != Lost && g.DriverIndex != NotListed {
			moved = append(moved, fmt.Sprintf("GPU %d is its %s", g.Index, g.DriverIndex))
		}
	}
	if moved == nil {
		return ""
	}
	return "the driver has renumbered the GPUs, Virgate has not: " + strings.Join(moved, ", ")
}

// ordered returns a copy of the GPUs, deep enough to modify, with GPUs and their partitions sorted
// by index.
func ordered(gpus []GPU) []GPU {
	gpus = slices.SortedFunc(slices.Values(gpus), func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	for i := range gpus {
		gpus[i].Partitions = slices.SortedFunc(slices.Values(gpus[i].Partitions), func(a, b Partition) int {
			return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
		})
	}
	return gpus
}

func healthByUnit(gpus []GPU) map[string]Health {
	byUnit := make(map[string]Health)
	for _, gpu := range gpus {
		byUnit[gpu.UUID] = gpu.Health
		for _, partition := range gpu.Partitions {
			byUnit[partition.UUID] = cmp.Or(gpu.Health, partition.Health)
		}
	}
	return byUnit
}

// warnings collects a plan's Warnings, Unmatched and LeftOut.
type warnings struct {
	all, unmatched []string
	leftOut        []LeftOut
}

func (w *warnings) addf(format string, args ...any) {
	w.all = append(w.all, fmt.Sprintf(format, args...))
}

// unmatchedf is addf for names in the profile that match nothing.
func (w *warnings) unmatchedf(format string, args ...any) {
	w.unmatched = append(w.unmatched, fmt.Sprintf(format, args...))
}

// warningsShown limits how many of the unmatched names are listed; there may be thousands.
const warningsShown = 100

// first returns the first texts and, if there are more, a text with their number.
func first(texts []string, shown int) []string {
	if more := len(texts) - shown; more > 0 {
		return append(slices.Clip(texts[:shown]), fmt.Sprintf("and %d more that match nothing on this node", more))
	}
	return texts
}

func sorted(texts []string) []string {
	slices.Sort(texts)
	return slices.Compact(texts)
}

// reportPatterns warns about name patterns that match nothing on the node. It is silent about model
// patterns on a node without GPUs, and about MIG patterns without partitions or with another MIG
// strategy than mixed.
func reportPatterns(gpus []GPU, p Profile, warn *warnings) {
	var models, profiles []string
	for _, gpu := range gpus {
		models = append(models, gpu.Model)
		for _, partition := range gpu.Partitions {
			if p.MIGStrategy == MIGMixed && !partition.Profile.IsZero() {
				profiles = append(profiles, partition.Profile.String())
			}
		}
	}
	report := func(path string, rules []NamingRule, match func(Pattern, string) bool, what string, there []string) {
		there = sorted(there)
		for i, rule := range rules {
			if len(there) > 0 && !slices.ContainsFunc(there,
				func(name string) bool { return match(rule.Pattern, name) }) {
				warn.unmatchedf("%s[%d].pattern: %q matches no %s of this node, which has %s; case matters", path, i,
					rule.Pattern, what, quotedList(there))
			}
		}
	}
	report("resources.gpus", p.GPUNames, Pattern.Match, "GPU", models)
	report("resources.mig", p.MIGNames, Pattern.MatchWhole, "partition", profiles)
}

func quotedList(texts []string) string {
	quoted := make([]string, len(texts))
	for i, text := range texts {
		quoted[i] = strconv.Quote(text)
	}
	return strings.Join(quoted, ", ")
}

// exclude returns the GPUs without those that the selectors name, and without named partitions. A
// GPU whose partitions are all named is dropped as if it were named itself, so no later warning
// mentions it.
func exclude(gpus []GPU, selectors []Selector, warn *warnings) []GPU {
	matched := make([]bool, len(selectors))
	// named tries every selector, because a second selector for the same GPU matches something too.
	named := func(matches func(Selector) bool) bool {
		found := false
		for i, selector := range selectors {
			if matches(selector) {
				matched[i], found = true, true
			}
		}
		return found
	}

	var kept []GPU
	for _, gpu := range gpus {
		whole := named(func(s Selector) bool { return s.MatchGPU(gpu) })
		partitions := slices.DeleteFunc(slices.Clone(gpu.Partitions), func(p Partition) bool {
			return named(func(s Selector) bool { return s.MatchPartition(gpu, p) })
		})
		if whole || len(partitions) == 0 && len(gpu.Partitions) > 0 {
			continue
		}
		gpu.Partitions = partitions
		kept = append(kept, gpu)
	}
	for i, selector := range selectors {
		if !matched[i] {
			warn.unmatchedf("exclude[%d]: %s on this node", i, selector.inVain(gpus))
		}
	}
	return kept
}

// candidate is a unit while it is being planned.
type candidate struct {
	gpu *GPU
	// partition is nil for a whole GPU.
	partition *Partition
	// name is the resource's name before an entry of Profile.TimeSlicing renames it.
	name string
	// entry is the index of the unit's entry in Profile.TimeSlicing, or exclusive for none.
	entry int
}

// exclusive is the entry of a unit that one container has alone.
const exclusive = -1

func (c candidate) matches(s Selector) bool {
	if c.partition == nil {
		return s.MatchGPU(*c.gpu)
	}
	return s.MatchPartition(*c.gpu, *c.partition)
}

// offer returns the units that the MIG strategy offers, by GPU and partition.
func offer(gpus []GPU, strategy MIGStrategy, warn *warnings) []candidate {
	var (
		units []candidate
		// With strategy "single" there must be one kind of hardware behind the name, so one GPU
		// with MIG rules out whole GPUs. This holds even while that GPU has no partitions, because
		// it may be about to get some.
		onlyPartitions = strategy == MIGSingle && slices.ContainsFunc(gpus, func(g GPU) bool { return g.MIG })
		kind           = mostCommonProfile(gpus)
	)
	for i := range gpus {
		gpu := &gpus[i]
		if gpu.DriverIndex == NotListed {
			warn.addf("%s: not offered: the driver does not list it any more", describe(gpu))
		}
		switch {
		case !gpu.MIG && onlyPartitions:
			warn.addf("%s: not offered: MIG is off, while MIG strategy %q offers partitions only on this node",
				describe(gpu), strategy)
		case !gpu.MIG:
			if gpu.Denied {
				warn.addf(
					"%s: the driver does not let this program read it: it is offered as it was, and its faults are "+
						"not seen", describe(gpu))
			}
			units = append(units, candidate{gpu: gpu, entry: exclusive})
		case strategy != MIGSingle && strategy != MIGMixed:
			warn.addf("%s: not offered: MIG is enabled, and MIG strategy %q offers whole GPUs only",
				describe(gpu), MIGNone)
		case gpu.Denied:
			warn.addf("%s: its partitions cannot be read, or not all about them: %s", describe(gpu), NoMIGRight)
			units = append(units, partitions(gpu, strategy == MIGSingle, kind, warn)...)
		case len(gpu.Partitions) == 0:
			warn.addf("%s: not offered: MIG is enabled, and there are no partitions", describe(gpu))
		default:
			units = append(units, partitions(gpu, strategy == MIGSingle, kind, warn)...)
		}
	}
	return units
}

// partitions returns the GPU's partitions, or only those of one kind with a warning about the
// others. A partition with an unknown profile cannot be offered, because its resource has no name.
func partitions(gpu *GPU, oneKind bool, kind mig.Profile, warn *warnings) []candidate {
	var units []candidate
	others := make(map[mig.Profile]int)
	for j := range gpu.Partitions {
		partition := &gpu.Partitions[j]
		switch {
		case partition.Profile.IsZero():
			warn.addf("%s: partition %d (%s) not offered: its MIG profile is unknown",
				describe(gpu), partition.Index, partition.UUID)
		case oneKind && partition.Profile != kind:
			others[partition.Profile]++
		default:
			units = append(units, candidate{
				gpu:       gpu,
				partition: partition,
				entry:     exclusive,
			})
		}
	}
	for profile, count := range others {
		warn.addf("%s: %d × %s not offered: MIG strategy %q offers one kind of partition, on this node %s",
			describe(gpu), count, profile, MIGSingle, kind)
	}
	return units
}

// NoMIGRight names the missing right if the driver answers NO_PERMISSION about a GPU with MIG, for
// warnings of a plan.
const NoMIGRight = "the container lacks the right to monitor MIG, which requires the capability SYS_ADMIN and " +
	"NVIDIA_MIG_MONITOR_DEVICES=all, or a privileged container: the chart's mig.monitor"

// mostCommonProfile returns the MIG profile with the most partitions; of two with as many, the
// smaller one; without partitions, the zero profile. Unhealthy partitions count too, because a
// fault must not change what a node advertises.
func mostCommonProfile(gpus []GPU) mig.Profile {
	counts := make(map[mig.Profile]int)
	for _, gpu := range gpus {
		for _, partition := range gpu.Partitions {
			if gpu.MIG {
				counts[partition.Profile]++
			}
		}
	}
	delete(counts, mig.Profile{})
	var best mig.Profile
	for profile, count := range counts {
		if count > counts[best] || count == counts[best] && profile.Compare(best) < 0 {
			best = profile
		}
	}
	return best
}

func describe(g *GPU) string { return fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID) }

// defaultDomain is the domain of resources that no rule names, as in NVIDIA's internal/rm/rm.go.
const defaultDomain = "nvidia.com/"

// nameUnits sets the resource name of each unit. With MIG strategy single, a partition has the name
// that its GPU would have.
func nameUnits(units []candidate, p Profile) {
	for i, u := range units {
		kind := u.gpu.Model
		rules := p.GPUNames
		name := defaultDomain + "gpu"
		match := Pattern.Match
		if u.partition != nil && p.MIGStrategy != MIGSingle {
			kind = u.partition.Profile.String()
			rules = p.MIGNames
			match = Pattern.MatchWhole
			name = defaultDomain + u.partition.Profile.ResourceName()
		}
		if first := slices.IndexFunc(rules, func(r NamingRule) bool { return match(r.Pattern, kind) }); first >= 0 {
			name = rules[first].Name
		}
		units[i].name = name
	}
}

// assignEntries assigns each unit to the first entry that selects it, in the order of the document.
// It warns if an entry does not get the units that it asks for.
func assignEntries(units []candidate, entries []ReplicatedResource, warn *warnings) {
	for i, entry := range entries {
		var all, free []*candidate
		for j := range units {
			if unit := &units[j]; unit.name == entry.Resource {
				all = append(all, unit)
				if unit.entry == exclusive {
					free = append(free, unit)
				}
			}
		}
		switch {
		case len(all) == 0:
			warn.unmatchedf("%s: no unit of %s on this node", entry.Path, entry.Resource)
		case len(free) == 0:
			warn.unmatchedf("%s: earlier entries take every unit of %s", entry.Path, entry.Resource)
		default:
			parts := false
			for _, unit := range entry.choose(all, free, warn) {
				unit.entry = i
				parts = parts || unit.partition != nil
			}
			if parts && entry.Driver != (DriverSettings{}) {
				warn.addf("%s: timeSlice and computeMode are for whole GPUs: partitions of %s have neither", entry.Path,
					entry.Resource)
			}
		}
	}
}

func (e ReplicatedResource) choose(all, free []*candidate, warn *warnings) []*candidate {
	switch {
	case e.Select.All():
		return free
	case e.Select.List != nil:
		return e.chooseListed(all, free, warn)
	case e.Select.Count > len(free):
		warn.unmatchedf("%s.devices: %d units of %s wanted, %d free on this node",
			e.Path, e.Select.Count, e.Resource, len(free))
		return free
	}
	return free[:e.Select.Count]
}

func (e ReplicatedResource) chooseListed(all, free []*candidate, warn *warnings) (chosen []*candidate) {
	for i, selector := range e.Select.List {
		matches := func(unit *candidate) bool { return unit.matches(selector) }
		before := len(chosen)
		for _, unit := range free {
			if matches(unit) {
				chosen = append(chosen, unit)
			}
		}
		switch {
		case len(chosen) > before:
		case slices.ContainsFunc(all, matches):
			warn.unmatchedf("%s.devices[%d]: earlier entries take what %q selects of %s",
				e.Path, i, selector, e.Resource)
		default:
			warn.unmatchedf("%s.devices[%d]: %q selects no unit of %s on this node",
				e.Path, i, selector, e.Resource)
		}
	}
	return chosen
}

// resources groups the units under their final names, sorted by name, without their devices. If
// units of several entries have one name, the resource has the policy of the document's first
// entry.
func resources(units []candidate, p Profile, warn *warnings) []Resource {
	members := make(map[string][]candidate)
	for _, unit := range units {
		name := unit.name
		if unit.entry != exclusive {
			name = cmp.Or(p.TimeSlicing[unit.entry].Rename, name)
		}
		members[name] = append(members[name], unit)
	}

	var all []Resource
	for _, name := range slices.Sorted(maps.Keys(members)) {
		resource := Resource{
			Name:                       name,
			FailRequestsGreaterThanOne: p.FailRequestsGreaterThanOne,
			DeviceIDs:                  p.DeviceIDs,
		}
		resource.Policy, resource.SpreadStrict = policyOf(name, members[name], p, warn)
		// Only now: a GPU that is gone must not change anything for the others.
		there := slices.DeleteFunc(members[name], func(u candidate) bool { return u.gpu.DriverIndex == NotListed })
		if len(there) == 0 {
			continue
		}
		resource.Units = withinListLimit(name, there, p, warn)
		all = append(all, resource)
	}
	return all
}

// policyOf returns how a resource's devices are chosen, and warns about entries with another
// policy.
func policyOf(name string, units []candidate, p Profile, warn *warnings) (policy AllocationPolicy, strict bool) {
	first := -1
	for i, entry := range p.TimeSlicing {
		switch {
		case !slices.ContainsFunc(units, func(c candidate) bool { return c.entry == i }):
		case first < 0:
			first = i
			policy = entry.Policy
			strict = entry.SpreadStrict
		case entry.Policy != policy || entry.SpreadStrict != strict:
			warn.addf("%s: the policy of %s is that of %s", entry.Path, name, p.TimeSlicing[first].Path)
		}
	}
	if first < 0 {
		return p.Policy, false
	}
	return policy, strict
}

func (c candidate) unit(entries []ReplicatedResource) Unit {
	entry := ReplicatedResource{Replicas: 1}
	if c.entry != exclusive {
		entry = entries[c.entry]
	}
	u := Unit{
		ID:       c.gpu.UUID,
		GPU:      c.gpu.UUID,
		Index:    strconv.Itoa(c.gpu.Index),
		Minor:    c.gpu.Minor,
		Model:    c.gpu.Model,
		GI:       -1,
		CI:       -1,
		NUMANode: c.gpu.NUMANode,
		Links:    c.gpu.Links,
		Health:   c.gpu.Health,
		Replicas: max(1, entry.Replicas),
		Driver:   entry.Driver,
		Guard:    entry.Guard,
		Memory:   c.gpu.Memory,
		MPS:      entry.mps(),
	}
	if part := c.partition; part != nil {
		u.ID = part.UUID
		u.Index = c.gpu.PartitionIndex(*part)
		u.Profile = part.Profile
		u.GI, u.CI = part.GI, part.CI
		u.Memory = part.Memory
		// Work in a partition cannot use the GPU's links.
		u.Links, u.Driver = nil, DriverSettings{}
		u.Health = cmp.Or(u.Health, part.Health)
	}
	return u
}

// devices returns one device with the unit's own ID for each exclusive unit, and the replicas of
// the others.
func devices(units []Unit) []Device {
	count := 0
	for _, unit := range units {
		count += unit.Replicas
	}
	all := make([]Device, 0, count)
	for _, unit := range units {
		device := Device{
			ID:       unit.ID,
			Unit:     unit.ID,
			Healthy:  unit.Health.Healthy(),
			NUMANode: unit.NUMANode,
		}
		if unit.Replicas == 1 {
			all = append(all, device)
			continue
		}
		for replica := range unit.Replicas {
			device.ID = unit.deviceID(replica)
			all = append(all, device)
		}
	}
	return all
}

// MaxDevices is the largest number of devices of a resource. If a plugin's list exceeds 4 MiB, the
// kubelet closes the plugin's stream and shows 0 devices from then on. The limit is gRPC's default
// for received messages, which kubernetes 1.36.3 does not change
// (pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go). MaxDevices limits the list to 3 MiB at
// 80 bytes per device: the ID "MIG-GPU-<36 characters>/GI/CI::NNNN" of old drivers needs 57 bytes
// and 4 of framing, "Unhealthy" 11, a NUMA node at most 8.
const MaxDevices = 3 << 20 / 80

// withinListLimit returns the units of a resource, in order, that fit into one list. A profile that
// wants more is refused (configs.SelectedProfile.CheckNode), unless it was already in force when
// the node got more GPUs or partitions.
func withinListLimit(name string, members []candidate, p Profile, warn *warnings) []Unit {
	units := make([]Unit, 0, len(members))
	left := MaxDevices
	without := map[int]int{} // units by entry
	for _, member := range members {
		unit := member.unit(p.TimeSlicing)
		if unit.Replicas > left {
			without[member.entry]++
			continue
		}
		left -= unit.Replicas
		units = append(units, unit)
	}
	for i, entry := range p.TimeSlicing {
		if count := without[i]; count > 0 {
			warn.leftOut = append(warn.leftOut, entry.leftOut(i, name, members, p))
			warn.addf(
				"%s.replicas: %d of %d units with %d replicas are not offered as %s: the kubelet takes no list "+
					"beyond 4 MiB, which is %d devices",
				entry.Path, count, len(members), entry.Replicas, name, MaxDevices)
		}
	}
	return units
}

// leftOut returns the LeftOut of the entry with index i, to which at least one of the members
// belongs.
func (e ReplicatedResource) leftOut(i int, name string, members []candidate, p Profile) LeftOut {
	l := LeftOut{
		Path:     e.Path,
		Resource: name,
		Replicas: e.Replicas,
	}
	others := 0
	for _, member := range members {
		if member.entry == i {
			l.Units++
		} else {
			others += member.unit(p.TimeSlicing).Replicas
		}
	}
	l.Most = max(0, MaxDevices-others) / l.Units
	return l
}
