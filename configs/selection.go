package configs

import (
	"fmt"

	"github.com/virgate/virgate/sharing"
)

const expectedDevices = "expected all, a number of devices, or a list of indexes and UUIDs"

// readSelection reads devices: all, a count, or a list of selectors. It is
// false for what cannot be read. seen has the selectors that earlier
// entries of the same resource list.
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
	// An empty "devices:" is here too: more likely a list that got lost than all.
	v.problem(expectedDevices)
	return sharing.Selection{}, false
}

// readSelector reads a selector; an index may be a bare number.
func readSelector(v value) (sharing.Selector, bool) {
	if shape := v.shape(); shape == shapeText || shape == shapeNumber {
		if selector, err := sharing.ParseSelector(v.node.Value); err == nil {
			return selector, true
		}
	}
	v.problem("expected a GPU index (0), a MIG index (0:1), a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)")
	return sharing.Selector{}, false
}

func alreadySelected(line int) string {
	return fmt.Sprintf("is listed on line %d already", line)
}
