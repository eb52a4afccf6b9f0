package soak

import (
	"fmt"
	"slices"
	"strings"
)

// The node: boards by ordinal, three that can be cut and two that cannot.
const (
	cuttable = 3
	boards   = 5
	nodeYAML = "name: soak\nboards:\n- {model: h100, count: 3}\n- {model: t4, count: 2}\n"
)

// The names of whole boards before a share renames them.
const (
	gpuName  = "nvidia.com/gpu"
	h100Name = "nvidia.com/h100"
)

// layouts are the partitions of one H100 with 80 GB under each layout, from
// NVIDIA's MIG user guide, "Supported MIG Profiles", and mig-parted's names.
func layouts() map[string]map[string]int {
	return map[string]map[string]int{
		"all-disabled": {},
		"all-1g.10gb":  {"1g.10gb": 7},
		"all-2g.20gb":  {"2g.20gb": 3},
		"all-3g.40gb":  {"3g.40gb": 2},
		"all-balanced": {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
	}
}

// share is a time-slicing entry.
type share struct {
	resource string
	replicas int
	renamed  bool
	policy   string
}

// wish is what a document asks for.
type wish struct {
	// edit numbers the documents, so that it can be seen which one was read.
	edit int
	// byModel gives the H100 a name of their own.
	byModel bool
	shares  []share
	// excluded are the ordinals of boards that are not offered.
	excluded []int
	// oneOnly is failRequestsGreaterThanOne.
	oneOnly bool
	// layout is how boards are cut; empty for as they are. labelled says that the
	// Node's label wants it, not the document.
	layout   string
	labelled bool
	// own is the document's layout where labelled says that it does not count.
	own string
}

// document is the wish in the form of NVIDIA's device plugin.
func (w wish) document(uuids []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# edit %d.\nversion: v1\nflags: {migStrategy: mixed}\n", w.edit)
	b.WriteString("health: {quietTime: 1s, maxQuietTime: 1s}\n")
	if w.byModel {
		fmt.Fprintf(&b, "resources: {gpus: [{pattern: \"*H100*\", name: %s}]}\n", h100Name)
	}
	if len(w.excluded) > 0 {
		b.WriteString("exclude:\n")
		for _, ordinal := range w.excluded {
			fmt.Fprintf(&b, "- %s\n", uuids[ordinal])
		}
	}
	if w.layout != "" {
		fmt.Fprintf(&b, "mig: {manage: true, config: %s}\n", w.layout)
	}
	if len(w.shares) == 0 {
		return b.String()
	}
	fmt.Fprintf(&b, "sharing:\n  timeSlicing:\n    failRequestsGreaterThanOne: %t\n    resources:\n", w.oneOnly)
	for _, s := range w.shares {
		fmt.Fprintf(&b, "    - {name: %s, replicas: %d, policy: %s", s.resource, s.replicas, s.policy)
		if s.renamed {
			fmt.Fprintf(&b, ", rename: %s.shared", s.resource)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// written is the document as it stands in the ConfigMap: without the layout that
// the Node's label wants.
func (w wish) written(uuids []string) string {
	if w.labelled {
		w.layout = w.own
	}
	return w.document(uuids)
}

// way is how a unit is offered: so many devices of that name, 0 for not at all.
// A unit with one device has it alone.
type way struct {
	resource string
	devices  int
}

func (w way) shared() bool { return w.devices > 1 }

// whole is how a whole board is offered.
func (w wish) whole(ordinal int) way {
	name := gpuName
	if w.byModel && ordinal < cuttable {
		name = h100Name
	}
	return w.offer(ordinal, name)
}

// partition is how a partition of the board is.
func (w wish) partition(ordinal int, profile string) way {
	return w.offer(ordinal, "nvidia.com/mig-"+profile)
}

func (w wish) offer(ordinal int, name string) way {
	if slices.Contains(w.excluded, ordinal) {
		return way{}
	}
	for _, s := range w.shares {
		if s.resource != name {
			continue
		}
		if s.renamed {
			name += ".shared"
		}
		return way{name, s.replicas}
	}
	return way{name, 1}
}

// names are the resources that the wish can lead to, sorted.
func (w wish) names() []string {
	var names []string
	add := func(way way) {
		if way.devices > 0 && !slices.Contains(names, way.resource) {
			names = append(names, way.resource)
		}
	}
	for ordinal := range boards {
		add(w.whole(ordinal))
		if ordinal < cuttable {
			for profile := range layouts()[w.layout] {
				add(w.partition(ordinal, profile))
			}
		}
	}
	slices.Sort(names)
	return names
}
