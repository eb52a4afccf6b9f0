package configs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// sharedEntry is an entry of sharing.timeSlicing.resources or sharing.mps.resources, to be checked
// against other entries.
type sharedEntry struct {
	value    value
	replicas value
	share    sharing.ReplicatedResource
	// policyWritten is true if the entry itself has a policy or a spread.
	policyWritten bool
}

// offeredAs returns the name under which the entry's units are advertised.
func (e sharedEntry) offeredAs() string { return cmp.Or(e.share.Rename, e.share.Resource) }

// readSharing reads the section sharing into a profile whose other sections are already read.
func readSharing(v value, profile *sharing.Profile) {
	reader := entryReader{
		profile: profile,
		names:   resourceNames(*profile),
		seen:    make(map[string]map[sharing.Selector]int),
	}
	slicing, mps := v.at("timeSlicing"), v.at("mps")
	entries := reader.readSection(slicing, "time-sliced")
	profile.FailRequestsGreaterThanOne = get[bool](slicing, "failRequestsGreaterThanOne")

	reader.mps = true
	shared := reader.readSection(mps, "shared by MPS")
	if fail := mps.at("failRequestsGreaterThanOne"); fail.content == false && len(shared) > 0 {
		fail.note(
			"a container may have several shares of one unit, and their part of it; NVIDIA's plugin has one " +
				"limit for all")
		for i := range shared {
			shared[i].share.SeveralShares = true
		}
	}
	if len(entries) > 0 && len(shared) > 0 {
		mps.note("beside timeSlicing; NVIDIA's plugin takes one of the two for a node")
	}
	entries = inOrder(entries, shared)
	reportUnreachable(entries)
	unifyPolicies(entries)
	reportLongLists(*profile, entries)
	for _, e := range entries {
		profile.TimeSlicing = append(profile.TimeSlicing, e.share)
	}
}

// resourceNames returns the sorted resource names of the profile so far.
func resourceNames(profile sharing.Profile) (names []string) {
	for _, naming := range slices.Concat(profile.GPUNames, profile.MIGNames) {
		names = append(names, naming.Name)
	}
	for _, share := range profile.TimeSlicing {
		names = append(names, cmp.Or(share.Rename, share.Resource))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// readDRA reads the section dra. The profile's other sections are already read.
func readDRA(v value, profile sharing.Profile) (dra sharing.DRAConfig) {
	if v.filled() {
		v.note(
			"on a node of the GPU Operator, pods with claims block a driver upgrade without the chart's " +
				"dra.nvidiaNames: " + sharing.Evicted)
	}
	resources, dynamic := v.at("resources"), v.at("dynamicMIG")
	known, lines := resourceNames(profile), map[string]int{}
	for _, item := range resources.items {
		name := content[string](item)
		if line, again := lines[name]; again {
			item.problem(fmt.Sprintf("is listed on line %d already", line))
		} else if name != "" {
			if message, near := unknownName(name, known, "a name from resources or sharing"); message != "" {
				item.problem(message + didYouMean(near))
			}
			lines[name], dra.Resources = item.line, append(dra.Resources, name)
		}
	}
	dra.All = resources.content != nil
	dra.DynamicMIG = content[bool](dynamic)
	if dra.DynamicMIG && !profile.MIG.Manage {
		dynamic.note("has no effect without mig.manage: true")
	}
	if dra.DynamicMIG && !dra.All && dra.Resources == nil {
		dynamic.note("has no effect without resources")
	}
	return dra
}

// readSection reads the entries of timeSlicing or mps.
func (r *entryReader) readSection(section value, shared string) (entries []sharedEntry) {
	r.renameByDefault = get[bool](section, "renameByDefault")
	items := section.at("resources").items
	if len(items) == 0 && section.filled() {
		section.note("names no resources, so nothing is " + shared + "; NVIDIA's plugin refuses this")
	}
	for _, item := range items {
		if e, ok := r.read(item); ok {
			entries = append(entries, e)
		}
	}
	return entries
}

// inOrder sorts the entries of both sections by the order in which they take units: entries that
// select some units come before entries that take all remaining ones. Otherwise the document's
// order counts.
func inOrder(slicing, mps []sharedEntry) []sharedEntry {
	entries := slices.Concat(slicing, mps)
	if len(slicing) == 0 || len(mps) == 0 {
		return entries
	}
	slices.SortStableFunc(entries, func(a, b sharedEntry) int {
		switch allA, allB := a.share.Select.All(), b.share.Select.All(); {
		case allA != allB && allA:
			return 1
		case allA != allB:
			return -1
		}
		return cmp.Compare(a.value.line, b.value.line)
	})
	return entries
}

type entryReader struct {
	profile         *sharing.Profile
	renameByDefault bool
	// mps is true for the entries of sharing.mps.
	mps bool
	// names are the resource names from the section resources, sorted.
	names []string
	// seen has, by resource, the lines of the selectors in earlier entries.
	seen map[string]map[sharing.Selector]int
}

// read reads an entry. It returns false if the entry's name, devices or replicas are invalid. If it
// returns true, it may still have reported other problems.
func (r *entryReader) read(item value) (sharedEntry, bool) {
	name, replicas := get[string](item, "name"), get[int](item, "replicas")
	if name != "" {
		r.reportUnknownName(item.at("name"), name)
	}
	if r.seen[name] == nil {
		r.seen[name] = make(map[sharing.Selector]int)
	}
	selection, selected := readSelection(item.at("devices"), r.seen[name])
	e := sharedEntry{
		value:    item,
		replicas: item.at("replicas"),
		share: sharing.ReplicatedResource{
			Path:     item.path,
			Resource: name,
			Select:   selection,
			Replicas: replicas,
			MPS:      r.mps,
		},
	}
	if r.mps && namesPartition(name) {
		item.note("partitions have a daemon each; NVIDIA's plugin refuses them")
	}
	e.share.Rename = r.readRename(item, e.share)
	e.share.Policy, e.share.SpreadStrict, e.policyWritten = r.readPolicy(item)
	e.share.Driver = readDriverSettings(item, e.share)
	e.share.Guard = readMemoryGuard(item.at("memory"), e.share)
	return e, name != "" && replicas > 0 && selected
}

// reportUnknownName reports a name that no GPU can have: a misspelt nvidia.com/gpu, or an
// impossible MIG profile. Any other unknown name may be stale or meant for other nodes, and
// NVIDIA's plugin accepts all of them (k8s-device-plugin, internal/rm/device_map.go), so it becomes
// a note.
func (r *entryReader) reportUnknownName(v value, name string) {
	message, near := unknownName(name, r.names, "a name from resources")
	short := strings.TrimPrefix(name, resourceDomain)
	switch {
	case message == "":
	case near == gpuResource && likeGPU.MatchString(short), likeProfile.MatchString(short):
		v.problem(message + didYouMean(near))
	default:
		v.note("has no effect, " + message + didYouMean(near))
	}
}

var (
	// likeGPU matches a misspelt "gpu"; pgpu, vgpu and gpu-b are different names.
	likeGPU = regexp.MustCompile(`^[gG][a-zA-Z]*$`)
	// likeProfile matches names with the slices or the memory at the beginning of a profile;
	// mig-small has neither.
	likeProfile = regexp.MustCompile(`^mig-[0-9]+(c|g|gb)([-+.]|$)`)
)

// unknownName returns the message about a name that is neither in known, which is sorted, nor a
// partition's default name, and the most similar known name. source tells where other names come
// from.
func unknownName(name string, known []string, source string) (message, near string) {
	if namesPartition(name) {
		return "", ""
	}
	if _, found := slices.BinarySearch(known, name); found {
		return "", ""
	}
	if len(known) <= candidatesTried {
		// All names share the domain, which would make all of them look alike.
		short := make([]string, len(known))
		for i, name := range known {
			short[i] = strings.TrimPrefix(name, resourceDomain)
		}
		if found := slices.Index(short, Nearest(strings.TrimPrefix(name, resourceDomain), short)); found >= 0 {
			near = known[found]
		}
	}
	return "no GPU or partition has this name: expected " + gpuResource + ", " + migResource +
		" and a MIG profile, or " + source, near
}

// readRename returns the name under which the units are offered; "" if they keep theirs.
func (r *entryReader) readRename(item value, share sharing.ReplicatedResource) string {
	v := item.at("rename")
	if !v.absent() {
		rename := content[string](v)
		if rename != "" && (!r.renameByDefault || rename != share.Resource+sharedSuffix) {
			v.note("renamed here; NVIDIA's plugin ignores it")
		}
		noteEviction(v, rename)
		return rename
	}
	if !r.renameByDefault || share.Replicas < 2 || share.Resource == "" {
		return ""
	}
	rename, err := parseResourceName(share.Resource + sharedSuffix)
	if err != nil {
		item.at("name").problem("with the suffix " + sharedSuffix + " of renameByDefault: " + err.Error())
	}
	return rename
}

// readPolicy reads policy and spread. written is false if the profile's policy applies.
func (r *entryReader) readPolicy(item value) (policy sharing.AllocationPolicy, strict, written bool) {
	policy = r.profile.Policy
	if r.mps && policy == sharing.Spread {
		policy = sharing.Distributed
	}
	if own := item.at("policy"); !own.absent() {
		policy = sharing.AllocationPolicy(content[string](own))
		written = policy != ""
	}
	v := item.at("spread")
	if v.content == nil {
		return policy, false, written
	}
	if policy != sharing.Spread && policy != "" {
		v.problem(fmt.Sprintf("needs policy: spread, the policy here is %s", policy))
	}
	return policy, true, policy != ""
}

// readDriverSettings reads timeSlice and computeMode.
func readDriverSettings(item value, share sharing.ReplicatedResource) sharing.DriverSettings {
	slice, mode := item.at("timeSlice"), item.at("computeMode")
	for _, v := range []value{slice, mode} {
		if !v.absent() && !share.MPS && namesPartition(share.Resource) {
			v.problem(share.Resource + " is a partition: only whole GPUs have this")
		}
	}
	s := sharing.DriverSettings{
		TimeSlice:   sharing.TimeSlice(content[string](slice)),
		ComputeMode: sharing.ComputeMode(content[string](mode)),
	}
	if s.ComputeMode == sharing.ExclusiveProcess && share.Replicas > 1 {
		mode.problem(fmt.Sprintf("lets one process use the GPU, and replicas: %d shares it: write replicas: 1",
			share.Replicas))
	}
	return s
}

// readMemoryGuard reads memory. An absent section guards nothing.
func readMemoryGuard(v value, share sharing.ReplicatedResource) sharing.MemoryGuard {
	if v.absent() {
		return sharing.MemoryGuard{}
	}
	if share.Replicas == 1 {
		v.problem("guards shares, and replicas: 1 has none")
	}
	g := get[sharing.MemoryGuard](v, "limit")
	g.Grace = get[time.Duration](v, "grace")
	g.Evict = get[string](v, "action") == "evict"
	return g
}

// parseMemoryLimit parses share, a part, or an amount.
func parseMemoryLimit(text string) (g sharing.MemoryGuard, ok bool) {
	g.Share = text == "share"
	for unit, bytes := range map[string]uint64{
		"%":   0,
		"MiB": 1 << 20,
		"GiB": 1 << 30,
	} {
		digits, is := strings.CutSuffix(text, unit)
		number, err := strconv.ParseUint(digits, 10, 20)
		switch {
		case !is || err != nil || bytes == 0 && number > 100:
		case bytes == 0:
			g.Ratio = float64(number) / 100
		default:
			g.Bytes = number * bytes
		}
	}
	return g, g != sharing.MemoryGuard{}
}

// unifyPolicies gives all entries that are offered under one name the same policy, because a
// container's devices are chosen from the whole resource. It reports entries that disagree.
func unifyPolicies(entries []sharedEntry) {
	decided := make(map[string]sharedEntry)
	for _, e := range entries {
		if !e.policyWritten {
			continue
		}
		if first, ok := decided[e.offeredAs()]; !ok {
			decided[e.offeredAs()] = e
		} else if first.share.Policy != e.share.Policy || first.share.SpreadStrict != e.share.SpreadStrict {
			e.value.problemHere(fmt.Sprintf(
				"is offered as %s with policy %s, but the entry on line %d offers that with policy %s: a resource "+
					"has one policy",
				e.offeredAs(), policyText(e.share), first.value.line, policyText(first.share)))
		}
	}
	for i := range entries {
		if e, ok := decided[entries[i].offeredAs()]; ok {
			entries[i].share.Policy, entries[i].share.SpreadStrict = e.share.Policy, e.share.SpreadStrict
		}
	}
}

func policyText(s sharing.ReplicatedResource) string {
	if s.SpreadStrict {
		return string(s.Policy) + " (strict)"
	}
	return string(s.Policy)
}

// reportUnreachable reports entries that match no unit on any node, because an
// earlier entry takes all units of the same resource.
func reportUnreachable(entries []sharedEntry) {
	all := make(map[string]sharedEntry)
	for _, e := range entries {
		if taker, taken := all[e.share.Resource]; taken {
			advice := "put this one before it"
			if taker.share.MPS != e.share.MPS {
				advice = "say which devices one of the two has"
			}
			e.value.problemHere(fmt.Sprintf("never matches: the entry on line %d takes all devices of %s, %s",
				taker.value.line, e.share.Resource, advice))
		} else if e.share.Select.All() {
			all[e.share.Resource] = e
		}
	}
}

// A document is read without knowing the node, so notes about long lists assume the largest node on
// sale: 16 GPUs (DGX-2), each with 7 partitions.
const (
	gpusPerNode      = 16
	partitionsPerGPU = 7
)

// reportLongLists reports entries with which a resource would exceed, on any node, the number of
// devices that the kubelet accepts in one list. If that depends on the node, it adds a note.
func reportLongLists(profile sharing.Profile, entries []sharedEntry) {
	unitsPerGPU := func(resource string) int {
		if profile.MIGStrategy == sharing.MIGSingle || namesPartition(resource) ||
			slices.ContainsFunc(profile.MIGNames, func(n sharing.NamingRule) bool { return n.Name == resource }) {
			return partitionsPerGPU
		}
		return 1
	}
	units := make(map[string]int)
	for _, e := range entries {
		units[e.offeredAs()] = max(units[e.offeredAs()], gpusPerNode*unitsPerGPU(e.share.Resource))
	}
	// In the worst case, the entries with the most replicas get their units first.
	entries = slices.Clone(entries)
	slices.SortStableFunc(entries,
		func(a, b sharedEntry) int { return cmp.Compare(b.share.Replicas, a.share.Replicas) })
	left, devices := maps.Clone(units), make(map[string]int)
	for _, e := range entries {
		name, each := e.offeredAs(), unitsPerGPU(e.share.Resource)
		var wanted int
		switch {
		case e.share.Select.Count > 0:
			wanted = e.share.Select.Count
		case e.share.Select.All():
			wanted = gpusPerNode * each
		default: // a selector may be a GPU, and then selects all of its partitions
			wanted = len(e.share.Select.List) * each
		}
		taken := min(left[name], wanted)
		left[name] -= taken
		// The replicas alone can be too many, and the product could overflow.
		if e.share.Replicas > sharing.MaxDevices {
			e.replicas.problem(listLimit + ": expected no more")
			continue
		}
		if devices[name]+taken*e.share.Replicas > sharing.MaxDevices {
			what := "GPUs"
			if each > 1 {
				what = "partitions"
			}
			e.replicas.note(
				fmt.Sprintf("fits up to %d %s of one resource, %s; on a node with more, the profile is refused",
					sharing.MaxDevices/e.share.Replicas, what, listLimit))
		}
		devices[name] += taken * e.share.Replicas
	}
}

var listLimit = fmt.Sprintf("the kubelet takes no list beyond 4 MiB, which is %d devices", sharing.MaxDevices)

// CheckNode returns an error if this node cannot be offered with the profile: because all its GPUs
// would be divided and no partition offered (ErrMIGLayout), or because a resource would have more
// devices than the kubelet accepts in one list. The error then describes the first entry
// responsible.
func (s SelectedProfile) CheckNode(gpus []sharing.GPU) error {
	if s.Profile.MIGStrategy == sharing.MIGNone && s.Profile.MIG.DividesAll(gpus) {
		return fmt.Errorf("%s: %w", s, notOffered(s.Profile.MIG.Name))
	}
	leftOut := sharing.TooLong(gpus, s.Profile)
	if len(leftOut) == 0 {
		return nil
	}
	l := leftOut[0]
	advice := "offer them under several names, by devices and rename"
	if l.Most > 0 {
		advice = fmt.Sprintf("write at most %d, or ", l.Most) + advice
	}
	problem := Problem{
		File:  s.String(),
		Path:  l.Path + ".replicas",
		Value: strconv.Itoa(l.Replicas),
		Message: fmt.Sprintf("%d units of %s with so many replicas are too many on this node, %s: %s", l.Units,
			l.Resource, listLimit, advice),
	}
	for _, note := range s.Notes { // reportLongLists has a note with the line.
		if note.Path == problem.Path {
			problem.Line = note.Line
		}
	}
	return Problems{problem}
}

// ErrNoMPS is the error of CheckMPS if the program was started without MPS daemons.
var ErrNoMPS = errors.New(
	"nothing runs MPS daemons on this node: the chart's mps.enabled does (--mps-root and the container of virgate mps)")

// CheckMPS returns an error if the program was started without MPS daemons and an entry shares
// units by MPS. The error wraps ErrNoMPS and names the first such entry. A unit with one replica is
// not shared, and needs no daemon.
func (c Config) CheckMPS() error {
	if c.Startup.MPSRoot != "" {
		return nil
	}
	for _, share := range c.Profile.TimeSlicing {
		if share.MPS && share.Replicas > 1 {
			return fmt.Errorf("%s: %w", share.Path, ErrNoMPS)
		}
	}
	return nil
}
