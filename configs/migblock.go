package configs

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// readMIGBlock reads one block of a layout, which may have the keys. In an own
// one, which is meant for Virgate, what no board can have is a problem.
func readMIGBlock(v value, keys []string, own bool) sharing.LayoutBlock {
	if v.shape() != shapeMapping {
		v.problem("expected a mapping with devices and mig-enabled")
		return sharing.LayoutBlock{}
	}
	f := v.mapping(keys...)
	block := sharing.LayoutBlock{Filters: readDeviceFilters(f.field("device-filter"))}
	block.All, block.Indexes = readBoards(f.required("devices"))
	enabled, ok := f.required("mig-enabled").boolean()
	block.Layout.MIG = enabled
	partitions := f.field("mig-devices")
	if ok && enabled && partitions.absent() {
		partitions.problem("is required where mig-enabled is true: write {} for no partitions")
	}
	block.Layout.Partitions = readPartitions(partitions)
	if ok && !enabled && len(block.Layout.Partitions) > 0 {
		partitions.problem("expected none where mig-enabled is false")
	}
	if own {
		if err := judge(block); err != nil {
			partitions.problem(err.Error())
		}
	}
	return block
}

// readDeviceFilters reads one filter or a list of them.
func readDeviceFilters(v value) []sharing.BoardFilter {
	items, _ := v.texts()
	var filters []sharing.BoardFilter
	for _, item := range items {
		if item.shape() != shapeText {
			item.problem("expected a device filter in quotes, such as \"0x20B010DE\"")
			continue
		}
		filter, err := ParseDeviceFilter(item.node.Value)
		if err != nil {
			item.problem("expected a device filter such as 0x20B010DE or 0x20B010DE:0x134F10DE")
			continue
		}
		filters = append(filters, filter)
	}
	return filters
}

// readBoards reads "all" or a list of indexes.
func readBoards(v value) (all bool, indexes []int) {
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

// readPartitions reads profile → count. A count of 0 asks for nothing and is
// left out, but not everything may be 0: that is hardly meant.
func readPartitions(v value) []mig.Count {
	pairs := v.pairs()
	lines := make(map[mig.Profile]int)
	var partitions []mig.Count
	asked := false
	for _, e := range pairs {
		profile, err := mig.ParseProfile(e.key)
		if err != nil {
			v.source.problem(place{v.source.file, e.line, e.value.path}, quote(e.key), "expected a MIG profile such as 1g.5gb")
		} else if line, again := lines[profile]; again {
			v.source.problem(place{v.source.file, e.line, e.value.path}, quote(e.key),
				fmt.Sprintf("the profile is on line %d already", line))
		} else {
			lines[profile] = e.line
		}
		count, ok := e.value.number()
		if e.value.absent() || ok && count < 0 {
			e.value.problem("expected a number of partitions, from 0")
		}
		asked = asked || !ok || count != 0
		if count > 0 && err == nil {
			partitions = append(partitions, mig.Count{Profile: profile, Count: count})
		}
	}
	if len(pairs) > 0 && !asked {
		v.problem("every count is 0: write {} for no partitions")
	}
	slices.SortFunc(partitions, func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) })
	return partitions
}
