package plugin

import (
	"fmt"
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

// BenchmarkNext is the first list of a start, and a look at one that stays.
func BenchmarkNext(b *testing.B) {
	for _, replicas := range []int{10, 100, 1000} {
		plan := planOf(nil, fmt.Sprintf("gpu=%d:A,B,C,D,E,F,G,H", replicas))
		first := func() Lists { return Next(nil, plan, Sight{}, Calls{}, time.Time{}, Timing{}) }
		b.Run(fmt.Sprintf("devices=%d/first", 8*replicas), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				first()
			}
		})
		b.Run(fmt.Sprintf("devices=%d/again", 8*replicas), func(b *testing.B) {
			b.ReportAllocs()
			have := first()
			for b.Loop() {
				Next(have, plan, Sight{}, Calls{}, time.Time{}, Timing{})
			}
		})
	}
}

// BenchmarkGeneration is what the servers need of a list of 8,000 devices.
func BenchmarkGeneration(b *testing.B) {
	plan := planOf(nil, "gpu=1000:A,B,C,D,E,F,G,H")
	list := Next(nil, plan, Sight{}, Calls{}, time.Time{}, Timing{})["gpu"]
	units := map[string]sharing.Unit{}
	for _, u := range plan.Resources[0].Units {
		units[u.ID] = u
	}
	b.ReportAllocs()
	for b.Loop() {
		newGeneration(plan.Resources[0], list, terms{host: &Host{}}, plan.Faults, units, nil)
	}
}
