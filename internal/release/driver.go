package release

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// Blocked returns why the GPU cannot be used although it is not released: another one is, or is
// about to be, and this driver opens all GPUs at once. It is empty if the GPU can be used.
func (m *Manager) Blocked(gpu string) string {
	if m.Releaser == nil || !m.Releaser.OpensAll() {
		return ""
	}
	closed := m.Releaser.ClosedFor()
	if slices.Contains(closed, gpu) {
		return ""
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var by *release
	for _, r := range m.gpus {
		if r.GPU != gpu && (r.closing || slices.Contains(closed, r.GPU)) && (by == nil || r.Index < by.Index) {
			by = r
		}
	}
	if by == nil {
		return ""
	}
	return fmt.Sprintf("GPU %d is released, or about to be, until %s, and this driver opens all GPUs at once", by.Index,
		by.Until.UTC().Format("15:04 MST"))
}

func (m *Manager) setClosing(r *release, closing bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r.closing = closing
}

// changesElsewhere returns the changes of other GPUs' MIG layouts that a release of this GPU would
// interrupt. None begins once the release is closing.
func (m *Manager) changesElsewhere(gpu string) (waits []string) {
	if !m.Releaser.OpensAll() {
		return nil
	}
	for _, other := range m.GPUs() {
		if other.UUID != gpu && m.Layouts.Changing(other.UUID) {
			waits = append(waits, fmt.Sprintf("the MIG layout of GPU %d, which is being changed", other.Index))
		}
	}
	return waits
}

// The turns of the driver that a GPU takes to be taken back, which several may be together, and to
// be reset.
const (
	turnToRestore = 1
	turnToReset   = 1 << 20
)

// takeDriver waits until no other GPU is being reset, nor taken back if this one is to be reset, if
// this driver opens all GPUs at once: it refuses to reset a GPU that is open. It calls wait if it has
// to. The caller must call end. The error means that ctx ended.
func (m *Manager) takeDriver(ctx context.Context, turn int64, wait func()) (end func(), err error) {
	if !m.Releaser.OpensAll() {
		return func() {}, nil
	}
	if !m.driver.TryAcquire(turn) {
		wait()
		if err := m.driver.Acquire(ctx, turn); err != nil {
			return nil, err
		}
	}
	return func() { m.driver.Release(turn) }, nil
}

// resetPatience limits how long a reset waits for another GPU to be taken back, which may need it.
const resetPatience = time.Minute

// takeDriverForReset is takeDriver for a reset, which is tried even if another GPU cannot be taken
// back.
func (m *Manager) takeDriverForReset(ctx context.Context) (end func()) {
	ctx, cancel := context.WithTimeout(ctx, resetPatience)
	defer cancel()
	end, err := m.takeDriver(ctx, turnToReset, func() {})
	if err != nil {
		return func() {}
	}
	return end
}
