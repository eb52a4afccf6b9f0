package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// ChangedGPU is what this program has set of a GPU, or was about to, so that a later run can
// undo it.
type ChangedGPU struct {
	GPU string `json:"gpu"`
	// TimeSlice says that the time slice may not be the driver's default.
	TimeSlice bool `json:"timeSlice,omitempty"`
	// ComputeMode is what was set, Before what was before; both empty for nothing.
	ComputeMode sharing.ComputeMode `json:"computeMode,omitempty"`
	Before      sharing.ComputeMode `json:"before,omitempty"`
}

// DriverSettings sets what the driver has for whole GPUs, by UUID. Store is nil where nothing
// can be set.
type DriverSettings struct {
	Store interface {
		Load() ([]ChangedGPU, error)
		Save(list []ChangedGPU) error
	}
	// ComputeMode returns the mode, and what is another number when settings were lost because
	// the driver was loaded again. SetComputeMode's error for a lack of permission is
	// mig.ErrNoPermission.
	ComputeMode    func(ctx context.Context, gpu string) (mode sharing.ComputeMode, binding uint64, err error)
	SetComputeMode func(ctx context.Context, gpu string, mode sharing.ComputeMode) error
	// SetTimeSlice runs nvidia-smi: the driver tells nobody else which one is set. Nil for a
	// recording.
	SetTimeSlice func(ctx context.Context, gpu string, slice sharing.TimeSlice) error
}

const (
	// settingsInterval is the time between two looks at whether the driver still has what was set,
	// settingsPause the longest one after failures, settingLimit how long nvidia-smi may take.
	settingsInterval = 30 * time.Second
	settingsPause    = 10 * time.Minute
	settingLimit     = 30 * time.Second
)

// gpuSettings are what is set, and what became of it. Its loop has all but list and wake.
type gpuSettings struct {
	wake chan struct{}
	// list has the results by GPU. It is not changed once it is here.
	list atomic.Pointer[map[string][]status.GPUSetting]
	// looked says that list has what is still to be undone of an earlier run.
	looked atomic.Bool

	changed map[string]ChangedGPU
	slices  map[string]setSlice
	failed  map[string]failedSetting
}

// setSlice is a time slice that this run has set.
type setSlice struct {
	slice   sharing.TimeSlice
	binding uint64
}

// failedSetting says when what is wanted is tried again.
type failedSetting struct {
	wanted sharing.DriverSettings
	pause  time.Duration
	next   time.Time
}

// settingsLoop keeps the driver's settings as the profile wants them until ctx ends. Without
// a successor it then undoes them.
func (a *agent) settingsLoop(ctx context.Context) error {
	g := &a.gpuSettings
	kept, err := a.DriverSettings.Store.Load()
	if err != nil {
		a.Logger.Error("settings of GPUs of the last run not read, and not undone", "error", err)
	}
	for _, c := range kept {
		g.changed[c.GPU] = c
	}
	for {
		s := a.state.Load()
		if s.planned && s.unread == nil {
			a.settle(ctx, s, wantedSettings(s.plan))
			g.looked.Store(true)
			notify(a.mps.wake)
		}
		select {
		case <-g.wake:
		case <-time.After(a.settingsPause()):
		case <-ctx.Done():
			if a.DrainTimeout > 0 {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.DrainTimeout)
				defer cancel()
				a.settle(ctx, a.state.Load(), nil)
			}
			return nil
		}
	}
}

func (a *agent) settingsPause() time.Duration {
	for _, list := range *a.gpuSettings.list.Load() {
		if slices.ContainsFunc(list, func(s status.GPUSetting) bool { return s.State == status.SettingWaiting }) {
			return releaseInterval
		}
	}
	return settingsInterval
}

func wantedSettings(plan sharing.Plan) map[string]sharing.DriverSettings {
	wanted := map[string]sharing.DriverSettings{}
	for _, r := range plan.Resources {
		for _, u := range r.Units {
			wanted[u.ID] = u.Driver
		}
	}
	return wanted
}

// settle sets what is wanted, by GPU, and undoes what was set and is not wanted any more.
func (a *agent) settle(ctx context.Context, s *state, wanted map[string]sharing.DriverSettings) {
	g := &a.gpuSettings
	released := a.released()
	last, next := *g.list.Load(), map[string][]status.GPUSetting{}
	for _, gpu := range s.gpus {
		id, want := gpu.UUID, wanted[gpu.UUID]
		failure := g.failed[id]
		var list []status.GPUSetting
		switch {
		case want == (sharing.DriverSettings{}) && g.changed[id] == (ChangedGPU{}):
			delete(g.slices, id)
		case released[id] || gpu.MIG || gpu.DriverIndex != "" || !gpu.Health.Healthy() || a.mig.Changing(id) || a.mps.view.Load().Busy[id]:
			// It may be reset meanwhile, and what was set be lost; and an MPS daemon has its own mode.
			delete(g.slices, id)
			delete(g.failed, id)
			list = eachSetting(want, status.GPUSetting{State: status.SettingWaiting, Reason: "the GPU is released, faulty, partitioned or still shared by MPS"})
		case failure.wanted == want && time.Now().Before(failure.next):
			list = last[id]
		default:
			list = a.settleGPU(ctx, id, want)
			if ctx.Err() != nil {
				return
			}
			delete(g.failed, id)
			if slices.ContainsFunc(list, func(s status.GPUSetting) bool { return s.State == status.SettingFailed }) {
				pause := settingsInterval
				if failure.wanted == want {
					pause = min(max(pause, 2*failure.pause), settingsPause)
				}
				g.failed[id] = failedSetting{wanted: want, pause: pause, next: time.Now().Add(pause)}
			}
		}
		if list != nil {
			next[id] = list
		}
		for _, setting := range list {
			if !slices.Contains(last[id], setting) {
				a.Logger.Info("setting of a GPU", "gpu", id, "index", gpu.Index, "setting", setting.Setting, "value", setting.Value, "state", setting.State, "reason", setting.Reason)
			}
		}
	}
	if !maps.EqualFunc(last, next, slices.Equal[[]status.GPUSetting]) {
		g.list.Store(&next)
		a.requestPlan() // For the plan's warnings.
	}
}

// eachSetting is what became of both settings, as far as they are wanted.
func eachSetting(want sharing.DriverSettings, result status.GPUSetting) (list []status.GPUSetting) {
	for _, s := range []status.GPUSetting{{Setting: "timeSlice", Value: string(want.TimeSlice)}, {Setting: "computeMode", Value: string(want.ComputeMode)}} {
		if s.Value != "" {
			s.State, s.Reason = result.State, result.Reason
			list = append(list, s)
		}
	}
	return list
}

func (a *agent) settleGPU(ctx context.Context, gpu string, want sharing.DriverSettings) []status.GPUSetting {
	g := &a.gpuSettings
	mode, binding, err := a.DriverSettings.ComputeMode(ctx, gpu)
	changed := g.changed[gpu]
	undone := want // With what is to be as it was before.
	if changed.TimeSlice {
		undone.TimeSlice = cmp.Or(want.TimeSlice, sharing.DefaultTimeSlice)
	}
	if mode == changed.ComputeMode { // Another one is somebody else's, or was lost.
		undone.ComputeMode = cmp.Or(want.ComputeMode, changed.Before)
	}
	if err != nil {
		return eachSetting(undone, status.GPUSetting{State: status.SettingFailed, Reason: "the driver does not tell how it is set: " + err.Error()})
	}
	slice := eachSetting(sharing.DriverSettings{TimeSlice: undone.TimeSlice}, a.setTimeSlice(ctx, gpu, undone.TimeSlice, binding))
	computeMode := eachSetting(sharing.DriverSettings{ComputeMode: undone.ComputeMode}, a.setComputeMode(ctx, gpu, undone.ComputeMode, mode))
	// What was undone is no setting of the profile, and not told any more.
	done := func(list []status.GPUSetting) bool { return len(list) == 0 || list[0].State == status.SettingApplied }
	changed = g.changed[gpu]
	if want.TimeSlice == "" && done(slice) {
		slice, changed.TimeSlice = nil, false
		delete(g.slices, gpu)
	}
	if want.ComputeMode == "" && done(computeMode) {
		computeMode, changed.ComputeMode, changed.Before = nil, "", ""
	}
	if err := a.keepChanged(gpu, changed); err != nil {
		a.Logger.Warn("setting of a GPU undone", "gpu", gpu, "error", err)
	}
	return slices.Concat(slice, computeMode)
}

func (a *agent) setTimeSlice(ctx context.Context, gpu string, slice sharing.TimeSlice, binding uint64) status.GPUSetting {
	g := &a.gpuSettings
	set := setSlice{slice, binding}
	if slice == "" || g.slices[gpu] == set {
		return status.GPUSetting{State: status.SettingApplied}
	}
	changed := g.changed[gpu]
	changed.TimeSlice = changed.TimeSlice || slice != sharing.DefaultTimeSlice
	delete(g.slices, gpu)
	err := a.keepChanged(gpu, changed)
	switch {
	case err != nil:
	case a.DriverSettings.SetTimeSlice == nil:
		err = errors.New("these GPUs are a recording")
	default:
		err = abandonable(ctx, settingLimit, "nvidia-smi", func(ctx context.Context) error { return a.DriverSettings.SetTimeSlice(ctx, gpu, slice) })
	}
	if err != nil {
		return status.GPUSetting{State: status.SettingFailed, Reason: err.Error() + "; it takes the driver's nvidia-smi, " + settingRight}
	}
	g.slices[gpu] = set
	return status.GPUSetting{State: status.SettingApplied}
}

// settingRight is what setting takes, as a sentence of a warning ends.
const settingRight = "root and the capability SYS_ADMIN, which the chart's gpuSettings.manage gives"

// setComputeMode waits until nobody uses the GPU before it sets a mode that refuses processes.
func (a *agent) setComputeMode(ctx context.Context, gpu string, mode, now sharing.ComputeMode) status.GPUSetting {
	if mode == "" || mode == now {
		return status.GPUSetting{State: status.SettingApplied}
	}
	if mode != sharing.DefaultComputeMode {
		if users := a.usersOf(ctx, gpu); len(users) > 0 {
			return status.GPUSetting{State: status.SettingWaiting, Reason: fmt.Sprintf("in use by %s", users[0])}
		}
	}
	changed := a.gpuSettings.changed[gpu]
	changed.ComputeMode, changed.Before = mode, cmp.Or(changed.Before, now)
	err := a.keepChanged(gpu, changed)
	if err == nil {
		err = a.DriverSettings.SetComputeMode(ctx, gpu, mode)
	}
	switch {
	case errors.Is(err, mig.ErrNoPermission):
		return status.GPUSetting{State: status.SettingFailed, Reason: err.Error() + "; it takes " + settingRight}
	case err != nil:
		return status.GPUSetting{State: status.SettingFailed, Reason: err.Error()}
	}
	return status.GPUSetting{State: status.SettingApplied}
}

// keepChanged keeps what was set of the GPU for a restart, before it is set.
func (a *agent) keepChanged(gpu string, changed ChangedGPU) error {
	g := &a.gpuSettings
	if changed.GPU = gpu; changed == (ChangedGPU{GPU: gpu}) {
		changed = ChangedGPU{}
	}
	if changed == g.changed[gpu] {
		return nil
	}
	before := maps.Clone(g.changed)
	if g.changed[gpu] = changed; changed == (ChangedGPU{}) {
		delete(g.changed, gpu)
	}
	list := []ChangedGPU{}
	for _, gpu := range slices.Sorted(maps.Keys(g.changed)) {
		list = append(list, g.changed[gpu])
	}
	if err := a.DriverSettings.Store.Save(list); err != nil {
		g.changed = before
		return fmt.Errorf("keep it for a restart: %w", err)
	}
	return nil
}

// settingWarnings say which settings could not be made.
func (a *agent) settingWarnings(gpus []sharing.GPU) (warnings []string) {
	for _, gpu := range gpus {
		for _, s := range (*a.gpuSettings.list.Load())[gpu.UUID] {
			if s.State == status.SettingFailed {
				warnings = append(warnings, fmt.Sprintf("GPU %d (%s): %s %s is not set: %s", gpu.Index, gpu.UUID, s.Setting, s.Value, s.Reason))
			}
		}
	}
	return warnings
}
