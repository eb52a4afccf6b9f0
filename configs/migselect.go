package configs

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// ErrLayout says that a MIG layout that was asked for by its name cannot be had.
var ErrLayout = errors.New("MIG layout")

// SelectMIG returns the Config with another wanted MIG layout: the one that the
// node label nvidia.com/mig.config names. The empty name leaves what the
// document says, and so does any name where the document has no mig.manage:
// true, because nothing is cut then.
//
// The error is ErrLayout, and says that there is no such layout and what there
// is, or that no published board can have it. The Config is then as it was.
func (c Config) SelectMIG(name string) (Config, error) {
	if name == "" || !c.Profile.MIG.Manage {
		return c, nil
	}
	blocks, err := c.Layouts.resolve(name)
	if err != nil {
		return c, fmt.Errorf("%w %s: %w", ErrLayout, quote(name), err)
	}
	c.Profile.MIG.Name, c.Profile.MIG.Blocks = name, blocks
	return c, nil
}

// resolve finds the layout with the name and judges it; no blocks are a layout
// that is built in. What stands in the profile itself comes before what stands
// elsewhere, and that before what is built in.
func (c MIGConfigs) resolve(name string) ([]sharing.LayoutBlock, error) {
	found, ok := c.first(name)
	if !ok {
		return nil, c.builtIn(name)
	}
	if found.Blocks == nil {
		return nil, errors.New("several mig-parted documents have a layout of this name, and they differ")
	}
	for n, block := range found.Blocks {
		if err := judge(block); err != nil {
			return nil, fmt.Errorf("block %d of the layout: %w", n, err)
		}
	}
	return found.Blocks, nil
}

// first is the first layout with the name, false if there is none.
func (c MIGConfigs) first(name string) (MIGConfig, bool) {
	for _, layout := range c {
		if layout.Name == name {
			return layout, true
		}
	}
	return MIGConfig{}, false
}

// builtIn says why the name is of no layout that is built in, for any published
// board.
func (c MIGConfigs) builtIn(name string) error {
	var last error
	for _, board := range mig.Geometries() {
		_, err := mig.NamedLayout(name, board)
		if err == nil {
			return nil
		}
		last = err
	}
	if errors.Is(last, mig.ErrUnknownProfile) {
		return errors.New("no layout has this name, and no published board has the profile")
	}
	names := append([]string{"all-disabled", "all-enabled", "all-balanced"}, c.names()...)
	if near := nearest(name, names); near != "" {
		return fmt.Errorf("no layout has this name, did you mean %s?", near)
	}
	return errors.New("no layout has this name; all-disabled, all-enabled, all-balanced and all-<profile> are built in")
}

// with adds the layouts of another document. Of two that have one name and are
// not the same none can be meant: it keeps the name, without blocks.
func (c MIGConfigs) with(more MIGConfigs) MIGConfigs {
	all := slices.Clone(c)
	for _, layout := range more {
		i := slices.IndexFunc(all, func(there MIGConfig) bool { return there.Name == layout.Name })
		switch {
		case i < 0:
			all = append(all, layout)
		case !reflect.DeepEqual(all[i], layout):
			all[i].Blocks = nil
		}
	}
	return all
}
