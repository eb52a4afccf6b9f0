package sharing

import "strings"

// Strategy says for display in which ways the resource's units are handed out:
// "exclusive" (whole boards, one container each), "time-slicing", "mig",
// "mig+time-slicing" (replicas of partitions), or those that occur, in this
// order and separated by commas. It is empty for a resource without units.
func (r Resource) Strategy() string {
	names := [...]string{"exclusive", "time-slicing", "mig", "mig+time-slicing"}
	var occurs [len(names)]bool
	for _, unit := range r.Units {
		way := 0
		if unit.Replicas > 1 {
			way++
		}
		if unit.Partition() {
			way += 2
		}
		occurs[way] = true
	}
	var ways []string
	for way, name := range names {
		if occurs[way] {
			ways = append(ways, name)
		}
	}
	return strings.Join(ways, ",")
}

// Healthy is the number of healthy devices.
func (r Resource) Healthy() int {
	count := 0
	for _, device := range r.Devices {
		if device.Healthy {
			count++
		}
	}
	return count
}

// Replicas is the largest number of devices that stand for one unit; 0 for a
// resource without units.
func (r Resource) Replicas() int {
	most := 0
	for _, unit := range r.Units {
		most = max(most, unit.Replicas)
	}
	return most
}
