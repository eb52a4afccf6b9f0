package release

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simnode"
)

const busID = "00000000:07:00.0"

// machine is a simulated node with one GPU, and a disk with its journal. It is killed before one of the calls.
type machine struct {
	*simnode.Node
	kept   []PersistenceOff
	full   error
	calls  []string
	killAt int
	unread error
}

var errKilled = errors.New("killed")

func (m *machine) call(name string) {
	if m.calls = append(m.calls, name); len(m.calls) == m.killAt {
		panic(errKilled)
	}
}

func (m *machine) Load() ([]PersistenceOff, error) { return slices.Clone(m.kept), nil }

func (m *machine) Save(list []PersistenceOff) error {
	m.call(fmt.Sprintf("keep %d", len(list)))
	if m.full == nil {
		m.kept = slices.Clone(list)
	}
	return m.full
}

// oldReleases is a store without releases from an earlier run.
type oldReleases struct{}

func (oldReleases) Load() ([]Release, error)       { return nil, nil }
func (oldReleases) Save([]Release) error           { return nil }
func (oldReleases) Pause([]string)                 {}
func (oldReleases) Resume()                        {}
func (oldReleases) KeepReleased(map[string]int)    {}
func (oldReleases) OpensAll() bool                 { return false }
func (oldReleases) ClosedFor() []string            { return nil }
func (oldReleases) Status() []nodereport.GPULayout { return nil }
func (oldReleases) Release(context.Context, string) (int, error) {
	return 0, nil
}
func (oldReleases) Restore(context.Context, string, bool) error { return nil }

// manager is the manager of a run in this boot of the machine.
func (m *machine) manager(boot string) *Manager {
	return New(Options{
		Driver: Driver{
			Releaser: oldReleases{},
			Store:    oldReleases{},
			Reset: func(_ context.Context, bus string) error {
				m.call("reset")
				return m.ResetGPU(bus)
			},
			Persistence: &Persistence{
				On: func(_ context.Context, bus string) (bool, error) {
					m.call("ask")
					on, err := m.Persistence(bus)
					return on, errors.Join(err, m.unread)
				},
				Set: func(_ context.Context, bus string, on bool) error {
					m.call(fmt.Sprintf("set %t", on))
					return m.SetPersistence(bus, on)
				},
				Store: m,
				Boot:  boot,
			},
		},
		OpenedBy: func(context.Context, string) string { return ": dcgm (PID 812)" },
		Paused:   func() (Pause, bool) { return Pause{}, true },
		Logger:   slog.New(slog.NewTextHandler(&bytes.Buffer{}, nil)),
	})
}

func newMachine(t *testing.T, world string) *machine {
	t.Helper()
	sim, err := simnode.New("a100-40")
	if err == nil {
		err = sim.SetWorld(world)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &machine{Node: sim}
}

func TestResetBesidePersistence(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, world  string
		full, unread error
		calls, says  string
		// wasReset: it was reset; off: persistence mode is not on again.
		wasReset, off bool
	}{
		{"without persistence mode", "", nil, nil, "reset", "", true, true},
		{"in persistence mode", "persistence", nil, nil, "reset, ask, keep 1, set false, reset, ask, set true, keep 0", "", true, false},
		{"open elsewhere, too", "persistence,client=dcgm", nil, nil, "reset, ask, keep 1, set false, reset, ask, set true, keep 0", "another client: dcgm (PID 812)", false, false},
		{"open elsewhere alone", "client=dcgm", nil, nil, "reset, ask", "another client: dcgm (PID 812)", false, true},
		{"nobody tells the mode", "persistence", nil, errors.New("what?"), "reset, ask", "its persistence mode, which may be why, is not known: what?", false, false},
		{"a full disk", "persistence", errors.New("disk full"), nil, "reset, ask, keep 1", "cannot be turned off for the reset: keep it for a restart: disk full", false, false},
		{"no right", "persistence,monitor-only", nil, nil, "reset, ask, keep 1, set false, ask, keep 0", "Insufficient Permissions", false, false},
		{"another reason", "persistence,passthrough", nil, nil, "reset", "not supported", false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			node := newMachine(t, test.world)
			node.full, node.unread = test.full, test.unread
			wasReset, err := node.manager("").resetGPU(t.Context(), Release{GPU: "GPU-a", PCIBusID: busID})
			if wasReset != test.wasReset || (err != nil) != (test.says != "") || err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("reset %t, %v, want %t, %q", wasReset, err, test.wasReset, test.says)
			}
			if calls := strings.Join(node.calls, ", "); calls != test.calls {
				t.Errorf("calls %s, want %s", calls, test.calls)
			}
			if on, err := node.Persistence(busID); on == test.off || err != nil {
				t.Errorf("persistence mode %t, %v", on, err)
			}
		})
	}
}

// TestKilledInAReset checks that persistence mode is on again in the next run, wherever the program was killed,
// unless the machine was rebooted.
func TestKilledInAReset(t *testing.T) {
	t.Parallel()
	const calls = 8
	for killAt := 1; killAt <= calls; killAt++ {
		synctest.Test(t, func(t *testing.T) {
			node := newMachine(t, "persistence")
			node.killAt = killAt
			func() {
				defer func() {
					if why, _ := recover().(error); !errors.Is(why, errKilled) {
						t.Errorf("killed before call %d: %v", killAt, why)
					}
				}()
				_, _ = node.manager("first").resetGPU(t.Context(), Release{GPU: "GPU-a", PCIBusID: busID})
			}()
			node.killAt = 0
			left := slices.Clone(node.kept)
			node.run(t, "first")
			if on, err := node.Persistence(busID); !on || err != nil || len(node.kept) != 0 {
				t.Errorf("killed before call %d: persistence mode %t, %v, kept %v", killAt, on, err, node.kept)
			}
			must := node.SetPersistence(busID, false)
			node.kept, node.calls = left, nil
			node.run(t, "second")
			if must != nil || len(node.calls) != 0 {
				t.Errorf("after another boot: %v, %s", must, node.calls)
			}
		})
	}
}

// run is another run, of half a minute.
func (m *machine) run(t *testing.T, boot string) {
	t.Helper()
	manager := m.manager(boot)
	manager.Load(t.Context())
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	manager.keepPersistence(ctx)
}
