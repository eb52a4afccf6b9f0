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
	// Blocks are applied in this order, each to the GPUs that it chooses. There
	// is at least one; only in Config.Layouts may there be none, for a name under
	// which several documents have different layouts.
	Blocks []sharing.LayoutBlock
}

// ErrMIGLayout says that the MIG layout of a certain name cannot be used.
var ErrMIGLayout = errors.New("MIG layout")

// SelectMIG returns the Config with the MIG layout that the node's label
// nvidia.com/mig.config names in place of the document's. An empty name changes nothing,
// and neither does any name without mig.manage: true.
//
// The error is ErrMIGLayout, and says which layouts there are if none has this name. The
// Config is unchanged then.
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
// offered at all, because the MIG strategy offers no partition. A layout that leaves GPUs
// whole does not do so: they are offered, and the plan warns of the others. Whether one for some
// models does so depends on the node: see CheckNode. Parse accepts such a document, because what
// is at fault may be a flag, and a profile that is in force stays so.
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

// readMIG reads the section mig. It returns its layouts, and then those from elsewhere,
// and which of them a label may choose.
func readMIG(v value, elsewhere MIGLayouts) (sharing.MIGConfig, MIGLayouts, []string) {
	f := v.mapping(keysOf("mig")...)
	if len(f.entries) > 0 {
		v.note("Virgate's own: NVIDIA's plugin makes no partitions")
	}
	wanted := sharing.MIGConfig{WhenBusy: sharing.WaitWhenBusy}
	if text, ok := f.field("whenBusy").oneOf(string(sharing.WaitWhenBusy), string(sharing.RefuseWhenBusy)); ok {
		wanted.WhenBusy = sharing.WhenBusy(text)
	}
	wanted.Manage, _ = f.field("manage").boolean()
	wanted.Reset, _ = f.field("reset").boolean()
	if wanted.Reset && !wanted.Manage {
		f.field("reset").note("has no effect without manage: true")
	}
	layouts := append(readLayouts(f.field("configs")), elsewhere...)

	config := f.field("config")
	if name, blocks, ok := layouts.readName(config); ok {
		if !wanted.Manage {
			config.note("has no effect without manage: true")
		}
		wanted.Name, wanted.Blocks = name, blocks
	}
	var allowed []string
	if names := f.field("allowed"); !names.absent() {
		allowed = []string{}
		items, _ := names.items()
		for _, item := range items {
			name, _, _ := layouts.readName(item)
			allowed = append(allowed, name)
		}
	}
	return wanted, layouts, allowed
}

// resolve finds the layout with the name. A built-in layout has no blocks. The profile's own
// layouts come first, then those from elsewhere, then the built-in ones. Whether a GPU can have
// the layout is for its driver to say, on the node.
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

// readName reads the name of a layout. It notes a built-in one for a profile that may be misspelt.
func (c MIGLayouts) readName(v value) (name string, blocks []sharing.LayoutBlock, ok bool) {
	name, ok = v.text()
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

// doubt is a message about the first of the block's partitions that no GPU which it can choose is
// known to have, and the index of these; a negative one for all of them together. It is empty
// where the block can choose a GPU of an unknown model. Only a driver knows what its GPU can have,
// so this is a hint at a mistake, and no more.
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

// checkBuiltIn returns an error if this is not the name of a built-in layout, for some profile.
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

// merge adds the layouts of another document. A name that both documents have,
// with different layouts, stays without blocks, because either could be meant.
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
