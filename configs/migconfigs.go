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
	return readLayouts(walker{}.read(root, migPartedKeys).at(migConfigsKey))
}

// readLayouts reads a mapping from names to lists of blocks.
func readLayouts(section value) (layouts MIGLayouts) {
	for _, e := range section.entries {
		layout := MIGLayout{Name: e.key}
		for _, block := range e.value.items {
			layout.Blocks = append(layout.Blocks, readLayoutBlock(block))
		}
		layouts = append(layouts, layout)
	}
	slices.SortFunc(layouts, func(a, b MIGLayout) int { return cmp.Compare(a.Name, b.Name) })
	return layouts
}

func readLayoutBlock(v value) sharing.LayoutBlock {
	if v.fields == nil {
		return sharing.LayoutBlock{}
	}
	enabled, partitions := v.at("mig-enabled"), v.at("mig-devices")
	block := sharing.LayoutBlock{
		All:     get[string](v, "devices") != "",
		Filters: readDeviceFilters(v.at("device-filter").items),
		Source:  sharing.BlockSource{File: v.source.file, Line: v.line},
	}
	for _, item := range v.at("devices").items {
		if index, ok := item.content.(int); ok && slices.Contains(block.Indexes, index) {
			item.problem("is listed twice")
		} else if ok {
			block.Indexes = append(block.Indexes, index)
		}
	}
	block.Layout.MIG = content[bool](enabled)
	if block.Layout.MIG && partitions.absent() {
		partitions.problem("is required where mig-enabled is true: write {} for no partitions")
	}
	counts := readPartitions(partitions)
	for _, c := range counts {
		block.Layout.Partitions = append(block.Layout.Partitions, c.PartitionCount)
		block.Source.Lines = append(block.Source.Lines, c.place.line)
	}
	if enabled.content == false && len(block.Layout.Partitions) > 0 {
		partitions.problem("expected none where mig-enabled is false")
	}
	if at, message := doubt(block); message != "" && at < 0 {
		partitions.note(message)
	} else if message != "" {
		counts[at].place.note(message)
	}
	return block
}

// readDeviceFilters reads filters; none, or only "", means all GPUs.
func readDeviceFilters(items []value) (filters []sharing.GPUFilter) {
	for _, item := range items {
		if filter := content[sharing.GPUFilter](item); filter != (sharing.GPUFilter{}) {
			filters = append(filters, filter)
		}
	}
	for _, item := range items {
		if len(filters) > 0 && item.content == (sharing.GPUFilter{}) {
			item.problem("expected a device filter such as 0x20B010DE or 0x20B010DE:0x134F10DE")
		}
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

// partitionCount is a layout's number of partitions of a profile, with the line.
type partitionCount struct {
	mig.PartitionCount
	entry
}

// readPartitions reads a mapping from profiles to counts. It omits profiles with a count of 0. If
// every count is 0, it reports a problem, because that is probably a mistake.
func readPartitions(v value) []partitionCount {
	lines := make(map[mig.Profile]int)
	var partitions []partitionCount
	allZero := len(v.entries) > 0
	for _, e := range v.entries {
		profile, err := mig.ParseProfile(e.key)
		if err != nil {
			e.problem("expected a MIG profile such as 1g.5gb")
		} else if line, again := lines[profile]; again {
			e.problem(fmt.Sprintf("the profile is on line %d already", line))
		} else {
			lines[profile] = e.place.line
		}
		count := content[int](e.value)
		allZero = allZero && e.value.content == 0
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
