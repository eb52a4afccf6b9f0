package configs

import (
	"strings"
	"testing"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// Each layout of a document in mig-parted's words is for some board, and every
// board that its filters name comes to it from nothing.
func TestMIGPartedNames(t *testing.T) {
	layouts, err := ParseMIGConfigs("mig-parted-names.yaml", readCase(t, "mig-parted-names.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	reached := make(map[string]int)
	for device := range uint32(1 << 16) {
		geometry, known := mig.GeometryOf(uint16(device))
		if !known {
			continue
		}
		for index := range 8 {
			board := sharing.BoardID{Index: index, Device: device<<16 | 0x10DE}
			for _, layout := range layouts {
				wanted := sharing.Repartition{Manage: true, Name: layout.Name, Blocks: layout.Blocks}
				if want, ok, err := wanted.Layout(board, geometry); err == nil && ok {
					plan(t, layout.Name, geometry, want)
					reached[layout.Name]++
				} else if named(layout, board) {
					t.Errorf("%s is for %04X: %v", layout.Name, device, err)
				}
			}
		}
	}
	for _, layout := range layouts {
		if reached[layout.Name] == 0 {
			t.Errorf("%s is for no board", layout.Name)
		}
		if _, err := layouts.resolve(layout.Name); err != nil {
			t.Errorf("%s cannot be named: %v", layout.Name, err)
		}
		// What is built in under the same name is the same wish.
		if strings.HasPrefix(layout.Name, "all-") && MIGConfigs(nil).builtIn(layout.Name) != nil {
			t.Errorf("%s is not built in", layout.Name)
		}
	}
}

// named says that a filter of the layout names the board.
func named(layout MIGConfig, board sharing.BoardID) bool {
	for _, block := range layout.Blocks {
		for _, filter := range block.Filters {
			if filter.Match(board) {
				return true
			}
		}
	}
	return false
}

// plan goes from MIG off to the layout.
func plan(t *testing.T, name string, geometry mig.Geometry, want mig.Layout) {
	t.Helper()
	change, err := mig.Repartition(geometry, false, nil, want)
	if err != nil || !change.Complete() {
		t.Errorf("%s: %+v, %v", name, change, err)
	}
	count := 0
	for _, c := range want.Partitions {
		count += c.Count
	}
	if len(change.Result) != count {
		t.Errorf("%s: %d partitions, want %d", name, len(change.Result), count)
	}
}
