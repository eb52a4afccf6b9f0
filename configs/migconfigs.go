package configs

import (
	"cmp"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// MIGConfigs are the named layouts of a mig-parted document, by name.
type MIGConfigs []MIGConfig

// MIGConfig is one named layout.
type MIGConfig struct {
	Name string
	// Blocks are applied in this order, each to the boards it chooses. There is
	// at least one, but in Config.Layouts: none there is a name that several
	// documents give to layouts that differ.
	Blocks []sharing.LayoutBlock
}

// ParseMIGConfigs reads mig-parted's "version: v1, mig-configs:" document
// (mig-parted v0.15, api/spec/v1/spec.go), in YAML or JSON. Whether a board
// exists that can be cut so is not judged here. The name of the file is only
// for messages.
//
// The error is of type Problems and has all that is wrong; the result is then
// nil.
func ParseMIGConfigs(file string, data []byte) (MIGConfigs, error) {
	var problems Problems
	source := &source{file: file, problems: &problems}
	var layouts MIGConfigs
	if root, ok := source.open(data); ok {
		layouts = readMIGConfigs(root)
	}
	if err := problems.err(); err != nil {
		return nil, err
	}
	return layouts, nil
}

// readMIGConfigs reads a mig-parted document. Unlike a device-plugin document
// it must have a version.
func readMIGConfigs(root value) MIGConfigs {
	document := root.mapping("version", migConfigsKey)
	readVersion(document.required("version"))
	return readLayouts(document.required(migConfigsKey), false)
}

// readLayouts reads a mapping from names to lists of blocks, own ones of Virgate
// or mig-parted's.
func readLayouts(section value, own bool) MIGConfigs {
	pairs := section.pairs()
	if section.shape() == shapeMapping && len(pairs) == 0 {
		section.problem("expected at least one layout")
	}
	var layouts MIGConfigs
	keys := keysOf(pathMIGBlock)
	for _, e := range pairs {
		blocks, ok := e.value.items()
		if len(blocks) == 0 && (ok || e.value.absent()) {
			e.value.problem("expected a list of at least one block")
		}
		layout := MIGConfig{Name: e.key}
		for _, block := range blocks {
			layout.Blocks = append(layout.Blocks, readMIGBlock(block, keys, own))
		}
		layouts = append(layouts, layout)
	}
	slices.SortFunc(layouts, func(a, b MIGConfig) int { return cmp.Compare(a.Name, b.Name) })
	return layouts
}

const migConfigsKey = "mig-configs"
