package configs

import (
	"errors"
	"fmt"
	"reflect"
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
// The error is ErrMIGLayout, and says which layouts there are if none has this name, or
// that no published GPU can have the layout. The Config is unchanged then.
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
// whole is none: those are offered, and the plan warns of the others. Parse accepts such a
// document: what is at fault may be a flag, and a profile that is in force stays so.
func (c Config) CheckOffered() error {
	wanted := c.Profile.MIG
	divides := wanted.Name != "" && wanted.Name != "all-disabled"
	if wanted.Blocks != nil {
		divides = slices.ContainsFunc(wanted.Blocks, func(b sharing.LayoutBlock) bool { return b.All }) &&
			!slices.ContainsFunc(wanted.Blocks, func(b sharing.LayoutBlock) bool { return !b.Layout.MIG })
	}
	if !wanted.Manage || !divides || c.Profile.MIGStrategy != sharing.MIGNone {
		return nil
	}
	return fmt.Errorf("mig.config: %w %s: GPUs with MIG are not offered with %s none, the default: choose mixed or single", ErrMIGLayout, quote(wanted.Name), pathMIGStrategy)
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
	layouts := append(readLayouts(f.field("configs"), true), elsewhere...)

	config := f.field("config")
	if name, ok := config.text(); ok {
		if !wanted.Manage {
			config.note("has no effect without manage: true")
		}
		blocks, err := layouts.resolve(name)
		if err != nil {
			config.problem(err.Error())
		}
		wanted.Name, wanted.Blocks = name, blocks
	}
	var allowed []string
	if names := f.field("allowed"); !names.absent() {
		allowed = []string{}
		items, _ := names.items()
		for _, item := range items {
			name, ok := item.text()
			if _, err := layouts.resolve(name); ok && err != nil {
				item.problem(err.Error())
			}
			allowed = append(allowed, name)
		}
	}
	return wanted, layouts, allowed
}

// resolve finds the layout with the name and checks it. A built-in layout has no blocks.
// The profile's own layouts come first, then those from elsewhere, then the built-in ones.
func (c MIGLayouts) resolve(name string) ([]sharing.LayoutBlock, error) {
	found := slices.IndexFunc(c, func(l MIGLayout) bool { return l.Name == name })
	if found < 0 {
		return nil, c.checkBuiltIn(name)
	}
	if c[found].Blocks == nil {
		return nil, errors.New("several mig-parted documents have a layout of this name, and they differ")
	}
	for n, block := range c[found].Blocks {
		if err := checkBlock(block); err != nil {
			return nil, fmt.Errorf("block %d of the layout: %w", n, err)
		}
	}
	return c[found].Blocks, nil
}

// checkBlock returns an error if no GPU that the block can choose can have its layout. Of
// an unpublished GPU, which a filter may name, only the driver knows: that is no error.
func checkBlock(block sharing.LayoutBlock) error {
	gpus := mig.KnownGeometries()
	if len(block.Filters) > 0 {
		gpus = nil
	}
	for _, filter := range block.Filters {
		gpu, known := mig.GeometryOf(uint16(filter.Device >> 16))
		if !known {
			return nil
		}
		gpus = append(gpus, gpu)
	}
	possible := func(layout mig.Layout) bool {
		return slices.ContainsFunc(gpus, func(gpu mig.Geometry) bool {
			_, err := gpu.Place(layout, nil)
			return err == nil
		})
	}
	for _, c := range block.Layout.Partitions {
		if !possible(mig.Layout{MIG: true, Partitions: []mig.PartitionCount{{Profile: c.Profile, Count: 1}}}) {
			return fmt.Errorf("no published GPU that it chooses has the profile %s", c.Profile)
		}
	}
	if !possible(block.Layout) {
		return errors.New("no published GPU that it chooses can be cut so")
	}
	return nil
}

// checkBuiltIn returns an error if no published GPU has a built-in layout of this name.
func (c MIGLayouts) checkBuiltIn(name string) error {
	var last error
	for _, gpu := range mig.KnownGeometries() {
		_, err := mig.NamedLayout(name, gpu)
		if err == nil {
			return nil
		}
		last = err
	}
	if errors.Is(last, mig.ErrUnknownProfile) {
		return errors.New("no layout has this name, and no published GPU has the profile")
	}
	names := append([]string{"all-disabled", "all-enabled", "all-balanced"}, c.names()...)
	if near := nearest(name, names); near != "" {
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
		case !reflect.DeepEqual(all[i], layout):
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
