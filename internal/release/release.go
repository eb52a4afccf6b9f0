// Package release closes GPUs temporarily, so that they can be reset, or so that another program
// can change their MIG layouts or the driver. It resets them on request, and takes them back.
package release

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
)

// Release is a GPU that this program has closed temporarily, or is about to.
type Release struct {
	// GPU, Index and PCIBusID are as in sharing.GPU.
	GPU      string `json:"gpu"`
	Index    int    `json:"index"`
	PCIBusID string `json:"pciBusID"`
	// DriverIndex is the driver's index of the GPU, -1 while unknown.
	DriverIndex int `json:"driverIndex"`
	// Until is when the GPU is taken back, in whatever State.
	Until time.Time `json:"until"`
	State State     `json:"state"`
	// Waits describes the holders and other obstacles that a waiting release waits for.
	Waits []string `json:"waits,omitempty"`
	// Reset is true if this program resets the GPU and then takes it back.
	Reset bool `json:"reset,omitempty"`
	// Pause is true if the release is for another program and ends with that program's pause. Why
	// is the pause's Text.
	Pause bool   `json:"pause,omitempty"`
	Why   string `json:"why,omitempty"`
	// WasReset is true if this program has reset it. Problem is why it could not, or what failed
	// after the reset.
	WasReset bool   `json:"wasReset,omitempty"`
	Problem  string `json:"problem,omitempty"`
}

// State is how far a release is.
type State string

const (
	// Waiting means that pods, processes or this program still use the GPU.
	Waiting State = "waiting"
	// Released means that this program has nothing of the GPU open.
	Released State = "released"
	// Restored means that the release is over and the GPU taken back.
	Restored State = "restored"
)

// Releaser closes GPUs, by UUID, and takes them back; see nvml.Node.
type Releaser interface {
	Pause(gpus []string)
	Resume()
	KeepReleased(driverIndexes map[string]int)
	// OpensAll reports whether the driver opens all GPUs at once: none is read while one is released.
	// ClosedFor returns the released GPUs then.
	OpensAll() bool
	ClosedFor() []string
	Release(ctx context.Context, gpu string) (driverIndex int, err error)
	Restore(ctx context.Context, gpu string, wasReset bool) error
}

// Driver closes and resets GPUs, and records which ones are released. Without a Releaser no GPU can
// be released.
type Driver struct {
	Releaser Releaser
	// Store keeps the releases for a restart.
	Store interface {
		Load() ([]Release, error)
		Save(list []Release) error
	}
	// Reset resets the GPU with that PCI bus ID, which must not be open in any program. It returns
	// within minutes, and soon after ctx ends. If the GPU is open nevertheless, the error is
	// mig.ErrInUse. It is nil if resets are not allowed.
	Reset func(ctx context.Context, pciBusID string) error
	// Persistence is nil if the mode cannot be changed.
	Persistence *Persistence
}

// Devices are the devices of the device plugin.
type Devices interface {
	// Withdrawn reports whether no pod can get the units any more.
	Withdrawn(units ...string) bool
	// RefreshHolders causes the holders of the units to be read again soon.
	RefreshHolders(units ...string)
}

// Layouts are the changes of MIG layouts.
type Layouts interface {
	Status() []nodereport.GPULayout
	// Changing reports whether the GPU's partitions are being changed.
	Changing(gpu string) bool
}

// Options are a Manager's inputs and callbacks.
type Options struct {
	Driver
	Devices Devices
	Layouts Layouts
	// GPUs returns the GPUs of the last plan. Serving reports whether this program serves the node.
	GPUs    func() []sharing.GPU
	Serving func() bool
	// Users returns the pods and processes that use the GPU, or why they are unknown.
	Users func(ctx context.Context, gpu string) []string
	// Used reports whether pods or claims have devices of any GPU, or that is unknown.
	Used func(ctx context.Context) bool
	// OpenedBy names the programs that have the GPU open although none should, as the end of a
	// sentence; nil if that cannot be found out.
	OpenedBy func(ctx context.Context, gpu string) string
	// MPS reports whether virgate mps, or one of its daemons, may have the GPU or its partitions
	// open.
	MPS func(gpu string) bool
	// MIGReset reports whether the profile allows resetting GPUs whose MIG mode waits for a reset.
	MIGReset func() bool
	// Paused returns the current pause, and whether it is known.
	Paused func() (pause Pause, known bool)
	// Changed is called when List may have changed. It must not wait.
	Changed func()
	// Plan returns when a plan has been made with Reservations, or when ctx ends.
	Plan   func(ctx context.Context)
	Logger *slog.Logger
}

// Manager runs the releases. Each has a goroutine.
type Manager struct {
	Options
	mu   sync.Mutex
	gpus map[string]*release
	// unkept is the error of the last try to save the releases; nil if it succeeded.
	unkept error
	// inPause is true if the last check found a pause.
	inPause bool
	off     []PersistenceOff
	// wake has room for one signal to Run that there is a new release.
	wake wake.Signal
	// driver has the turns that takeDriver takes.
	driver *semaphore.Weighted
}

type release struct {
	Release
	// running is true once it has its goroutine, which wake signals changes to.
	running bool
	wake    wake.Signal
	// closing is true from the moment when nothing else may begin that needs a driver that opens all
	// GPUs at once.
	closing bool
	// stopRestoring cancels Restore while that runs; otherwise it is nil.
	stopRestoring context.CancelFunc
}

// New returns a Manager without releases.
func New(options Options) *Manager {
	return &Manager{
		Options: options,
		gpus:    map[string]*release{},
		wake:    wake.NewSignal(),
		driver:  semaphore.NewWeighted(turnToReset),
	}
}

// Wake makes Run check again for a pause, or for a GPU to reset. It does not wait.
func (m *Manager) Wake() { m.wake.Notify() }

func (m *Manager) paused() bool {
	pause, _ := m.Paused()
	return pause.Any()
}

// Load takes over the last run's releases. It is called before the driver is opened, and reports
// whether the driver must stay closed for a pause.
func (m *Manager) Load(ctx context.Context) (closed bool) {
	if m.Releaser == nil {
		return false
	}
	kept, err := m.Store.Load()
	if err != nil {
		m.Logger.Error("released GPUs of the last run not read", "error", err)
	}
	indexes := map[string]int{}
	pause, known := m.Paused()
	used := pause.Any() && m.Used(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.Persistence != nil {
		m.loadOff()
	}
	paused, over := pause.Any(), false
	for _, r := range kept {
		if r.Pause && known && !pause.Any() {
			over = true
			continue
		}
		paused = paused || r.Pause
		if r.Pause {
			r.Until = time.Now().Add(pauseLimit).Round(0)
		}
		if r.State == Released { // If it still waits, it may have holders: watch the GPU until they are gone.
			indexes[r.GPU] = r.DriverIndex
		}
		r.State, r.Reset = Waiting, r.Reset && m.Reset != nil
		m.gpus[r.GPU] = &release{Release: r, wake: wake.NewSignal()}
	}
	m.Releaser.KeepReleased(indexes)
	if over {
		m.keepLater() // So that no later run takes the pause for a continuing one.
	}
	return paused && m.pauseDriver(used)
}

// Run runs the releases until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	if m.Persistence != nil {
		group.Go(func() { m.keepPersistence(ctx) })
	}
	for {
		again := m.followPause(ctx)
		m.mu.Lock()
		if m.unkept != nil {
			_ = m.keep()
		}
		unkept := m.unkept != nil
		for _, r := range m.gpus {
			if !r.running {
				r.running = true
				group.Go(func() { m.run(ctx, r) })
			}
		}
		m.mu.Unlock()
		var later <-chan time.Time
		switch {
		case again:
			later = time.After(lookInterval)
		case m.resetForMIG(ctx), unkept:
			later = time.After(migResetInterval)
		}
		select {
		case <-later:
		case <-m.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// List returns all releases of this run, by index.
func (m *Manager) List() []Release {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := []Release{}
	for _, r := range m.gpus {
		list = append(list, r.Release)
	}
	slices.SortFunc(list, func(x, y Release) int { return x.Index - y.Index })
	return list
}

// Reservations keep the released GPUs from being offered.
func (m *Manager) Reservations() (list []units.Reservation) {
	for _, r := range m.List() {
		switch {
		case r.State == Restored:
		case r.Pause:
			list = append(list, units.Reservation{
				Purpose: units.Pause,
				GPU:     r.GPU,
				Text:    cmp.Or(r.Why, unknownPause),
			})
		default:
			text := fmt.Sprintf("GPU %d (%s) "+nodereport.ReleasedUntil+"%s, or until virgate gpu restore",
				r.Index, r.GPU, r.Until.UTC().Format("15:04 MST"))
			list = append(list, units.Reservation{
				Purpose: units.Release,
				GPU:     r.GPU,
				Text:    text,
			})
		}
	}
	return list
}

// Released returns the GPUs that must not be offered.
func (m *Manager) Released() map[string]bool {
	gpus := map[string]bool{}
	for _, r := range m.Reservations() {
		gpus[r.GPU] = true
	}
	return gpus
}

// keep saves the releases for a restart. It requires the lock.
func (m *Manager) keep() error {
	kept := []Release{}
	for _, gpu := range slices.Sorted(maps.Keys(m.gpus)) {
		if k := m.gpus[gpu].Release; k.State != Restored {
			kept = append(kept, k)
		}
	}
	m.unkept = m.Store.Save(kept)
	if m.unkept != nil {
		return fmt.Errorf("keep the release for a restart: %w", m.unkept)
	}
	return nil
}

// keepLater calls keep, and lets Run repeat it if it fails. It requires the lock.
func (m *Manager) keepLater() {
	before := m.unkept
	if err := m.keep(); err != nil && before == nil {
		m.Logger.Error("releases not kept for a restart, it is tried again", "error", m.unkept)
	}
	if m.unkept != nil {
		m.wake.Notify()
	}
}

// set changes a release from its goroutine.
func (m *Manager) set(r *release, change func(*Release)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := r.Release
	if change(&r.Release); reflect.DeepEqual(before, r.Release) {
		return
	}
	m.Changed()
	m.keepLater()
}

// Withdrawing is what a release waits for when no pod has the GPU.
const Withdrawing = "its devices to be withdrawn"

// HoldersUnknown begins what a release waits for when the kubelet does not say what pods hold.
const HoldersUnknown = "what pods hold cannot be read"

// lookInterval is the interval at which a release checks what it waits for.
const lookInterval = 500 * time.Millisecond

// tryPause returns the pause before this program tries again to close the GPU: each try may keep it
// from watching the others for a while.
func tryPause(failures int) time.Duration { return lookInterval << min(failures, 7) }

// run withdraws the GPU, closes it, resets it if requested, and takes it back when its time is
// over.
func (m *Manager) run(ctx context.Context, r *release) {
	log := m.Logger.With("gpu", r.GPU, "index", r.Index)
	log.Info("GPU is being released", "until", r.Until)
	m.Plan(ctx)
	for failures := 0; ; {
		m.mu.Lock()
		now := r.Release
		m.mu.Unlock()
		pause := time.Until(now.Until)
		if m.paused() {
			pause = max(pause, lookInterval)
		}
		switch {
		case ctx.Err() != nil:
			return
		case pause <= 0:
			// It is opened from now on, so a request for it has to wait meanwhile.
			m.set(r, func(r *Release) { r.State, r.Waits = Waiting, nil })
			m.setClosing(r, false)
			err := m.restoreGPU(ctx, r, now)
			if ctx.Err() != nil {
				return
			}
			again := true
			m.set(r, func(r *Release) {
				switch {
				case err != nil: // A pause has begun.
				case time.Until(r.Until) > 0 || m.paused():
					r.WasReset, r.Problem = false, ""
				default:
					r.State, again = Restored, false
					r.Waits = nil
				}
			})
			if again {
				continue
			}
			m.Plan(ctx)
			log.Info("GPU taken back")
			return
		case now.State == Waiting:
			next := lookInterval
			index, waits := now.DriverIndex, m.waits(ctx, now.GPU)
			m.setClosing(r, len(waits) == 0)
			if len(waits) == 0 {
				waits = m.changesElsewhere(now.GPU)
			}
			if len(waits) == 0 {
				var err error
				index, err = m.Releaser.Release(ctx, now.GPU)
				if err != nil {
					m.setClosing(r, false)
					waits = []string{err.Error()}
					failures++
					next = tryPause(failures)
				}
			}
			pause = min(pause, next)
			switch {
			case len(waits) == 0:
				now.State = Released
				pause = 0
				failures = 0
				log.Info("GPU released, nvidia-smi --gpu-reset can run", "pci", now.PCIBusID)
			case !slices.Equal(waits, now.Waits):
				log.Info("GPU not released yet", "waits", waits)
			}
			m.set(r, func(r *Release) {
				r.State = now.State
				r.DriverIndex = index
				r.Waits = waits
			})
		case now.Reset && !m.paused():
			end := m.takeDriverForReset(ctx)
			m.mu.Lock()
			over := time.Until(r.Until) <= 0 // The release may have ended during the wait.
			m.mu.Unlock()
			if over || m.paused() || ctx.Err() != nil {
				end()
				continue
			}
			wasReset, err := m.resetGPU(ctx, now)
			end()
			if !wasReset && err != nil && ctx.Err() != nil {
				return // The next run resets it.
			}
			pause = 0
			if !wasReset {
				log.Error("GPU not reset", "error", err)
			} else if log.Info("GPU reset"); err != nil {
				log.Error("GPU reset, and its persistence mode not turned on", "error", err)
			}
			m.set(r, func(r *Release) {
				r.Reset = false
				r.WasReset = wasReset
				r.Problem = message(err)
				r.Until = time.Now()
			})
		}
		select {
		case <-time.After(pause):
		case <-r.wake:
		case <-ctx.Done():
		}
	}
}

// restoreGPU takes the GPU back. It fails when ctx ends or a pause begins: without a driver, the
// GPU cannot be taken back.
func (m *Manager) restoreGPU(ctx context.Context, r *release, now Release) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	m.mu.Lock()
	r.stopRestoring = stop
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		r.stopRestoring = nil
		m.mu.Unlock()
	}()
	if m.paused() {
		return context.Canceled
	}
	end, err := m.takeDriver(ctx, turnToRestore, func() {
		m.set(r, func(r *Release) { r.Waits = []string{"the reset of another GPU"} })
	})
	if err != nil {
		return err
	}
	defer end()
	return m.Releaser.Restore(ctx, now.GPU, now.WasReset)
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// waits returns what the release waits for; nothing once this program can close the GPU.
func (m *Manager) waits(ctx context.Context, gpu string) []string {
	waits, units := m.Users(ctx, gpu), sharing.UnitsOf(m.GPUs(), gpu)
	if m.Layouts.Changing(gpu) {
		waits = append(waits, "its MIG layout is being changed")
	}
	if m.MPS(gpu) {
		waits = append(waits, "virgate mps, which has its daemon or may open it")
	}
	if !m.Devices.Withdrawn(units...) {
		m.Devices.RefreshHolders(units...) // A holder without a name may be gone.
		if waits == nil {
			waits = []string{Withdrawing}
		}
	}
	return waits
}

// put returns the GPU's release under way, or a new one. It requires the lock.
func (m *Manager) put(gpu sharing.GPU) *release {
	r := m.gpus[gpu.UUID]
	if r == nil || r.State == Restored {
		r = &release{
			Release: Release{
				GPU:         gpu.UUID,
				Index:       gpu.Index,
				PCIBusID:    gpu.PCIBusID,
				DriverIndex: -1,
				State:       Waiting,
			},
			wake: wake.NewSignal(),
		}
		m.gpus[gpu.UUID] = r
	}
	return r
}

const (
	// migResetInterval is how often Virgate checks whether a GPU can be reset for its MIG mode,
	// migResetTime how long its release may take, and migResetPause how long after a failure no
	// other reset is tried.
	migResetInterval = 5 * time.Second
	migResetTime     = time.Minute
	migResetPause    = 10 * time.Minute
)

// resetForMIG begins to reset an unused GPU whose MIG mode waits for a reset, if the profile has
// mig.reset. It reports whether any GPU waits for a reset. Only one goes first: what keeps the
// driver from resetting one may keep it from resetting all.
func (m *Manager) resetForMIG(ctx context.Context) bool {
	if m.Reset == nil || !m.MIGReset() || m.paused() {
		return false
	}
	waiting, now := migResets(m.Layouts.Status(), m.List(), time.Now())
	for _, gpu := range now {
		selector, err := sharing.ParseSelector(gpu)
		if err != nil || len(m.Users(ctx, gpu)) > 0 {
			continue
		}
		if _, err := m.begin(selector, migResetTime, true); err != nil {
			m.Logger.Error("GPU not reset for its MIG mode", "gpu", gpu, "error", err)
		}
		break
	}
	return waiting
}

// migResets returns the GPUs of which one may be reset now for its MIG mode. waiting is true if
// there are such GPUs, now or later.
func migResets(layouts []nodereport.GPULayout, releases []Release, now time.Time) (waiting bool, gpus []string) {
	for _, l := range layouts {
		if l.State == nodereport.LayoutResetRequired && l.Resettable {
			gpus = append(gpus, l.GPU)
		}
	}
	waiting = len(gpus) > 0
	for _, r := range releases {
		if r.State != Restored || now.Sub(r.Until) < migResetPause &&
			(r.Problem != "" || slices.Contains(gpus, r.GPU)) {
			return waiting, nil
		}
	}
	return waiting, gpus
}
