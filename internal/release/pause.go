package release

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Pause is a label of the Node by which another program asks for all GPUs to be closed. The zero
// Pause is no pause.
type Pause struct{ Label, Value string }

// Any reports whether there is a pause.
func (p Pause) Any() bool { return p != Pause{} }

// ForDriverUpgrade reports whether the GPU Operator pauses the node to replace the driver.
func (p Pause) ForDriverUpgrade() bool { return strings.Contains(p.Value, "paused-for-driver-upgrade") }

// kind finds the purpose of the pause in the label's value, which may begin with other text.
func (p Pause) kind() (reason, who string) {
	switch {
	case p.ForDriverUpgrade():
		return "PausedForDriverUpgrade", "the GPU Operator replaces the driver"
	case strings.Contains(p.Value, "paused-for-mig-change"):
		return "PausedForMIGChange", "mig-manager changes MIG layouts"
	}
	return "Paused", "another program needs them"
}

// Reason is the reason in the Node's condition.
func (p Pause) Reason() string {
	reason, _ := p.kind()
	return reason
}

// Text explains why nothing is offered during the pause.
func (p Pause) Text() string {
	_, who := p.kind()
	return fmt.Sprintf("no GPU is offered while %s: the Node's label %s is %s", who, p.Label, p.Value)
}

// unknownPause is the text for a pause of the last run before the Node has been read.
const unknownPause = "no GPU is offered: a label of the Node paused the last run, and it is not known whether " +
	"that is over"

// pauseDriver makes the driver close as a whole once the last GPU is released. Before the GPUs are
// read, it uses those that the last run had released; without any, the driver is closed at once. If
// a GPU is in use at that time, it does nothing and returns false, because the devices must be
// withdrawn first. It requires the lock.
func (m *Manager) pauseDriver(used bool) bool {
	var gpus []string
	for _, gpu := range m.GPUs() {
		if gpu.DriverIndex != sharing.NotListed {
			gpus = append(gpus, gpu.UUID)
		}
	}
	if gpus == nil && used {
		return false
	}
	if gpus == nil {
		gpus = slices.Collect(maps.Keys(m.gpus))
	}
	m.Releaser.Pause(gpus)
	return true
}

// pauseLimit is how long GPUs stay closed for a pause after a restart while it is unknown whether
// the pause is over.
const pauseLimit = time.Hour

// followPause releases all GPUs during a pause, makes the driver close with the last one, and takes
// them back afterwards. No release ends during a pause. again is true if it must check again soon.
func (m *Manager) followPause(ctx context.Context) (again bool) {
	another := false
	defer func() {
		if another {
			m.Plan(ctx)
		}
	}()
	pause, known := m.Paused()
	used := pause.Any() && len(m.GPUs()) == 0 && m.Used(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.Releaser == nil:
	case pause.Any():
		m.inPause = true
		another = m.releaseAll(pause)
		for _, r := range m.gpus {
			if r.stopRestoring != nil {
				r.stopRestoring()
			}
		}
		return !m.pauseDriver(used)
	case known:
		m.Releaser.Resume()
		for _, r := range m.gpus {
			ends := r.Pause && r.State != Restored
			if ends {
				r.Until = time.Now()
			}
			if ends || m.inPause { // Some waited for its end to be reset or taken back.
				r.wake.Notify()
			}
		}
		m.inPause = false
	}
	return false
}

// releaseAll releases the GPUs for a pause, and reports whether some were already released for
// another one. If the state file cannot be written, the pause continues: the label informs the next
// run. It requires the lock.
func (m *Manager) releaseAll(pause Pause) (another bool) {
	changed := false
	for _, gpu := range m.GPUs() {
		r := m.gpus[gpu.UUID]
		switch {
		case gpu.DriverIndex == sharing.NotListed:
			continue
		case r == nil || r.State == Restored:
		case r.Pause && r.Why != pause.Text():
			another = true
		default:
			continue
		}
		r = m.put(gpu)
		r.Pause = true
		r.Why = pause.Text()
		r.Until = time.Now().Add(pauseLimit).Round(0)
		changed = true
		r.wake.Notify()
	}
	if changed {
		m.keepLater()
		m.Changed()
	}
	return another
}
