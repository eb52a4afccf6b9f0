// Package gpusettings applies the profile's driver settings to whole GPUs: compute modes and time
// slices. It undoes settings that it has made and that the profile no longer wants.
package gpusettings

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// ChangedGPU records what this program has set on a GPU, or was about to set, so that a later run
// can undo it.
type ChangedGPU struct {
	GPU string `json:"gpu"`
	// TimeSlice is true if the time slice may differ from the driver's default.
	TimeSlice bool `json:"timeSlice,omitempty"`
	// ComputeMode is the mode that was set, Before the one before it; both are empty if none was
	// set.
	ComputeMode sharing.ComputeMode `json:"computeMode,omitempty"`
	Before      sharing.ComputeMode `json:"before,omitempty"`
}

// DriverSettings reads and sets the driver's settings of whole GPUs, by UUID. Store is nil if
// nothing can be set.
type DriverSettings struct {
	Store interface {
		Load() ([]ChangedGPU, error)
		Save(list []ChangedGPU) error
	}
	// ComputeMode returns the mode, and a number that changes when the driver was loaded again and
	// its settings were lost. Without the permission, SetComputeMode returns mig.ErrNoPermission.
	ComputeMode    func(ctx context.Context, gpu string) (mode sharing.ComputeMode, binding uint64, err error)
	SetComputeMode func(ctx context.Context, gpu string, mode sharing.ComputeMode) error
	// SetTimeSlice runs nvidia-smi, because the driver does not tell any other program which slice
	// is set. It returns within a minute, and soon after ctx ends. If a release keeps it from running,
	// the error is sharing.ErrReleased. It is nil for a recording.
	SetTimeSlice func(ctx context.Context, gpu string, slice sharing.TimeSlice) error
}

const (
	// lookInterval is the time between two checks that the driver still has what was set,
	// waitInterval the time while a GPU is waited for. longestPause limits the pauses after
	// failures.
	lookInterval = 30 * time.Second
	waitInterval = 500 * time.Millisecond
	longestPause = 10 * time.Minute
)

// Options are the dependencies of Settings.
type Options struct {
	Driver DriverSettings
	// Inputs returns the GPUs and the plan with the wanted settings; known is false while they
	// cannot be read.
	Inputs func() (gpus []sharing.GPU, plan sharing.Plan, known bool)
	// ByDRA returns the planned units that are not in that plan, by UUID. It is nil if there are
	// none.
	ByDRA func() map[string]sharing.Unit
	// Closed reports whether nothing can be set on the GPU now, because it is released, is being
	// repartitioned or has an MPS daemon.
	Closed func(gpu string) bool
	// Blocked returns why the driver cannot be used for the GPU now, although nothing about the GPU
	// itself changes; empty if it can be used. It is nil if it always can.
	Blocked func(gpu string) string
	// Users returns the pods and processes that use the GPU, or why they are not known.
	Users func(ctx context.Context, gpu string) []string
	// Changed is called when the results of All and Warnings may have changed, Looked after each
	// check. They must not wait.
	Changed, Looked func()
	// UndoTimeout limits the undoing of settings when Run ends; 0 leaves them to a successor.
	UndoTimeout time.Duration
	Logger      *slog.Logger
}

// Settings are the settings that were made, and the results. Only Run uses its fields, except list,
// looked and wake.
type Settings struct {
	Options
	wake wake.Signal
	// list has the results by GPU. The stored map is never changed.
	list atomic.Pointer[map[string][]status.GPUSetting]
	// foreign describes GPUs whose compute mode keeps programs off them and was not set by Virgate.
	// The stored list is never changed.
	foreign atomic.Pointer[[]string]
	// looked is true once list has what an earlier run left to undo.
	looked atomic.Bool

	changed map[string]ChangedGPU
	slices  map[string]setSlice
	failed  map[string]failedSetting
	modes   map[string]readMode
}

// setSlice is a time slice that this run has set.
type setSlice struct {
	slice   sharing.TimeSlice
	binding uint64
}

// failedSetting is when to retry what is wanted.
type failedSetting struct {
	wanted sharing.DriverSettings
	pause  time.Duration
	next   time.Time
}

// readMode is a compute mode that was read at the given time and that this program has not set.
type readMode struct {
	mode sharing.ComputeMode
	at   time.Time
}

// New returns settings that know of no GPU yet.
func New(options Options) *Settings {
	s := &Settings{
		Options: options,
		wake:    wake.NewSignal(),
		changed: map[string]ChangedGPU{},
		slices:  map[string]setSlice{},
		failed:  map[string]failedSetting{},
	}
	s.list.Store(&map[string][]status.GPUSetting{})
	s.foreign.Store(&[]string{})
	return s
}

// Wake makes Run check again. It does not wait.
func (s *Settings) Wake() { s.wake.Notify() }

// All returns the settings by GPU that are wanted or not undone yet. The caller must not change
// them.
func (s *Settings) All() map[string][]status.GPUSetting { return *s.list.Load() }

// ComputeModePending reports whether the GPU's compute mode is wanted, still to be undone, or not
// checked yet.
func (s *Settings) ComputeModePending(gpu string) bool {
	if s.Driver.Store != nil && !s.looked.Load() {
		return true
	}
	return slices.ContainsFunc(s.All()[gpu], func(s status.GPUSetting) bool { return s.Setting == "computeMode" })
}

// Run keeps the driver's settings as the profile wants them until ctx ends. If there is no
// successor, it then undoes them.
func (s *Settings) Run(ctx context.Context) error {
	kept, err := s.Driver.Store.Load()
	if err != nil {
		s.Logger.Error("settings of GPUs of the last run not read, and not undone", "error", err)
	}
	for _, c := range kept {
		s.changed[c.GPU] = c
	}
	for {
		if gpus, plan, known := s.Inputs(); known {
			s.settle(ctx, gpus, wantedSettings(plan))
			s.lookForForeignModes(ctx, gpus, s.plannedUnits(plan))
			s.looked.Store(true)
			s.Looked()
		}
		select {
		case <-s.wake:
		case <-time.After(s.pause()):
		case <-ctx.Done():
			if s.UndoTimeout > 0 {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.UndoTimeout)
				defer cancel()
				gpus, _, _ := s.Inputs()
				s.settle(ctx, gpus, nil)
			}
			return nil
		}
	}
}

func (s *Settings) pause() time.Duration {
	for _, list := range s.All() {
		if slices.ContainsFunc(list, func(s status.GPUSetting) bool { return s.State == status.SettingWaiting }) {
			return waitInterval
		}
	}
	return lookInterval
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

// plannedUnits returns all planned units, by UUID.
func (s *Settings) plannedUnits(plan sharing.Plan) map[string]sharing.Unit {
	planned := map[string]sharing.Unit{}
	if s.ByDRA != nil {
		maps.Copy(planned, s.ByDRA())
	}
	for _, r := range plan.Resources {
		for _, u := range r.Units {
			planned[u.ID] = u
		}
	}
	return planned
}

// lookForForeignModes finds whole GPUs that are to be used and have a compute mode that this
// program has not set. It reads the mode of each GPU once in a lookInterval.
func (s *Settings) lookForForeignModes(ctx context.Context, gpus []sharing.GPU, planned map[string]sharing.Unit) {
	modes, warnings := map[string]readMode{}, []string{}
	for _, gpu := range gpus {
		unit, used := planned[gpu.UUID]
		ours := unit.MPS.Shares > 0 || unit.Driver.ComputeMode != "" || s.changed[gpu.UUID].ComputeMode != ""
		if !used || ours || gpu.MIG || gpu.DriverIndex != "" || !gpu.Health.Healthy() || s.Closed(gpu.UUID) ||
			s.blocked(gpu.UUID) != "" {
			continue
		}
		read, is := s.modes[gpu.UUID]
		if !is || time.Since(read.at) >= lookInterval {
			mode, _, err := s.Driver.ComputeMode(ctx, gpu.UUID)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				continue // Not all drivers support it.
			}
			read = readMode{mode, time.Now()}
		}
		modes[gpu.UUID] = read
		if effect := effectOf(read.mode, unit.Replicas); effect != "" {
			warnings = append(warnings, fmt.Sprintf(
				"GPU %d (%s): its compute mode is %s, which Virgate has not set: %s; nvidia-smi -i %s -c DEFAULT "+
					"ends that",
				gpu.Index, gpu.UUID, read.mode, effect, gpu.UUID))
		}
	}
	s.modes = modes
	if !slices.Equal(*s.foreign.Load(), warnings) {
		s.foreign.Store(&warnings)
		s.Changed()
	}
}

// effectOf describes what a compute mode does to the programs of a unit with that many devices; ""
// for nothing.
func effectOf(mode sharing.ComputeMode, devices int) string {
	switch {
	case mode == sharing.ProhibitedCompute:
		return "no program can use it"
	case mode == sharing.ExclusiveProcess && devices > 1:
		return "it is shared, and the second program on it fails"
	}
	return ""
}

// settle applies the wanted settings, by GPU, and undoes those that are no longer wanted.
func (s *Settings) settle(ctx context.Context, gpus []sharing.GPU, wanted map[string]sharing.DriverSettings) {
	last, next := s.All(), map[string][]status.GPUSetting{}
	for _, gpu := range gpus {
		id, want := gpu.UUID, wanted[gpu.UUID]
		failure := s.failed[id]
		var list []status.GPUSetting
		switch {
		case want == (sharing.DriverSettings{}) && s.changed[id] == (ChangedGPU{}):
			delete(s.slices, id)
		case gpu.MIG || gpu.DriverIndex != "" || !gpu.Health.Healthy() || s.Closed(id):
			// A reset may clear what was set, and an MPS daemon sets a mode of its own.
			delete(s.slices, id)
			delete(s.failed, id)
			list = eachSetting(want, status.GPUSetting{
				State:  status.SettingWaiting,
				Reason: "the GPU is released, faulty, partitioned or still shared by MPS",
			})
		case s.blocked(id) != "":
			delete(s.failed, id)
			list = eachSetting(want, status.GPUSetting{State: status.SettingApplied})
			if !slices.Equal(list, last[id]) { // Otherwise it was made before.
				list = eachSetting(want, status.GPUSetting{State: status.SettingWaiting, Reason: s.blocked(id)})
			}
		case failure.wanted == want && time.Now().Before(failure.next):
			list = last[id]
		default:
			list = s.settleGPU(ctx, id, want)
			if ctx.Err() != nil {
				return
			}
			delete(s.failed, id)
			if slices.ContainsFunc(list, func(s status.GPUSetting) bool { return s.State == status.SettingFailed }) {
				pause := lookInterval
				if failure.wanted == want {
					pause = min(max(pause, 2*failure.pause), longestPause)
				}
				s.failed[id] = failedSetting{
					wanted: want,
					pause:  pause,
					next:   time.Now().Add(pause),
				}
			}
		}
		if list != nil {
			next[id] = list
		}
		for _, setting := range list {
			if !slices.Contains(last[id], setting) {
				s.Logger.Info("setting of a GPU", "gpu", id, "index", gpu.Index, "setting", setting.Setting,
					"value", setting.Value, "state", setting.State, "reason", setting.Reason)
			}
		}
	}
	if !maps.EqualFunc(last, next, slices.Equal[[]status.GPUSetting]) {
		s.list.Store(&next)
		s.Changed()
	}
}

func (s *Settings) blocked(gpu string) string {
	if s.Blocked == nil {
		return ""
	}
	return s.Blocked(gpu)
}

// eachSetting returns the result for each of the two settings that is wanted.
func eachSetting(want sharing.DriverSettings, result status.GPUSetting) (list []status.GPUSetting) {
	for _, s := range []status.GPUSetting{
		{Setting: "timeSlice", Value: string(want.TimeSlice)},
		{Setting: "computeMode", Value: string(want.ComputeMode)},
	} {
		if s.Value != "" {
			s.State, s.Reason = result.State, result.Reason
			list = append(list, s)
		}
	}
	return list
}

func (s *Settings) settleGPU(ctx context.Context, gpu string, want sharing.DriverSettings) []status.GPUSetting {
	mode, binding, err := s.Driver.ComputeMode(ctx, gpu)
	changed := s.changed[gpu]
	undone := want // Plus the settings to restore.
	if changed.TimeSlice {
		undone.TimeSlice = cmp.Or(want.TimeSlice, sharing.DefaultTimeSlice)
	}
	if mode == changed.ComputeMode { // Any other mode was not set by Virgate, or the setting was lost.
		undone.ComputeMode = cmp.Or(want.ComputeMode, changed.Before)
	}
	if errors.Is(err, sharing.ErrReleased) { // A release has begun just now.
		return eachSetting(undone, status.GPUSetting{State: status.SettingWaiting, Reason: err.Error()})
	}
	if err != nil {
		reason := "the driver does not tell how it is set: " + err.Error()
		return eachSetting(undone, status.GPUSetting{State: status.SettingFailed, Reason: reason})
	}
	slice := eachSetting(
		sharing.DriverSettings{TimeSlice: undone.TimeSlice}, s.setTimeSlice(ctx, gpu, undone.TimeSlice, binding),
	)
	computeMode := eachSetting(
		sharing.DriverSettings{ComputeMode: undone.ComputeMode}, s.setComputeMode(ctx, gpu, undone.ComputeMode, mode),
	)
	// A setting that was undone is no longer the profile's, and is not reported any more.
	done := func(list []status.GPUSetting) bool { return len(list) == 0 || list[0].State == status.SettingApplied }
	changed = s.changed[gpu]
	if want.TimeSlice == "" && done(slice) {
		slice, changed.TimeSlice = nil, false
		delete(s.slices, gpu)
	}
	if want.ComputeMode == "" && done(computeMode) {
		computeMode = nil
		changed.ComputeMode = ""
		changed.Before = ""
	}
	if err := s.keepChanged(gpu, changed); err != nil {
		s.Logger.Warn("setting of a GPU undone", "gpu", gpu, "error", err)
	}
	return slices.Concat(slice, computeMode)
}

func (s *Settings) setTimeSlice(
	ctx context.Context,
	gpu string,
	slice sharing.TimeSlice,
	binding uint64,
) status.GPUSetting {
	set := setSlice{slice, binding}
	if slice == "" || s.slices[gpu] == set {
		return status.GPUSetting{State: status.SettingApplied}
	}
	changed := s.changed[gpu]
	changed.TimeSlice = changed.TimeSlice || slice != sharing.DefaultTimeSlice
	delete(s.slices, gpu)
	err := s.keepChanged(gpu, changed)
	switch {
	case err != nil:
	case s.Driver.SetTimeSlice == nil:
		err = errors.New("these GPUs are a recording")
	default:
		err = s.Driver.SetTimeSlice(ctx, gpu, slice)
	}
	if errors.Is(err, sharing.ErrReleased) { // A release has begun just now.
		return status.GPUSetting{State: status.SettingWaiting, Reason: err.Error()}
	}
	if err != nil {
		return status.GPUSetting{
			State:  status.SettingFailed,
			Reason: err.Error() + "; that requires the driver's nvidia-smi, " + Right,
		}
	}
	s.slices[gpu] = set
	return status.GPUSetting{State: status.SettingApplied}
}

// Right is what it takes to change settings; warnings end with it.
const Right = "root and the capability SYS_ADMIN, which the chart's gpuSettings.manage gives"

// setComputeMode sets the mode. Before it sets one that refuses processes, it waits until nothing
// uses the GPU.
func (s *Settings) setComputeMode(ctx context.Context, gpu string, mode, now sharing.ComputeMode) status.GPUSetting {
	if mode == "" || mode == now {
		return status.GPUSetting{State: status.SettingApplied}
	}
	if mode != sharing.DefaultComputeMode {
		if users := s.Users(ctx, gpu); len(users) > 0 {
			return status.GPUSetting{State: status.SettingWaiting, Reason: fmt.Sprintf("in use by %s", users[0])}
		}
	}
	changed := s.changed[gpu]
	changed.ComputeMode, changed.Before = mode, cmp.Or(changed.Before, now)
	err := s.keepChanged(gpu, changed)
	if err == nil {
		err = s.Driver.SetComputeMode(ctx, gpu, mode)
	}
	switch {
	case errors.Is(err, sharing.ErrReleased):
		return status.GPUSetting{State: status.SettingWaiting, Reason: err.Error()}
	case errors.Is(err, mig.ErrNoPermission):
		return status.GPUSetting{State: status.SettingFailed, Reason: err.Error() + "; that requires " + Right}
	case err != nil:
		return status.GPUSetting{State: status.SettingFailed, Reason: err.Error()}
	}
	return status.GPUSetting{State: status.SettingApplied}
}

// keepChanged stores what is about to be set on the GPU, so that it survives a restart.
func (s *Settings) keepChanged(gpu string, changed ChangedGPU) error {
	changed.GPU = gpu
	if changed == (ChangedGPU{GPU: gpu}) {
		changed = ChangedGPU{}
	}
	if changed == s.changed[gpu] {
		return nil
	}
	before := maps.Clone(s.changed)
	s.changed[gpu] = changed
	if changed == (ChangedGPU{}) {
		delete(s.changed, gpu)
	}
	list := []ChangedGPU{}
	for _, gpu := range slices.Sorted(maps.Keys(s.changed)) {
		list = append(list, s.changed[gpu])
	}
	if err := s.Driver.Store.Save(list); err != nil {
		s.changed = before
		return fmt.Errorf("keep it for a restart: %w", err)
	}
	return nil
}

// Warnings returns which settings could not be made, and which compute modes that Virgate did not
// set keep programs off GPUs.
func (s *Settings) Warnings(gpus []sharing.GPU) (warnings []string) {
	for _, gpu := range gpus {
		for _, of := range s.All()[gpu.UUID] {
			if of.State == status.SettingFailed {
				warnings = append(warnings, fmt.Sprintf("GPU %d (%s): %s %s is not set: %s",
					gpu.Index, gpu.UUID, of.Setting, of.Value, of.Reason))
			}
		}
	}
	return append(warnings, *s.foreign.Load()...)
}
