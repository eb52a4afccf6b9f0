package agent

import "github.com/virgate/virgate/sharing"

// addUse adds to the status what was last measured.
func addUse(status *Status, report sharing.UseReport) {
	boards := map[string]*UseStatus{}
	for _, b := range report.Boards {
		boards[b.GPU] = &UseStatus{Memory: figure(b.Memory), SM: figure(b.SM), Celsius: figure(b.Celsius), Throttled: b.Throttled}
	}
	type user struct {
		unit      string
		container sharing.Container
	}
	users := map[user]*UseStatus{}
	for _, c := range report.Containers {
		users[user{c.Unit, c.Container}] = &UseStatus{Memory: figure(c.Memory), SM: figure(c.SM), Processes: c.Processes}
	}
	for g := range status.GPUs {
		board := &status.GPUs[g]
		board.Use = boards[board.UUID]
		for _, unit := range board.Units {
			for h := range unit.Holders {
				holder := &unit.Holders[h]
				holder.Use = users[user{unit.ID, sharing.Container{Namespace: holder.Namespace, Pod: holder.Pod, Name: holder.Container}}]
			}
		}
	}
}

// figure is nil for a figure that is not known.
func figure(f sharing.Figure) *float64 {
	if !f.Known {
		return nil
	}
	return &f.Value
}
