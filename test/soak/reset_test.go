package soak

// A board with a fatal error is used again after a reset, and a reset proves
// something only to a Virgate that has seen the board before and after it. One
// that ends before it looks, or that has lost its driver, misses the reset
// (docs/health.md, Restarts); then, and only then, the board is reset again.

// hurt notes that the board may have had a fatal error.
func (w *world) hurt(ordinal int) {
	if _, already := w.missed[ordinal]; !already {
		w.missed[ordinal] = w.reopens
	}
}

// mayMissResets says that the handles of all boards are given up, so that what
// they would tell is not heard.
func (w *world) mayMissResets() {
	for ordinal := range w.missed {
		w.missed[ordinal] = true
	}
}

// resetAgain resets the sound boards whose reset may have been missed.
func (w *world) resetAgain(conditions []condition) {
	for ordinal, missed := range w.missed {
		if index, _ := w.boardAt(ordinal); missed && conditions[ordinal] == sound && index >= 0 {
			_ = w.site.node.Heal(index)
		}
	}
}

// recovered forgets the errors of boards that are used again.
func (w *world) recovered() {
	for ordinal := range w.missed {
		if w.settled.isUsed(ordinal) {
			delete(w.missed, ordinal)
		}
	}
}

// isUsed says that every unit of the board can be handed out.
func (j *judgement) isUsed(ordinal int) bool {
	board := j.boards[ordinal]
	units := map[string]bool{board.UUID: false}
	if board.MIG {
		units = map[string]bool{}
		for _, partition := range board.Partitions {
			units[partition.UUID] = false
		}
	}
	for _, health := range j.health {
		for id, healthy := range health {
			if unit, _ := unitOf(id); healthy {
				if _, of := units[unit]; of {
					units[unit] = true
				}
			}
		}
	}
	for _, used := range units {
		if !used {
			return false
		}
	}
	return len(units) > 0
}
