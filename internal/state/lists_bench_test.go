package state

import (
	"fmt"
	"testing"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// BenchmarkSave keeps a list of 8,000 devices; the first list of a start waits
// for it, and for the disk.
func BenchmarkSave(b *testing.B) {
	list := plugin.List{}
	for i := range 8000 {
		unit := fmt.Sprintf("GPU-00000000-0000-5000-8000-00000000000%d", i/1000)
		list.Entries = append(list.Entries, plugin.Entry{
			Device: sharing.Device{ID: sharing.NewDeviceID(unit, i%1000), Unit: unit, NUMANode: -1}, Phase: plugin.Offered,
		})
	}
	file := NewFile(b.TempDir(), discard())
	b.ReportAllocs()
	for b.Loop() {
		if err := (Lists{file}).Save(plugin.Lists{"nvidia.com/gpu": list}); err != nil {
			b.Fatal(err)
		}
	}
}
