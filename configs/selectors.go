package configs

import (
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// readExclude reads the selectors of what is never offered.
func readExclude(v value) []sharing.Selector {
	items, ok := v.items()
	if !ok || len(items) == 0 {
		return nil
	}
	v.note("Virgate's own: these are never offered; NVIDIA's plugin has no such key")
	return readSelectors(items, make(map[sharing.Selector]int))
}

const expectedDevices = "expected all, a number of devices, or a list of indexes and UUIDs"

// readSelection reads devices: all, a count, or a list of selectors; false if it cannot.
// seen has the lines of the selectors in earlier entries for the same resource.
func readSelection(v value, seen map[sharing.Selector]int) (sharing.Selection, bool) {
	if v.node == nil {
		return sharing.Selection{}, true
	}
	switch v.shape() {
	case shapeList:
		items, _ := v.items()
		if len(items) == 0 {
			v.problem("selects nothing: " + expectedDevices)
		}
		v.note("only these devices are time-sliced; NVIDIA's plugin takes all")
		return sharing.Selection{List: readSelectors(items, seen)}, true
	case shapeNumber:
		count, ok := v.number()
		if ok && count < 1 {
			v.problem("selects nothing: expected 1 or more")
			return sharing.Selection{}, false
		}
		v.note("only the first devices are time-sliced; NVIDIA's plugin takes all")
		return sharing.Selection{Count: count}, ok
	case shapeText:
		if v.node.Value == "all" {
			return sharing.Selection{}, true
		}
	}
	// An empty "devices:" is a problem, too: more likely a lost list than a way to say all.
	v.problem(expectedDevices)
	return sharing.Selection{}, false
}

// readSelectors reads selectors. It reports those in seen, and adds the others with lines.
func readSelectors(items []value, seen map[sharing.Selector]int) []sharing.Selector {
	selectors := make([]sharing.Selector, 0, len(items))
	for _, item := range items {
		selector, err := sharing.ParseSelector(item.node.Value)
		// A GPU index may be written as a number.
		if shape := item.shape(); err != nil || shape != shapeText && shape != shapeNumber {
			item.problem("expected a GPU index (0), a MIG index (0:1), a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)")
			continue
		}
		if line, again := seen[selector]; again {
			item.problem(fmt.Sprintf("is listed on line %d already", line))
			continue
		}
		seen[selector] = item.line
		selectors = append(selectors, selector)
	}
	return selectors
}
