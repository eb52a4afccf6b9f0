package mig_test

import (
	"testing"

	"github.com/virgate/virgate/mig"
)

// BenchmarkRepartition has the cases that search longest. Each stays below a
// millisecond, so a plan may be made as often as anything changes.
func BenchmarkRepartition(b *testing.B) {
	g := geometry(b, a100)
	for _, row := range []struct {
		name, have, want string
		busy             uint
	}{
		{"the same", "2g.10gb@0:2 1g.5gb@2:1 1g.5gb@3:1 3g.20gb@4:4", "2×1g.5gb 2g.10gb 3g.20gb", 0},
		{"seven to balanced", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1", "2×1g.5gb 2g.10gb 3g.20gb", 0},
		{"seven to four, one in the way", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1", "3×1g.5gb 4g.20gb", 1 << 2},
		{"seven in use to the whole", "1g.5gb@0:1 1g.5gb@1:1 1g.5gb@2:1 1g.5gb@3:1 1g.5gb@4:1 1g.5gb@5:1 1g.5gb@6:1", "7g.40gb", 1<<7 - 1},
		{"scattered in use", "1g.5gb@0:1 1g.5gb@2:1 1g.5gb@4:1 1g.5gb@6:1", "1g.5gb+me 2×1g.5gb 2×1g.10gb", 1<<4 - 1},
		{"seven shares of one instance", "1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8 1c.7g.40gb@0:8", "3×1c.7g.40gb 2×2c.7g.40gb", 1 << 1},
		{"six shares of three instances", "1c.2g.10gb@0:2 1c.2g.10gb@0:2 1c.2g.10gb@2:2 1c.2g.10gb@2:2 1c.2g.10gb@4:2 1c.2g.10gb@4:2", "3×1c.2g.10gb 3g.20gb", 1<<1 | 1<<3},
	} {
		board := newBoardModel(b, g, placed(b, row.have))
		board.setBusy(row.busy)
		want := layout(b, row.want)
		b.Run(row.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := mig.Repartition(g, true, board.instances, want); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
