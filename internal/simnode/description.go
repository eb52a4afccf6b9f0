package simnode

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/mig"
	"sigs.k8s.io/yaml"
)

// maxGPUs is the largest number of GPUs of a node, removed ones included.
const maxGPUs = 64

// description lists the parts of a node. It comes from a file or from a name.
type description struct {
	// Name is the name from which all UUIDs are derived.
	Name string  `json:"name"`
	GPUs []group `json:"boards"`
	// World is the argument of SetWorld.
	World string `json:"world"`
}

// group describes a number of identical GPUs.
type group struct {
	// Model is a key of nodes.yaml.
	Model string `json:"model"`
	// Count is the number of GPUs, 1 when absent.
	Count *int `json:"count"`
	// NUMANode is the NUMA node of the GPUs, -1 for none. By default, if the node has at least four
	// GPUs, the first half is at NUMA node 0 and the second half at 1; otherwise all are at 0.
	NUMANode *int `json:"numaNode"`
	// Layout is the mig.NamedLayout of the GPUs; empty for MIG off.
	Layout string `json:"layout"`
}

func (g group) count() int { return *cmp.Or(g.Count, new(1)) }

// validate returns the number of GPUs, and an error that lists all problems of the description.
func (d description) validate() (total int, err error) {
	var problems []error
	wrong := func(format string, values ...any) { problems = append(problems, fmt.Errorf(format, values...)) }
	for i, g := range d.GPUs {
		if _, ok := modelOf(g.Model); !ok {
			wrong("boards[%d].model: %q is none of %s", i, g.Model, modelKeys())
		}
		if count := g.count(); count < 1 || count > maxGPUs {
			wrong("boards[%d].count: %d is not in 1 to %d", i, count, maxGPUs)
		} else {
			total += count
		}
		if g.NUMANode != nil && *g.NUMANode < -1 {
			wrong("boards[%d].numaNode: %d is below -1, which stands for none", i, *g.NUMANode)
		}
	}
	if total > maxGPUs {
		wrong("boards: %d are more than %d", total, maxGPUs)
	}
	return total, errors.Join(problems...)
}

func (d description) build() (*Node, error) {
	total, err := d.validate()
	if err != nil {
		return nil, err
	}
	n := newNode(d.Name)
	if err := n.SetWorld(d.World); err != nil {
		return nil, fmt.Errorf("world: %w", err)
	}
	for i, g := range d.GPUs {
		m, _ := modelOf(g.Model)
		for range g.count() {
			numaNode := 0
			switch {
			case g.NUMANode != nil:
				numaNode = *g.NUMANode
			case total >= 4:
				numaNode = n.gpusMade * 2 / total
			}
			gpu := n.newGPU(m, numaNode)
			n.insert(gpu)
			if g.Layout == "" {
				continue
			}
			if err := n.applyLayout(gpu, g.Layout); err != nil {
				return nil, fmt.Errorf("boards[%d].layout: %w", i, err)
			}
		}
	}
	return n, nil
}

// applyLayout creates the layout's partitions on a GPU that has none.
func (n *Node) applyLayout(g *simGPU, name string) error {
	layout, err := mig.NamedLayout(name, g.geometry)
	if err != nil {
		return fmt.Errorf("%s: %w", g.Name, err)
	}
	placed, err := g.geometry.Place(layout, nil)
	if err != nil {
		return fmt.Errorf("%s: MIG layout %q: %w", g.Name, name, err)
	}
	g.mig, g.migPending = layout.MIG, layout.MIG
	for _, p := range placed {
		// Several MIG devices can be compute instances of one GPU instance.
		i := find(g.instances, func(i *gpuInstance) bool { return i.placement == p.Placement })
		if i == nil {
			info, _ := g.geometry.ProfileInfo(p.Profile)
			i = n.addInstance(g, info, p.Placement)
		}
		n.addCompute(g, i, p.Profile.Compute)
	}
	return nil
}

// Names returns the usual names for New, sorted: those in nodes.yaml and the common ones of the
// form MODELxN.
func Names() []string {
	names := []string{"a30x4", "h100x1", "l40sx8", "t4"}
	for _, d := range known().Nodes {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}

// New makes the node with that name:
//
//	dgx-a100, …      as Names lists them; dgx-* have 8 identical GPUs
//	MODEL, MODELxN   one GPU, or N, of a model, for example t4 or a30x4
//	NAME+LAYOUT      with the mig.NamedLayout on every GPU that can have it,
//	                 for example dgx-a100+all-1g.5gb
//
// "mixed" has different GPUs: two A100 without MIG, one with all-balanced, one with all-1g.5gb, two
// T4. "empty" has none. It is an error if no GPU can have the LAYOUT. The error for an unknown name
// lists the names.
//
// UUIDs are derived from NAME alone, so the GPUs are the same with each LAYOUT.
func New(name string) (*Node, error) {
	base, layout, hasLayout := strings.Cut(name, "+")
	d, ok := describe(base)
	if !ok {
		return nil,
			fmt.Errorf("no simulated node %q: there are %s, MODEL and MODELxN with MODEL one of %s; each with +LAYOUT",
				base, strings.Join(Names(), ", "), modelKeys())
	}
	if hasLayout {
		d.GPUs = slices.Clone(d.GPUs)
		for i := range d.GPUs {
			d.GPUs[i].Layout = ""
		}
	}
	n, err := d.build()
	if err == nil && hasLayout {
		err = n.applyLayoutToAll(layout)
	}
	if err != nil {
		return nil, fmt.Errorf("simulated node %q: %w", name, err)
	}
	return n, nil
}

func describe(name string) (description, bool) {
	if d, ok := first(known().Nodes, func(d description) bool { return d.Name == name }); ok {
		return d, true
	}
	if _, ok := modelOf(name); ok {
		return description{Name: name, GPUs: []group{{Model: name}}}, true
	}
	at := strings.LastIndex(name, "x")
	if at < 0 {
		return description{}, false
	}
	count, err := strconv.Atoi(name[at+1:])
	if _, ok := modelOf(name[:at]); !ok || err != nil {
		return description{}, false
	}
	return description{Name: name, GPUs: []group{{Model: name[:at], Count: &count}}}, true
}

// applyLayoutToAll applies the layout to every GPU that can have it.
func (n *Node) applyLayoutToAll(layout string) error {
	if len(n.gpus) == 0 {
		return errors.New("there is no GPU that could be partitioned")
	}
	var errs []error
	for _, g := range n.gpus {
		errs = append(errs, n.applyLayout(g, layout))
	}
	if slices.Contains(errs, nil) {
		return nil
	}
	return errs[0] // Identical GPUs give identical errors.
}

// Load makes a node from a YAML description; testdata/lab.yaml is an example that explains each
// field. file is used in messages; its base name without extension is the node's name if the
// document has none. Errors name the field. Unknown fields are errors.
func Load(file string, data []byte) (*Node, error) {
	var d description
	if err := yaml.UnmarshalStrict(data, &d); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if d.Name == "" {
		base := filepath.Base(file)
		d.Name = strings.TrimSuffix(base, filepath.Ext(base))
	}
	n, err := d.build()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return n, nil
}
