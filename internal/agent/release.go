package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/internal/web"
	"github.com/virgate/virgate/sharing"
)

// Release is a GPU that this program has closed for a while, or is about to, so that it can
// be reset.
type Release struct {
	// GPU, Index and PCIBusID are those of sharing.GPU.
	GPU      string `json:"gpu"`
	Index    int    `json:"index"`
	PCIBusID string `json:"pciBusID"`
	// DriverIndex is the driver's index of the GPU, -1 while unknown.
	DriverIndex int `json:"driverIndex"`
	// Until is when the GPU is taken back, whatever State then is.
	Until time.Time    `json:"until"`
	State ReleaseState `json:"state"`
	// Waits are the holders and whatever else a waiting release waits for, as text.
	Waits []string `json:"waits,omitempty"`
	// Reset says that this program is to reset the GPU, and then to take it back.
	Reset bool `json:"reset,omitempty"`
	// Pause says that it is there for another program to change MIG layouts, and ends with that.
	Pause bool `json:"pause,omitempty"`
	// WasReset says that it did, Problem why it could not.
	WasReset bool   `json:"wasReset,omitempty"`
	Problem  string `json:"problem,omitempty"`
}

// ReleaseState is how far a release is.
type ReleaseState string

const (
	// ReleaseWaiting says that pods, processes or this program still have the GPU.
	ReleaseWaiting ReleaseState = "waiting"
	// Released says that this program has nothing of the GPU open.
	Released ReleaseState = "released"
	// Restored says that the release is over and the GPU taken back.
	Restored ReleaseState = "restored"
)

// Releaser closes GPUs, by UUID, and takes them back; see nvml.Node.
type Releaser interface {
	KeepReleased(driverIndexes map[string]int)
	Release(ctx context.Context, gpu string) (driverIndex int, err error)
	Restore(ctx context.Context, gpu string, wasReset bool) error
}

// ReleaseOptions are what releases need.
type ReleaseOptions struct {
	Releaser Releaser
	// Store keeps the releases for a restart.
	Store interface {
		Load() ([]Release, error)
		Save(list []Release) error
	}
	// Processes are the IDs of the processes that the driver lists on the GPU; none where it
	// cannot tell.
	Processes func(ctx context.Context, gpu string) []int
	// Reset resets the GPU with that PCI bus ID, which nobody has open; nil where that is
	// not allowed.
	Reset func(ctx context.Context, pciBusID string) error
}

// releases are those of this run, by GPU. Each has a goroutine.
type releases struct {
	mu   sync.Mutex
	gpus map[string]*release
	// begun has room to tell releaseLoop that there is a new one.
	begun chan struct{}
}

type release struct {
	Release
	// running says that it has its goroutine, and wake tells that of a change.
	running bool
	wake    chan struct{}
}

// loadReleases takes over the last run's releases. It is called before the driver is opened.
func (a *agent) loadReleases() {
	if a.Releases.Releaser == nil {
		return
	}
	kept, err := a.Releases.Store.Load()
	if err != nil {
		a.Logger.Error("released GPUs of the last run not read", "error", err)
	}
	indexes := map[string]int{}
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	for _, r := range kept {
		if now := a.pauseNow(); r.Pause && now.known && !now.paused {
			continue
		}
		if r.State == Released { // One that still waits may have holders: the GPU is watched until they are gone.
			indexes[r.GPU] = r.DriverIndex
		}
		r.State, r.Reset = ReleaseWaiting, r.Reset && a.Releases.Reset != nil
		a.releases.gpus[r.GPU] = &release{Release: r, wake: make(chan struct{}, 1)}
	}
	a.Releases.Releaser.KeepReleased(indexes)
}

// releaseLoop runs the releases until ctx ends.
func (a *agent) releaseLoop(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	for {
		a.followPause()
		a.releases.mu.Lock()
		for _, r := range a.releases.gpus {
			if !r.running {
				r.running = true
				group.Go(func() { a.runRelease(ctx, r) })
			}
		}
		a.releases.mu.Unlock()
		var later <-chan time.Time
		if a.resetForMIG(ctx) {
			later = time.After(migResetInterval)
		}
		select {
		case <-later:
		case <-a.releases.begun:
		case <-ctx.Done():
			return nil
		}
	}
}

// listReleases are all releases of this run, by index.
func (a *agent) listReleases() []Release {
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	list := []Release{}
	for _, r := range a.releases.gpus {
		list = append(list, r.Release)
	}
	slices.SortFunc(list, func(x, y Release) int { return x.Index - y.Index })
	return list
}

// releaseReservations keep the released GPUs from being offered.
func (a *agent) releaseReservations() (list []units.Reservation) {
	for _, r := range a.listReleases() {
		switch {
		case r.State == Restored:
		case r.Pause:
			list = append(list, units.Reservation{Purpose: units.Pause, GPU: r.GPU, Text: pausedText})
		default:
			list = append(list, units.Reservation{Purpose: units.Release, GPU: r.GPU, Text: fmt.Sprintf(
				"GPU %d (%s) is not offered: it is released until %s, or until virgate gpu restore", r.Index, r.GPU, r.Until.UTC().Format("15:04 MST"))})
		}
	}
	return list
}

// released are the GPUs that are not to be offered.
func (a *agent) released() map[string]bool {
	gpus := map[string]bool{}
	for _, r := range a.releaseReservations() {
		gpus[r.GPU] = true
	}
	return gpus
}

// keep saves the releases for a restart. It must be called with the lock.
func (r *releases) keep(store interface{ Save([]Release) error }) error {
	kept := []Release{}
	for _, gpu := range slices.Sorted(maps.Keys(r.gpus)) {
		if k := r.gpus[gpu].Release; k.State != Restored {
			kept = append(kept, k)
		}
	}
	if err := store.Save(kept); err != nil {
		return fmt.Errorf("keep the release for a restart: %w", err)
	}
	return nil
}

// setRelease changes a release from its goroutine.
func (a *agent) setRelease(r *release, change func(*Release)) {
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	before := r.Release
	if change(&r.Release); reflect.DeepEqual(before, r.Release) {
		return
	}
	if err := a.releases.keep(a.Releases.Store); err != nil {
		a.Logger.Error("release changed", "error", err)
	}
}

// notify tells whoever waits, without waiting.
func notify(wake chan<- struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// ReleaseWithdrawing is what a release waits for when no pod has the GPU.
const ReleaseWithdrawing = "its devices to be withdrawn"

const (
	// releaseInterval is the time between two looks at what a release waits for.
	releaseInterval = 500 * time.Millisecond
	// resetLimit is how long a reset may take, resetGrace how long it may then take to end.
	resetLimit = 5 * time.Minute
	resetGrace = 300 * time.Millisecond
)

// releasePause is the time after which this program tries again to let go of a GPU: each
// try may keep it from watching the others for a while.
func releasePause(failures int) time.Duration { return releaseInterval << min(failures, 7) }

// abandonable calls what runs nvidia-smi. What waits in the kernel cannot be killed, and is
// abandoned.
func abandonable(ctx context.Context, limit time.Duration, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(resetGrace):
		return fmt.Errorf("abandoned %s, which does not end: %w", what, ctx.Err())
	}
}

// runRelease withdraws the GPU, lets go of it, resets it if that is wanted, and takes it
// back when its time is over.
func (a *agent) runRelease(ctx context.Context, r *release) {
	log := a.Logger.With("gpu", r.GPU, "index", r.Index)
	log.Info("GPU is being released", "until", r.Until)
	a.planNow(ctx)
	for failures := 0; ; {
		a.releases.mu.Lock()
		now := r.Release
		a.releases.mu.Unlock()
		pause := time.Until(now.Until)
		if a.pauseNow().paused {
			pause = max(pause, releaseInterval)
		}
		switch {
		case ctx.Err() != nil:
			return
		case pause <= 0:
			// It is opened from now on, so whoever asks for it meanwhile has to wait.
			a.setRelease(r, func(r *Release) { r.State, r.Waits = ReleaseWaiting, nil })
			if a.Releases.Releaser.Restore(ctx, now.GPU, now.WasReset) != nil {
				return
			}
			again := false
			a.setRelease(r, func(r *Release) {
				if again = time.Until(r.Until) > 0 || a.pauseNow().paused; again {
					r.WasReset, r.Problem = false, ""
				} else {
					r.State = Restored
				}
			})
			if again {
				continue
			}
			a.planNow(ctx)
			log.Info("GPU taken back")
			return
		case now.State == ReleaseWaiting:
			next := releaseInterval
			index, waits := now.DriverIndex, a.waitsOfRelease(ctx, now.GPU)
			if len(waits) == 0 {
				var err error
				if index, err = a.Releases.Releaser.Release(ctx, now.GPU); err != nil {
					waits = []string{err.Error()}
					failures++
					next = releasePause(failures)
				}
			}
			pause = min(pause, next)
			switch {
			case len(waits) == 0:
				now.State, pause, failures = Released, 0, 0
				log.Info("GPU released, nvidia-smi --gpu-reset can run", "pci", now.PCIBusID)
			case !slices.Equal(waits, now.Waits):
				log.Info("GPU not released yet", "waits", waits)
			}
			a.setRelease(r, func(r *Release) { r.State, r.DriverIndex, r.Waits = now.State, index, waits })
		case now.Reset:
			err := abandonable(ctx, resetLimit, "the reset", func(ctx context.Context) error { return a.Releases.Reset(ctx, now.PCIBusID) })
			if err != nil && ctx.Err() != nil {
				return // The next run resets it.
			}
			pause = 0
			if err != nil {
				log.Error("GPU not reset", "error", err)
			} else {
				log.Info("GPU reset")
			}
			a.setRelease(r, func(r *Release) {
				r.Reset, r.WasReset, r.Problem, r.Until = false, err == nil, message(err), time.Now()
			})
		}
		select {
		case <-time.After(pause):
		case <-r.wake:
		case <-ctx.Done():
		}
	}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// unitsOf are the units of the GPU.
func (a *agent) unitsOf(gpu string) []string {
	units := []string{gpu}
	for _, g := range a.state.Load().gpus {
		if g.UUID == gpu {
			for _, p := range g.Partitions {
				units = append(units, p.UUID)
			}
		}
	}
	return units
}

// usersOf are the pods and processes that use the GPU, or why that is not known.
func (a *agent) usersOf(ctx context.Context, gpu string) (waits []string) {
	s, units := a.state.Load(), a.unitsOf(gpu)
	held, err := a.Kubelet.Held(ctx)
	if err != nil {
		return []string{"what pods hold cannot be read: " + err.Error()}
	}
	waits = podsByUnit(s.gpus, held)[gpu]
	holders := sharing.HoldersByUnit(held)
	if slices.ContainsFunc(units, func(unit string) bool {
		return slices.ContainsFunc(holders[unit], func(a sharing.Allocation) bool { return !a.Certain() })
	}) {
		a.Plugin.RefreshHolders(units...) // It may be gone.
		waits = append(waits, sharing.UnnamedHolder)
	}
	waits = append(waits, a.dra.Users(s.gpus, gpu, held)...)
	for _, pid := range a.Releases.Processes(ctx, gpu) {
		waits = append(waits, fmt.Sprintf("process %d", pid))
	}
	return waits
}

// waitsOfRelease says what the release waits for; nothing when this program can close the GPU.
func (a *agent) waitsOfRelease(ctx context.Context, gpu string) []string {
	waits, units := a.usersOf(ctx, gpu), a.unitsOf(gpu)
	if a.mig.Changing(gpu) {
		waits = append(waits, "its MIG layout is being changed")
	}
	if !a.Plugin.Withdrawn(units...) {
		a.Plugin.RefreshHolders(units...) // One that the kubelet does not name may be gone.
		if waits == nil {
			waits = []string{ReleaseWithdrawing}
		}
	}
	return waits
}

// maxRelease is the longest time of a release, so that a forgotten GPU comes back.
const maxRelease = 24 * time.Hour

// beginRelease releases the GPU that the selector names for that long. A release that is
// under way gets the new time, counted from now.
func (a *agent) beginRelease(selector sharing.Selector, length time.Duration, reset bool) (Release, error) {
	gpu, err := a.selectGPU(selector)
	switch {
	case err != nil:
		return Release{}, err
	case reset && a.Releases.Reset == nil:
		return Release{}, errors.New(decide.MayNotReset)
	case length <= 0 || length > maxRelease:
		return Release{}, fmt.Errorf("for: %s is not more than 0 and at most %s", length, maxRelease)
	}
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	return a.addRelease(gpu, func(r *Release) {
		r.Until, r.Reset = time.Now().Add(length).Round(0), r.Reset || reset
	})
}

// addRelease begins a release, or changes one that is under way. It must be called with the
// lock of releases.
func (a *agent) addRelease(gpu sharing.GPU, change func(*Release)) (Release, error) {
	before := maps.Clone(a.releases.gpus)
	r := before[gpu.UUID]
	if r == nil || r.State == Restored {
		r = &release{
			Release: Release{GPU: gpu.UUID, Index: gpu.Index, PCIBusID: gpu.PCIBusID, DriverIndex: -1, State: ReleaseWaiting},
			wake:    make(chan struct{}, 1),
		}
		a.releases.gpus[gpu.UUID] = r
	}
	last := r.Release
	change(&r.Release)
	if err := a.releases.keep(a.Releases.Store); err != nil {
		r.Release, a.releases.gpus = last, before
		return Release{}, err
	}
	notify(r.wake)
	notify(a.releases.begun)
	return r.Release, nil
}

const (
	// migResetInterval is the time between two looks at whether a GPU can be reset for its
	// MIG mode, migResetTime how long its release may take, and migResetPause how long after
	// a failure no other reset is tried.
	migResetInterval = 5 * time.Second
	migResetTime     = time.Minute
	migResetPause    = 10 * time.Minute
)

// resetForMIG begins to reset a GPU that nobody uses and whose MIG mode waits for a reset,
// where the profile has mig.reset. It says whether any GPU waits for that. One goes first:
// what keeps the driver from resetting one may keep it from resetting all.
func (a *agent) resetForMIG(ctx context.Context) bool {
	s := a.state.Load()
	if a.Releases.Reset == nil || s.profile == nil || !s.profile.Profile.MIG.Reset {
		return false
	}
	waiting, now := migResets(a.mig.Status(), a.listReleases(), time.Now())
	for _, gpu := range now {
		selector, err := sharing.ParseSelector(gpu)
		if err != nil || len(a.usersOf(ctx, gpu)) > 0 {
			continue
		}
		if _, err := a.beginRelease(selector, migResetTime, true); err != nil {
			a.Logger.Error("GPU not reset for its MIG mode", "gpu", gpu, "error", err)
		}
		break
	}
	return waiting
}

// migResets are the GPUs of which one may be reset now for its MIG mode. Waiting says that
// there are such GPUs, now or later.
func migResets(layouts []nodereport.GPULayout, releases []Release, now time.Time) (waiting bool, gpus []string) {
	for _, l := range layouts {
		if l.State == nodereport.LayoutResetRequired && l.Resettable {
			gpus = append(gpus, l.GPU)
		}
	}
	waiting = len(gpus) > 0
	for _, r := range releases {
		if r.State != Restored || now.Sub(r.Until) < migResetPause && (r.Problem != "" || slices.Contains(gpus, r.GPU)) {
			return waiting, nil
		}
	}
	return waiting, gpus
}

// pause is what is known of Options.Paused.
type pause struct{ paused, known bool }

func (a *agent) pauseNow() (p pause) {
	if a.Paused == nil {
		return pause{known: true}
	}
	p.paused, p.known = a.Paused()
	return p
}

// logPause says when a pause begins and ends.
func logPause(log *slog.Logger, last, next pause) {
	switch {
	case next.paused && !last.paused:
		log.Warn("mig-manager pauses this program by a label of the Node")
	case last.paused && !next.paused && next.known:
		log.Info("mig-manager no longer pauses this program")
	}
}

const (
	// pausedText says why nothing is offered then.
	pausedText = "no GPU is offered while mig-manager changes MIG layouts: the Node's label nvidia.com/gpu.deploy.device-plugin is paused-for-mig-change"
	// pauseLimit is how long GPUs stay closed for that after a restart while it is not known
	// whether it is over.
	pauseLimit = time.Hour
)

// followPause releases all GPUs during a pause, and takes them back after it. No release ends
// meanwhile.
func (a *agent) followPause() {
	now := a.pauseNow()
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	for _, gpu := range a.state.Load().gpus {
		if r := a.releases.gpus[gpu.UUID]; !now.paused || gpu.DriverIndex == sharing.NotListed || r != nil && r.State != Restored {
			continue
		}
		_, err := a.addRelease(gpu, func(r *Release) { r.Pause, r.Until = true, time.Now().Add(pauseLimit).Round(0) })
		if err != nil {
			a.Logger.Error("GPU not released for a change of MIG layouts", "gpu", gpu.UUID, "error", err)
		}
	}
	for _, r := range a.releases.gpus {
		if r.Pause && r.State != Restored && now.known && !now.paused {
			r.Until = time.Now()
			notify(r.wake)
		}
	}
}

// selectGPU is the GPU that the selector names.
func (a *agent) selectGPU(selector sharing.Selector) (sharing.GPU, error) {
	if !a.serving.Load() {
		return sharing.GPU{}, errors.New("this Virgate does not serve the node: ask the one that does")
	}
	for _, gpu := range a.state.Load().gpus {
		if selector.MatchGPU(gpu) {
			return gpu, nil
		}
		for _, p := range gpu.Partitions {
			if selector.MatchPartition(gpu, p) {
				return sharing.GPU{}, fmt.Errorf("%s is a partition: only a GPU as a whole can be released, which is %d", selector, gpu.Index)
			}
		}
	}
	return sharing.GPU{}, fmt.Errorf("no such GPU: %s", selector)
}

// restoreNow ends the release of the GPU that the selector names.
func (a *agent) restoreNow(selector sharing.Selector) (Release, error) {
	gpu, err := a.selectGPU(selector)
	if err != nil {
		return Release{}, err
	}
	a.releases.mu.Lock()
	defer a.releases.mu.Unlock()
	r := a.releases.gpus[gpu.UUID]
	switch {
	case r == nil || r.State == Restored:
		return Release{}, fmt.Errorf("GPU %d is not released", gpu.Index)
	case a.pauseNow().paused:
		return Release{}, errors.New(pausedText)
	}
	r.Until = time.Now()
	notify(r.wake)
	return r.Release, nil
}

// releaseHandler answers GET /gpu with the releases of this run, as a list in JSON, and
// POST /gpu/release, /gpu/reset, both with gpu=SELECTOR and for=DURATION, and
// /gpu/restore with gpu=SELECTOR, with the Release. It is for the control socket.
func (a *agent) releaseHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /gpu", func(w http.ResponseWriter, _ *http.Request) { web.WriteJSON(w, a.listReleases()) })
	mux.HandleFunc("POST /gpu/{verb}", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, web.MaxControlBody)
		selector, err := sharing.ParseSelector(r.FormValue("gpu"))
		if err != nil {
			err = fmt.Errorf("gpu: %w", err)
		}
		var answer Release
		switch verb := r.PathValue("verb"); {
		case err != nil:
		case verb == "restore":
			answer, err = a.restoreNow(selector)
		case verb == "release" || verb == "reset":
			var length time.Duration
			if length, err = time.ParseDuration(r.FormValue("for")); err != nil {
				err = fmt.Errorf("for: expected a time such as 10m (got %q)", r.FormValue("for"))
			} else {
				answer, err = a.beginRelease(selector, length, verb == "reset")
			}
		default:
			http.NotFound(w, r)
			return
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		web.WriteJSON(w, answer)
	})
	return mux
}
