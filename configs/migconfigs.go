package configs

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

const migConfigsKey = "mig-configs"

// ParseMIGConfigs reads mig-parted's "version: v1, mig-configs:" document (mig-parted v0.15,
// api/spec/v1/spec.go), in YAML or JSON. It does not check that any GPU can have the layouts. The
// name of the file is used only in messages.
//
// The error is of type Problems and complete; the result is then nil.
func ParseMIGConfigs(file string, data []byte) (MIGLayouts, error) {
	return parseDocument(file, data, readMIGConfigs)
}

// readMIGConfigs reads a mig-parted document. Unlike other documents, it must have a version.
func readMIGConfigs(root value) MIGLayouts {
	document := root.mapping("version", migConfigsKey)
	document.required("version").oneOf(versionV1)
	return readLayouts(document.required(migConfigsKey))
}

// readLayouts reads a mapping from names to lists of blocks.
func readLayouts(section value) MIGLayouts {
	pairs := section.pairs()
	if section.shape() == shapeMapping && len(pairs) == 0 {
		section.problem("expected at least one layout")
	}
	var layouts MIGLayouts
	keys := keysOf(pathMIGBlock)
	for _, e := range pairs {
		blocks, ok := e.value.items()
		if len(blocks) == 0 && (ok || e.value.absent()) {
			e.value.problem("expected a list of at least one block")
		}
		layout := MIGLayout{Name: e.key}
		for _, block := range blocks {
			layout.Blocks = append(layout.Blocks, readLayoutBlock(block, keys))
		}
		layouts = append(layouts, layout)
	}
	slices.SortFunc(layouts, func(a, b MIGLayout) int { return cmp.Compare(a.Name, b.Name) })
	return layouts
}

func readLayoutBlock(v value, keys []string) sharing.LayoutBlock {
	if v.shape() != shapeMapping {
		v.problem("expected a mapping with devices and mig-enabled")
		return sharing.LayoutBlock{}
	}
	f := v.mapping(keys...)
	block := sharing.LayoutBlock{
		Filters: readDeviceFilters(f.field("device-filter")),
		Source:  sharing.BlockSource{File: v.source.file, Line: v.line},
	}
	block.All, block.Indexes = readGPUs(f.required("devices"))
	enabled, ok := f.required("mig-enabled").boolean()
	block.Layout.MIG = enabled
	partitions := f.field("mig-devices")
	if ok && enabled && partitions.absent() {
		partitions.problem("is required where mig-enabled is true: write {} for no partitions")
	}
	counts := readPartitions(partitions)
	for _, c := range counts {
		block.Layout.Partitions = append(block.Layout.Partitions, c.PartitionCount)
		block.Source.Lines = append(block.Source.Lines, c.line)
	}
	if ok && !enabled && len(block.Layout.Partitions) > 0 {
		partitions.problem("expected none where mig-enabled is false")
	}
	if at, message := doubt(block); message != "" && at < 0 {
		partitions.note(message)
	} else if message != "" {
		counts[at].note(message)
	}
	return block
}

// readDeviceFilters reads one filter or a list; none or "" means all GPUs.
func readDeviceFilters(v value) []sharing.GPUFilter {
	items, _ := v.texts()
	if !slices.ContainsFunc(items,
		func(item value) bool { return item.shape() != shapeText || item.node.Value != "" }) {
		return nil
	}
	var filters []sharing.GPUFilter
	for _, item := range items {
		if item.shape() != shapeText {
			item.problem("expected a device filter in quotes, such as \"0x20B010DE\"")
			continue
		}
		filter, ok := parseDeviceFilter(item.node.Value)
		if !ok {
			item.problem("expected a device filter such as 0x20B010DE or 0x20B010DE:0x134F10DE")
			continue
		}
		filters = append(filters, filter)
	}
	return filters
}

// parseDeviceFilter reads the text of sharing.GPUFilter.String, in upper or lower case. An invalid
// filter is an error here; for mig-parted it matches nothing.
func parseDeviceFilter(s string) (filter sharing.GPUFilter, ok bool) {
	id, subsystem, qualified := strings.Cut(s, ":")
	filter.Device, ok = parsePCIPair(id)
	if ok && qualified {
		filter.Subsystem, ok = parsePCIPair(subsystem)
	}
	if !ok {
		return sharing.GPUFilter{}, false
	}
	return filter, true
}

// parsePCIPair reads a device ID and a vendor ID, which are never both 0.
func parsePCIPair(s string) (uint32, bool) {
	digits, ok := strings.CutPrefix(s, "0x")
	if !ok || len(digits) != 8 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	return uint32(n), err == nil && n != 0
}

// readGPUs reads "all" or a list of indexes.
func readGPUs(v value) (all bool, indexes []int) {
	switch v.shape() {
	case shapeNothing:
		return false, nil
	case shapeText:
		all = v.node.Value == "all"
	case shapeList:
		items, _ := v.items()
		for _, item := range items {
			index, ok := item.number()
			switch {
			case item.absent() || ok && index < 0:
				item.problem("expected the index of a GPU, from 0")
			case slices.Contains(indexes, index) && ok:
				item.problem("is listed twice")
			case ok:
				indexes = append(indexes, index)
			}
		}
		if len(items) > 0 {
			return false, indexes
		}
	}
	if !all {
		v.problem("expected all or a list of GPU indexes")
	}
	return all, nil
}

// partitionCount is a layout's number of partitions of a profile, with the line.
type partitionCount struct {
	mig.PartitionCount
	entry
}

// readPartitions reads a mapping from profiles to counts. It omits profiles with a count of 0. If
// every count is 0, it reports a problem, because that is probably a mistake.
func readPartitions(v value) []partitionCount {
	pairs := v.pairs()
	lines := make(map[mig.Profile]int)
	var partitions []partitionCount
	allZero := len(pairs) > 0
	for _, e := range pairs {
		profile, err := mig.ParseProfile(e.key)
		if err != nil {
			e.problem("expected a MIG profile such as 1g.5gb")
		} else if line, again := lines[profile]; again {
			e.problem(fmt.Sprintf("the profile is on line %d already", line))
		} else {
			lines[profile] = e.line
		}
		count, ok := e.value.number()
		if e.value.absent() || ok && count < 0 {
			e.value.problem("expected a number of partitions, from 0")
		}
		allZero = allZero && ok && count == 0
		if count > 0 && err == nil {
			partitions = append(partitions, partitionCount{mig.PartitionCount{Profile: profile, Count: count}, e})
		}
	}
	if allZero {
		v.problem("every count is 0: write {} for no partitions")
	}
	slices.SortFunc(partitions, func(a, b partitionCount) int { return a.Profile.Compare(b.Profile) })
	return partitions
}

// FormatMIGConfigs returns the layouts as a mig-parted document, which ParseMIGConfigs reads back
// as the same layouts. It returns an error if there are none, because such a document would be
// invalid.
func FormatMIGConfigs(layouts MIGLayouts) (string, error) {
	if len(layouts) == 0 {
		return "", errors.New("there is no MIG layout to write")
	}
	var b strings.Builder
	b.WriteString("version: v1\n" + migConfigsKey + ":\n")
	for _, layout := range layouts {
		fmt.Fprintf(&b, "  %s:\n", strconv.Quote(layout.Name))
		for _, block := range layout.Blocks {
			formatBlock(&b, block)
		}
	}
	return b.String(), nil
}

func formatBlock(b *strings.Builder, block sharing.LayoutBlock) {
	indent := "  - "
	line := func(format string, args ...any) {
		fmt.Fprintf(b, indent+format+"\n", args...)
		indent = "    "
	}
	if len(block.Filters) > 0 {
		line("device-filter: [%s]", joined(block.Filters,
			func(f sharing.GPUFilter) string { return strconv.Quote(f.String()) }))
	}
	if block.All {
		line("devices: all")
	} else {
		line("devices: [%s]", joined(block.Indexes, strconv.Itoa))
	}
	line("mig-enabled: %t", block.Layout.MIG)
	if block.Layout.MIG {
		line("mig-devices: {%s}", joined(block.Layout.Partitions, func(c mig.PartitionCount) string {
			return fmt.Sprintf("%q: %d", c.Profile, c.Count)
		}))
	}
}

func joined[T any](items []T, text func(T) string) string {
	texts := make([]string, len(items))
	for i, item := range items {
		texts[i] = text(item)
	}
	return strings.Join(texts, ", ")
}
