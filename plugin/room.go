package plugin

import (
	"slices"

	"github.com/virgate/virgate/sharing"
)

// mostListed is the number of devices of one list. A plan has no more for a
// resource than this (sharing.NewPlan), but in passing from one to the next a
// list holds what retires beside what is new.
const mostListed = sharing.MostDevices

// withRoom returns the entries without the new ones, the last first, that would
// make the list longer than the kubelet takes: it would drop the stream, and all
// devices with it. They come when others have left. What was listed before stays.
func withRoom(entries, old []Entry) []Entry {
	surplus := len(entries) - mostListed
	if surplus <= 0 {
		return entries
	}
	listed := make(map[string]bool, len(old))
	for _, e := range old {
		listed[e.ID] = true
	}
	kept := make([]Entry, 0, max(mostListed, len(old)))
	for i := len(entries) - 1; i >= 0; i-- {
		if surplus > 0 && !listed[entries[i].ID] {
			surplus--
			continue
		}
		kept = append(kept, entries[i])
	}
	slices.Reverse(kept)
	return kept
}
