package configs

import (
	"slices"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// shareReader reads the entries of sharing.timeSlicing.resources.
type shareReader struct {
	profile         *sharing.Profile
	renameByDefault bool
	// keys are those that an entry may have.
	keys []string
	// names are the resource names that resources makes.
	names   []string
	entries []sharedEntry
	// seen has the explicit selectors of each resource with their lines.
	seen map[string]map[sharing.Selector]int
}

// read says false for an entry of which the essentials are missing. Of one that
// has them it may have reported other problems.
func (r *shareReader) read(item value) (sharedEntry, bool) {
	if item.shape() != shapeMapping {
		item.problem("expected a mapping with name and replicas")
		return sharedEntry{}, false
	}
	f := item.mapping(r.keys...)
	name, named := readResourceName(f.required("name"))
	if named {
		r.reportUnknownName(f.field("name"), name)
	}
	if r.seen[name] == nil {
		r.seen[name] = make(map[sharing.Selector]int)
	}
	selection, selected := readSelection(f.field("devices"), r.seen[name])
	replicas, counted := readReplicas(f.required("replicas"))
	e := sharedEntry{value: item, replicas: f.field("replicas"), share: sharing.Share{
		Path:     item.path,
		Resource: name,
		Select:   selection,
		Replicas: replicas,
	}}
	e.share.Rename = r.readRename(f, e.share)
	e.share.Policy, e.share.SpreadStrict, e.policyWritten = r.readPolicy(f)
	return e, named && selected && counted
}

func readReplicas(v value) (int, bool) {
	replicas, ok := v.number()
	if !ok {
		return 0, false
	}
	if replicas < 1 {
		v.problem("expected 1 or more")
		return 0, false
	}
	if replicas == 1 {
		v.note("1 means exclusive, as without the entry; NVIDIA's plugin wants 2 or more")
	}
	return replicas, true
}

// reportUnknownName reports a name that no unit of any node can have: it is
// misspelt, or resources does not make it.
func (r *shareReader) reportUnknownName(v value, name string) {
	if namesPartition(name) {
		return
	}
	if _, known := slices.BinarySearch(r.names, name); known {
		return
	}
	message := "no GPU or partition has this name: expected " + gpuResource +
		", nvidia.com/mig- and a MIG profile, or a name from resources"
	// The domain, which all share, would make everything look alike.
	if near := nearest(strings.TrimPrefix(name, resourceDomain), withoutDomain(r.names)); near != "" {
		message += ", did you mean " + near + "?"
	}
	v.problem(message)
}

// withoutDomain shortens the names; nil for more than nearest tries.
func withoutDomain(names []string) []string {
	if len(names) > candidatesTried {
		return nil
	}
	short := make([]string, len(names))
	for i, name := range names {
		short[i] = strings.TrimPrefix(name, resourceDomain)
	}
	return short
}

// readRename returns the name under which the units are offered; "" for their
// own.
func (r *shareReader) readRename(f fields, share sharing.Share) string {
	v := f.field("rename")
	if !v.absent() {
		rename, ok := readResourceName(v)
		if ok && (!r.renameByDefault || rename != share.Resource+sharedSuffix) {
			v.note("renamed here; NVIDIA's plugin ignores it")
		}
		return rename
	}
	if !r.renameByDefault || share.Replicas < 2 || share.Resource == "" {
		return ""
	}
	rename, err := parseResourceName(share.Resource + sharedSuffix)
	if err != nil {
		f.field("name").problem("with the suffix " + sharedSuffix + " of renameByDefault: " + err.Error())
	}
	return rename
}
