package soak

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// still is what must stay as it is where nothing has changed, byte for byte.
type still struct {
	// Lists is everything that the kubelet knows of the devices of boards at rest.
	Lists string
	// Plan is the program's; empty where a board is not at rest.
	Plan string
}

// still waits for the program's plan.
func (w *world) still(conditions []condition) (still, error) {
	now := still{Lists: w.listed(conditions)}
	if w.anyRestless(conditions) {
		return now, nil
	}
	err := w.await("the plan", func() string {
		code, body, err := w.program.page(w.ctx, "/plan")
		if err != nil || code != http.StatusOK {
			return fmt.Sprint(code, " ", err)
		}
		now.Plan = body
		return ""
	})
	return now, err
}

// listed is still.Lists.
func (w *world) listed(conditions []condition) string {
	restless := w.restless(conditions)
	snapshot := w.kubelet.Snapshot()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(snapshot.Resources)) {
		for _, device := range snapshot.Resources[name].Devices {
			if unit, _ := unitOf(device.ID); !restless[unit] {
				fmt.Fprintf(&b, "%s %v\n", name, device)
			}
		}
	}
	return b.String()
}
