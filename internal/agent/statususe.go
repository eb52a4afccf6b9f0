package agent

import "github.com/virgate/virgate/sharing"

// addUse adds to the status what was last measured.
func addUse(status *Status, report sharing.UseReport) {
	status.Attributed = report.Attributed
	boards := boardUses(report)
	type user struct {
		unit      string
		container sharing.Container
	}
	users := map[user]*UseStatus{}
	for _, c := range report.Containers {
		users[user{c.Unit, c.Container}] = &UseStatus{
			Memory: figure(c.Memory), SM: figure(c.SM), Processes: c.Processes, OverShare: figure(c.OverShare),
		}
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

// boardUses are the boards as wholes, by UUID.
func boardUses(report sharing.UseReport) map[string]*UseStatus {
	boards := map[string]*UseStatus{}
	for _, b := range report.Boards {
		boards[b.GPU] = &UseStatus{Memory: figure(b.Memory), SM: figure(b.SM), Celsius: figure(b.Celsius), Throttled: b.Throttled}
	}
	for _, c := range report.Contention {
		if board := boards[c.GPU]; board != nil && c.Contended {
			board.Contended, board.MaxShare = true, &c.MaxShare
		}
	}
	for _, u := range report.Unattributed {
		if board := boards[u.GPU]; board != nil && u.Processes > 0 {
			board.Unattributed = append(board.Unattributed, UnattributedStatus{
				Cause: u.Cause, Processes: u.Processes, Memory: figure(u.Memory), SM: figure(u.SM),
			})
		}
	}
	return boards
}

// figure is nil for a figure that is not known.
func figure(f sharing.Figure) *float64 {
	if !f.Known {
		return nil
	}
	return &f.Value
}
