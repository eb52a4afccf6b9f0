package release

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/mig"
)

// PersistenceOff is a GPU whose persistence mode this program has turned off for a reset, or was
// about to.
type PersistenceOff struct {
	PCIBusID string `json:"pciBusID"`
	// Boot is the machine's boot ID: after another boot the mode is lost anyway. It is empty if
	// unknown.
	Boot string `json:"boot,omitempty"`
}

// Persistence turns the persistence mode of GPUs, by PCI bus ID, off for a reset and on again after
// it. The mode may be the driver's own, without a daemon that nvidia-smi could ask to close the
// GPU.
type Persistence struct {
	// On reports whether the GPU is in that mode. Set turns it on or off. Both may open the GPU
	// briefly.
	On  func(ctx context.Context, pciBusID string) (bool, error)
	Set func(ctx context.Context, pciBusID string, on bool) error
	// Store records for a restart which modes are off. Boot is the machine's boot ID.
	Store interface {
		Load() ([]PersistenceOff, error)
		Save(list []PersistenceOff) error
	}
	Boot string
}

// persistenceInterval is the time between two tries to turn a persistence mode on again.
const persistenceInterval = 10 * time.Second

// resetGPU resets the GPU, which this program has closed, and reports whether it was reset: the
// error may come from a later step.
func (m *Manager) resetGPU(ctx context.Context, r Release) (wasReset bool, err error) {
	err = m.Reset(ctx, r.PCIBusID)
	if errors.Is(err, mig.ErrInUse) && m.Persistence != nil && !m.isOff(r.PCIBusID) {
		on, unknown := m.Persistence.On(ctx, r.PCIBusID)
		switch {
		case unknown != nil:
			err = fmt.Errorf("%w; its persistence mode, which may be why, is not known: %w", err, unknown)
		case on:
			err = m.resetWithoutPersistence(ctx, r.PCIBusID)
		}
	}
	if errors.Is(err, mig.ErrInUse) && m.OpenedBy != nil {
		err = fmt.Errorf("%w%s", err, m.OpenedBy(ctx, r.GPU))
	}
	wasReset = err == nil
	if m.isOff(r.PCIBusID) && ctx.Err() == nil {
		err = errors.Join(err, m.turnOn(ctx, r.PCIBusID))
	}
	return wasReset, err
}

func (m *Manager) resetWithoutPersistence(ctx context.Context, busID string) error {
	m.Logger.Info("GPU in use and in persistence mode, which is turned off for the reset", "pci", busID)
	err := m.keepOff(busID, true)
	if err == nil {
		err = m.Persistence.Set(ctx, busID, false)
	}
	if err != nil {
		return fmt.Errorf("in use and in persistence mode, which cannot be turned off for the reset: %w", err)
	}
	return m.Reset(ctx, busID)
}

// turnOn turns a GPU's persistence mode on again after this program has turned it off.
func (m *Manager) turnOn(ctx context.Context, busID string) error {
	on, err := m.Persistence.On(ctx, busID) // It may never have been turned off.
	if err == nil && !on {
		err = m.Persistence.Set(ctx, busID, true)
	}
	if err == nil {
		err = m.keepOff(busID, false)
	}
	if err != nil {
		return fmt.Errorf("persistence mode of %s is still off, and it is tried again to turn it on: %w", busID, err)
	}
	return nil
}

// isOff reports whether this program has turned the GPU's persistence mode off.
func (m *Manager) isOff(busID string) bool { return slices.Contains(m.allOff(), busID) }

func (m *Manager) allOff() (busIDs []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.off {
		busIDs = append(busIDs, o.PCIBusID)
	}
	return busIDs
}

// keepOff records for a restart whether the mode is off. If that fails, isOff does not change.
func (m *Manager) keepOff(busID string, off bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := slices.DeleteFunc(slices.Clone(m.off), func(o PersistenceOff) bool { return o.PCIBusID == busID })
	if off {
		next = append(next, PersistenceOff{PCIBusID: busID, Boot: m.Persistence.Boot})
	}
	if err := m.Persistence.Store.Save(append([]PersistenceOff{}, next...)); err != nil {
		return fmt.Errorf("keep it for a restart: %w", err)
	}
	m.off = next
	return nil
}

// loadOff takes over the modes that an earlier run since the machine's boot has left off. It
// requires the lock.
func (m *Manager) loadOff() {
	list, err := m.Persistence.Store.Load()
	if err != nil {
		m.Logger.Error("persistence modes that the last run has turned off not read", "error", err)
	}
	m.off = slices.DeleteFunc(list, func(o PersistenceOff) bool {
		return o.Boot != "" && m.Persistence.Boot != "" && o.Boot != m.Persistence.Boot
	})
}

// keepPersistence turns persistence modes on again until ctx ends, except for GPUs with a release
// under way, which does so itself.
func (m *Manager) keepPersistence(ctx context.Context) {
	failed := map[string]string{}
	for ctx.Err() == nil {
		for _, busID := range m.allOff() {
			released := slices.ContainsFunc(m.List(),
				func(r Release) bool { return r.PCIBusID == busID && r.State != Restored })
			if released || m.paused() {
				continue
			}
			end := m.takeDriverForReset(ctx) // nvidia-smi opens GPUs.
			if m.paused() {                  // It may have begun during the wait.
				end()
				continue
			}
			err := m.turnOn(ctx, busID)
			end()
			if text := message(err); ctx.Err() == nil && text != failed[busID] {
				failed[busID] = text
				m.Logger.Warn("persistence mode of a GPU, off for a reset", "pci", busID, "error", err)
			}
		}
		wake.Sleep(ctx, persistenceInterval)
	}
}
