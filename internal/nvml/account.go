package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"github.com/virgate/virgate/sharing"
)

// inventory is the boards as they are now, by index; nothing in it is shared
// with the ledger.
func (l *ledger) inventory() []sharing.GPU {
	gpus := make([]sharing.GPU, 0, len(l.records))
	for _, known := range l.records {
		gpus = append(gpus, known.describe())
	}
	slices.SortFunc(gpus, func(a, b sharing.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	return gpus
}

func (k *record) describe() sharing.GPU {
	gpu := k.gpu
	gpu.Fault = k.units[gpu.UUID].fault()
	gpu.Partitions = slices.Clone(gpu.Partitions)
	slices.SortFunc(gpu.Partitions, func(a, b sharing.Partition) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	for i := range gpu.Partitions {
		partition := &gpu.Partitions[i]
		partition.Fault = k.units[partition.UUID].fault()
	}
	return gpu
}

// health is every unit's health, by board and partition index, with the
// counters.
func (l *ledger) health() sharing.HealthReport {
	units := []sharing.UnitHealth{}
	for _, gpu := range l.inventory() {
		known := l.records[gpu.UUID]
		units = append(units, known.health(gpu.UUID, known.units[gpu.UUID].reason()))
		for _, p := range gpu.Partitions {
			units = append(units, known.health(p.UUID, known.units[p.UUID].reason()))
		}
	}
	return sharing.HealthReport{Units: units, Transitions: l.tally.transitionCounts(), XIDs: l.tally.xidCounts()}
}

// index is the driver's index of the board or of its partition.
func (k *record) index(unit string) string {
	for _, p := range k.gpu.Partitions {
		if p.UUID == unit {
			return fmt.Sprintf("%d:%d", k.gpu.Index, p.Index)
		}
	}
	return strconv.Itoa(k.gpu.Index)
}
