package soak

import (
	"fmt"
	"maps"
	"net/http"
	"slices"

	"github.com/google/go-cmp/cmp"
)

// still is what must stay as it is where nothing has changed, byte for byte.
type still struct {
	// lists is everything that the kubelet knows of the devices of each board, by
	// UUID; "" has those of partitions that are gone.
	lists map[string][]string
	// plan is the program's, empty where a board is restless.
	plan string
	// restless are the boards of which both may change.
	restless map[string]bool
}

// still waits for the program's plan.
func (w *world) still(conditions []condition) (still, error) {
	now := still{lists: map[string][]string{}, restless: w.restless(conditions)}
	boardOf := w.boardOf()
	snapshot := w.kubelet.Snapshot()
	for _, name := range slices.Sorted(maps.Keys(snapshot.Resources)) {
		for _, device := range snapshot.Resources[name].Devices {
			unit, _ := unitOf(device.ID)
			now.lists[boardOf[unit]] = append(now.lists[boardOf[unit]], fmt.Sprintf("%s %v", name, device))
		}
	}
	if len(now.restless) > 0 {
		return now, nil
	}
	err := w.await("the plan", func() string {
		code, body, err := w.program.page(w.ctx, "/plan")
		if err != nil || code != http.StatusOK {
			return fmt.Sprint(code, " ", err)
		}
		now.plan = body
		return ""
	})
	return now, err
}

// differ says what is not as it was, but for boards that were restless before or
// are now: one that waits for its pods may be cut, or be given up, in between.
func (s still) differ(now still) string {
	restless := maps.Clone(s.restless)
	maps.Copy(restless, now.restless)
	before, after := maps.Clone(s.lists), maps.Clone(now.lists)
	if len(restless) > 0 {
		restless[""] = true // Partitions that are gone may have been theirs.
	}
	for board := range restless {
		delete(before, board)
		delete(after, board)
	}
	if diff := cmp.Diff(before, after); diff != "" || len(restless) > 0 {
		return diff
	}
	return cmp.Diff(s.plan, now.plan)
}

func (w *world) differ(invariant string, o operation, before still) error {
	now, err := w.still(o.conditions)
	if err != nil {
		return err
	}
	if diff := before.differ(now); diff != "" {
		return fmt.Errorf("invariant %s: other lists, or another plan (-before +after):\n%s", invariant, diff)
	}
	return nil
}
