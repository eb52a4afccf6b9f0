package configs

import (
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// MIGLayouts are named MIG layouts.
type MIGLayouts []MIGLayout

// MIGLayout is one named layout.
type MIGLayout struct {
	Name string
	// Blocks are applied in this order, each to the GPUs that it chooses. There is at least one,
	// except in Config.Layouts for a name under which several documents have different layouts.
	Blocks []sharing.LayoutBlock
}

// ErrMIGLayout means that a named MIG layout cannot be used.
var ErrMIGLayout = errors.New("MIG layout")

// SelectMIG returns the Config with the MIG layout that the node's label nvidia.com/mig.config
// names, instead of the document's. It changes nothing if the name is empty or the document lacks
// mig.manage: true.
//
// The error is ErrMIGLayout, and lists the layouts if none has this name. The Config is then
// unchanged.
func (c Config) SelectMIG(name string) (Config, error) {
	if name == "" || !c.Profile.MIG.Manage {
		return c, nil
	}
	blocks, err := c.Layouts.resolve(name)
	if err != nil {
		return c, fmt.Errorf("%w %s: %w", ErrMIGLayout, quote(name), err)
	}
	c.Profile.MIG.Name, c.Profile.MIG.Blocks = name, blocks
	return c, nil
}

// CheckOffered returns an error, ErrMIGLayout, if all GPUs would be divided and then not be
// offered, because the MIG strategy offers no partitions. A layout that leaves some GPUs whole is
// no error: they are offered, and the plan warns about the others. For a layout that depends on GPU
// models, the result depends on the node: see CheckNode. Parse accepts such a document, because a
// flag may be the cause, and a profile that is in force must stay in force.
func (c Config) CheckOffered() error {
	wanted := c.Profile.MIG
	divides := wanted.Name != "" && wanted.Name != "all-disabled"
	if wanted.Blocks != nil {
		divides = slices.ContainsFunc(wanted.Blocks,
			func(b sharing.LayoutBlock) bool { return b.All && len(b.Filters) == 0 }) &&
			!slices.ContainsFunc(wanted.Blocks, func(b sharing.LayoutBlock) bool { return !b.Layout.MIG })
	}
	if !wanted.Manage || !divides || c.Profile.MIGStrategy != sharing.MIGNone {
		return nil
	}
	return notOffered(wanted.Name)
}

func notOffered(layout string) error {
	return fmt.Errorf(
		"mig.config: %w %s: GPUs with MIG are not offered with %s none, the default: choose mixed or single",
		ErrMIGLayout, quote(layout), pathMIGStrategy)
}

// readMIG reads the section mig. It returns the section's layouts followed by those from elsewhere,
// and which of them a label may choose.
func readMIG(v value, elsewhere MIGLayouts) (sharing.MIGConfig, MIGLayouts, []string) {
	wanted := sharing.MIGConfig{
		WhenBusy: sharing.WhenBusy(get[string](v, "whenBusy")),
		Manage:   get[bool](v, "manage"),
		Reset:    get[bool](v, "reset"),
	}
	if wanted.Reset && !wanted.Manage {
		v.at("reset").note("has no effect without manage: true")
	}
	layouts := append(readLayouts(v.at("configs")), elsewhere...)
	config := v.at("config")
	if name, blocks, ok := layouts.readName(config); ok {
		if !wanted.Manage {
			config.note("has no effect without manage: true")
		}
		wanted.Name, wanted.Blocks = name, blocks
	}
	var allowed []string
	if names := v.at("allowed"); !names.absent() {
		allowed = []string{}
		for _, item := range names.items {
			name, _, _ := layouts.readName(item)
			allowed = append(allowed, name)
		}
	}
	return wanted, layouts, allowed
}

// resolve finds the layout with the name. A built-in layout has no blocks. The profile's own
// layouts come first, then the ones from elsewhere, then the built-in ones. Whether a GPU can have
// the layout is decided on the node, by its driver.
func (c MIGLayouts) resolve(name string) ([]sharing.LayoutBlock, error) {
	found := slices.IndexFunc(c, func(l MIGLayout) bool { return l.Name == name })
	switch {
	case found < 0:
		return nil, c.checkBuiltIn(name)
	case c[found].Blocks == nil:
		return nil, errors.New("several mig-parted documents have a layout of this name, and they differ")
	}
	return c[found].Blocks, nil
}

// readName reads the name of a layout. It adds a note about a built-in layout whose profile may be
// misspelt.
func (c MIGLayouts) readName(v value) (name string, blocks []sharing.LayoutBlock, ok bool) {
	name, ok = v.content.(string)
	if !ok {
		return "", nil, false
	}
	blocks, err := c.resolve(name)
	switch {
	case err != nil:
		v.problem(err.Error())
	case blocks == nil && !slices.ContainsFunc(mig.KnownGeometries(), func(g mig.Geometry) bool {
		_, err := mig.NamedLayout(name, g)
		return err == nil
	}):
		v.note("no GPU model that Virgate knows has this profile; the driver of each node decides")
	}
	return name, blocks, true
}

// doubt returns a message about the first of the block's partitions that no GPU the block can
// choose is known to support, and their index; a negative index means all of them together. The
// message is empty if the block can choose a GPU of an unknown model. Only a driver knows which
// partitions its GPU can have, so this is only a hint at a mistake.
func doubt(block sharing.LayoutBlock) (at int, message string) {
	gpus := mig.KnownGeometries()
	if len(block.Filters) > 0 {
		gpus = nil
	}
	for _, filter := range block.Filters {
		known := mig.GeometriesOf(uint16(filter.Device >> 16))
		if known == nil {
			return -1, ""
		}
		gpus = append(gpus, known...)
	}
	possible := func(partitions ...mig.PartitionCount) bool {
		return slices.ContainsFunc(gpus, func(gpu mig.Geometry) bool {
			_, err := gpu.Place(mig.Layout{MIG: true, Partitions: partitions}, nil)
			return err == nil
		})
	}
	const unknown = "no GPU model that Virgate knows and this block chooses can have %s; the driver of each " +
		"node decides"
	for n, c := range block.Layout.Partitions {
		if !possible(c) {
			return n, fmt.Sprintf(unknown, mig.Layout{MIG: true, Partitions: []mig.PartitionCount{c}})
		}
	}
	if !possible(block.Layout.Partitions...) {
		return -1, fmt.Sprintf(unknown, block.Layout)
	}
	return -1, ""
}

// checkBuiltIn returns an error if no built-in layout, with any profile, has this name.
func (c MIGLayouts) checkBuiltIn(name string) error {
	if _, err := mig.NamedLayout(name, mig.KnownGeometries()[0]); err == nil || errors.Is(err, mig.ErrUnknownProfile) {
		return nil
	}
	names := append([]string{"all-disabled", "all-enabled", "all-balanced"}, c.names()...)
	if near := Nearest(name, names); near != "" {
		return fmt.Errorf("no layout has this name, did you mean %s?", near)
	}
	return errors.New("no layout has this name; all-disabled, all-enabled, all-balanced and all-<profile> are built in")
}

// merge adds the layouts of another document. If both documents have different layouts under one
// name, the name has no blocks in the result, because either layout could be meant.
func (c MIGLayouts) merge(more MIGLayouts) MIGLayouts {
	all := slices.Clone(c)
	for _, layout := range more {
		i := slices.IndexFunc(all, func(l MIGLayout) bool { return l.Name == layout.Name })
		switch {
		case i < 0:
			all = append(all, layout)
		case fmt.Sprintf("%#v", all[i]) != fmt.Sprintf("%#v", layout): // Without the Source.
			all[i].Blocks = nil
		}
	}
	return all
}

func (c MIGLayouts) names() []string {
	names := make([]string, len(c))
	for i, layout := range c {
		names[i] = layout.Name
	}
	return names
}
