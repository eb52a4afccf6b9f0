package plugin_test

import (
	"fmt"

	"github.com/virgate/virgate/sharing"
)

// plan is one resource of so many units with so many replicas.
func plan(name string, units, replicas int) sharing.Plan {
	p := sharing.Plan{Faults: map[string]string{}}
	r := sharing.Resource{Name: name, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID}
	for u := range units {
		id := fmt.Sprintf("GPU-%04d", u)
		p.Faults[id] = ""
		r.Units = append(r.Units, sharing.Unit{ID: id, GPU: id, Index: fmt.Sprint(u), Replicas: replicas, NUMANode: -1})
		for n := range replicas {
			d := sharing.Device{ID: id, Unit: id, Healthy: true, NUMANode: -1}
			if replicas > 1 {
				d.ID = sharing.NewDeviceID(id, n)
			}
			r.Devices = append(r.Devices, d)
		}
	}
	p.Resources = []sharing.Resource{r}
	return p
}

// withFault marks a unit of the plan.
func withFault(p sharing.Plan, unit, fault string) sharing.Plan {
	p.Faults[unit] = fault
	for r := range p.Resources {
		for i, d := range p.Resources[r].Devices {
			if d.Unit == unit {
				p.Resources[r].Devices[i].Healthy = false
			}
		}
	}
	return p
}

const gpu = "nvidia.com/gpu"
