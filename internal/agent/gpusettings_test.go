package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/gpusettings"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// fakeSettings is a driver, and the settings kept for a restart.
type fakeSettings struct {
	mu      sync.Mutex
	modes   map[string]sharing.ComputeMode
	slices  map[string]sharing.TimeSlice
	binding uint64
	kept    []gpusettings.ChangedGPU
	// fail has errors by the name of the call; calls lists calls that set something.
	fail  map[string]error
	calls []string
}

func newFakeSettings() *fakeSettings {
	return &fakeSettings{modes: map[string]sharing.ComputeMode{}, slices: map[string]sharing.TimeSlice{}, fail: map[string]error{}}
}

func (f *fakeSettings) Load() ([]gpusettings.ChangedGPU, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.kept), nil
}

func (f *fakeSettings) Save(list []gpusettings.ChangedGPU) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail["save"] == nil {
		f.kept = slices.Clone(list)
	}
	return f.fail["save"]
}

func (f *fakeSettings) mode(gpu string) sharing.ComputeMode {
	if f.modes[gpu] == "" {
		return sharing.DefaultComputeMode
	}
	return f.modes[gpu]
}

func (f *fakeSettings) settings() gpusettings.DriverSettings {
	return gpusettings.DriverSettings{
		Store: f,
		ComputeMode: func(_ context.Context, gpu string) (sharing.ComputeMode, uint64, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.mode(gpu), f.binding, f.fail["mode?"]
		},
		SetComputeMode: func(_ context.Context, gpu string, mode sharing.ComputeMode) error {
			return f.set("mode", gpu, string(mode), func() { f.modes[gpu] = mode })
		},
		SetTimeSlice: func(_ context.Context, gpu string, slice sharing.TimeSlice) error {
			return f.set("slice", gpu, string(slice), func() { f.slices[gpu] = slice })
		},
	}
}

// set fails if nothing of the GPU is kept: after a kill now, the setting could not be undone.
func (f *fakeSettings) set(call, gpu, value string, do func()) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, call+" "+gpu+" "+value)
	if err := f.fail[call]; err != nil {
		return err
	}
	if value != "default" && !slices.ContainsFunc(f.kept, func(c gpusettings.ChangedGPU) bool { return c.GPU == gpu }) {
		return errors.New("not kept for a restart")
	}
	do()
	return nil
}

func (f *fakeSettings) change(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// now is the driver's state of a GPU, and the number of GPUs kept.
func (f *fakeSettings) now(gpu string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return fmt.Sprintf("%s %s %d", f.mode(gpu), f.slices[gpu], len(f.kept))
}

// told lists a GPU's settings from the status, as "timeSlice short applied".
func (r *rig) told(gpu int) string {
	status := r.agent.view.status(r.ctx)
	if len(status.GPUs) <= gpu {
		return "unknown"
	}
	var texts []string
	for _, s := range status.GPUs[gpu].Settings {
		texts = append(texts, s.Setting+" "+s.Value+" "+string(s.State))
	}
	return strings.Join(texts, ", ")
}

// settingProfile has GPU 0 for one process and GPU 1 shared with that time slice.
func settingProfile(mode sharing.ComputeMode, slice sharing.TimeSlice) sharing.Profile {
	p := profile(4)
	entry := func(gpu string, replicas int, settings sharing.DriverSettings) sharing.ReplicatedResource {
		selector, err := sharing.ParseSelector(gpu)
		if err != nil {
			panic(err)
		}
		return sharing.ReplicatedResource{Resource: gpuResource, Replicas: replicas, Driver: settings, Select: sharing.Selection{List: []sharing.Selector{selector}}}
	}
	p.TimeSlicing = []sharing.ReplicatedResource{
		entry("0", 1, sharing.DriverSettings{ComputeMode: mode}), entry("1", 4, sharing.DriverSettings{TimeSlice: slice}),
	}
	return p
}

func (r *rig) startWith(p sharing.Profile) {
	r.policy = fakePolicy{newInput(p, nil)}
	r.options.ConfigSource = r.policy
}

func newSettingsRig(t *testing.T, f *fakeSettings) *rig {
	return newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		r.options.DriverSettings = f.settings()
		r.startWith(settingProfile(sharing.ExclusiveProcess, sharing.ShortTimeSlice))
	})
}

// TestGPUSettings checks that settings are kept before they are applied, stay while the profile has them, and are
// restored afterwards, also by a later run.
func TestGPUSettings(t *testing.T) {
	t.Parallel()
	f := newFakeSettings()
	whole, shared := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	f.modes[whole] = sharing.ProhibitedCompute
	f.modes[shared] = sharing.ProhibitedCompute // No profile asks for another mode.
	t.Run("set", func(t *testing.T) {
		r := newSettingsRig(t, f)
		r.await("set", func() bool {
			return f.now(whole) == "exclusive-process  2" && f.now(shared) == "prohibited short 2" &&
				r.told(0) == "computeMode exclusive-process applied" && r.told(1) == "timeSlice short applied"
		})
		r.awaitBody("/metrics", 200, `virgate_gpu_setting_applied{gpu_uuid="`+shared+`",setting="timeSlice",value="short"} 1`)
	})
	f.calls = nil
	t.Run("after a kill", func(t *testing.T) {
		r := newSettingsRig(t, f)
		r.await("set again", func() bool { return r.told(1) == "timeSlice short applied" })
		// The time slice is set again, as the driver cannot tell whether it was lost; the mode is right.
		if diff := cmp.Diff([]string{"slice " + shared + " short"}, f.calls); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
		f.change(func() { f.binding, f.modes[whole], f.slices[shared] = 2, "", "" }) // The driver was loaded again.
		r.agent.gpuSettings.Wake()
		r.await("set once more", func() bool {
			return f.now(whole) == "exclusive-process  2" && f.now(shared) == "prohibited short 2"
		})
		p := settingProfile("", sharing.LongTimeSlice)
		r.policy.set(p, nil)
		r.await("changed", func() bool {
			return f.now(whole) == "prohibited  1" && f.now(shared) == "prohibited long 1" && r.told(0) == ""
		})
	})
	t.Run("undone by a later run", func(t *testing.T) {
		f.kept = append(f.kept, gpusettings.ChangedGPU{GPU: whole, ComputeMode: sharing.ExclusiveProcess, Before: sharing.ProhibitedCompute})
		f.modes[whole] = sharing.ExclusiveProcess
		r := newRig(t, func(r *rig) {
			r.options.DriverSettings, r.options.Kubelet = f.settings(), r.sight
		})
		r.await("undone", func() bool { return f.now(whole) == "prohibited  0" && f.now(shared) == "prohibited default 0" })
	})
	t.Run("somebody else's", func(t *testing.T) {
		f.kept = []gpusettings.ChangedGPU{{GPU: whole, ComputeMode: sharing.ExclusiveProcess, Before: sharing.DefaultComputeMode}}
		r := newRig(t, func(r *rig) { r.options.DriverSettings = f.settings() })
		r.await("left alone", func() bool { return f.now(whole) == "prohibited  0" })
	})
}

// TestGPUSettingsUndoneAtTheEnd checks that a program without a successor restores the settings.
func TestGPUSettingsUndoneAtTheEnd(t *testing.T) {
	t.Parallel()
	f := newFakeSettings()
	whole, shared := gpus("", "")[0].UUID, gpus("", "")[1].UUID
	t.Run("drained", func(t *testing.T) {
		var end func()
		r := newRig(t, func(r *rig) {
			r.options.Kubelet, r.options.DriverSettings, r.options.DrainTimeout = r.sight, f.settings(), patience
			r.startWith(settingProfile(sharing.ExclusiveProcess, sharing.ShortTimeSlice))
			end = r.endable()
		})
		r.await("set", func() bool { return f.now(whole) == "exclusive-process  2" && f.now(shared) == "default short 2" })
		r.shows(5) // It is served, or there would be nothing to drain.
		end()
		r.await("undone", func() bool { return f.now(whole) == "default  0" && f.now(shared) == "default default 0" })
		r.gone()
	})
}

// TestComputeModeWaitsForTheGPU checks that an exclusive compute mode waits until no pod uses the GPU, as it
// would refuse the pod's next process. The default mode does not wait.
func TestComputeModeWaitsForTheGPU(t *testing.T) {
	t.Parallel()
	f := newFakeSettings()
	whole := gpus("", "")[0].UUID
	r := newRig(t, func(r *rig) {
		r.options.Kubelet, r.options.DriverSettings = r.sight, f.settings()
		r.startWith(settingProfile("", ""))
	})
	r.shows(5)
	pod := simkubelet.Pod{Namespace: "ns", Name: "one", Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{gpuResource: 5}}}}
	if _, err := r.kubelet.AddPod(r.ctx, pod); err != nil {
		t.Fatal(err)
	}
	r.policy.set(settingProfile(sharing.ExclusiveProcess, ""), nil)
	r.await("waiting", func() bool { return r.told(0) == "computeMode exclusive-process waiting" })
	if got := f.now(whole); got != "default  0" {
		t.Errorf("while a pod has it: %s", got)
	}
	if list := r.agent.gpuSettings.All()[whole]; list[0].Reason != "in use by ns/one" {
		t.Errorf("it waits for %q", list[0].Reason)
	}
	if err := r.kubelet.DeletePod("ns", "one"); err != nil {
		t.Fatal(err)
	}
	r.await("set", func() bool { return f.now(whole) == "exclusive-process  1" })
	if _, err := r.kubelet.AddPod(r.ctx, pod); err != nil {
		t.Fatal(err)
	}
	r.policy.set(settingProfile("", ""), nil)
	r.await("undone", func() bool { return f.now(whole) == "default  0" })
}

// TestTimeSliceOfARecording checks that a time slice on a recorded node is a warning.
func TestTimeSliceOfARecording(t *testing.T) {
	t.Parallel()
	f := newFakeSettings()
	r := newRig(t, func(r *rig) {
		r.options.Kubelet, r.options.DriverSettings = r.sight, f.settings()
		r.options.DriverSettings.SetTimeSlice = nil
		r.startWith(settingProfile("", sharing.LongTimeSlice))
	})
	r.await("a warning", func() bool {
		return strings.Contains(strings.Join(r.agent.state.Load().plan.Warnings, "\n"), "timeSlice long is not set: these GPUs are a recording")
	})
}

// TestGPUSettingsFail checks that a setting that fails is a warning with its cause, and that the GPUs are served.
func TestGPUSettingsFail(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		call string
		err  error
		says []string
	}{
		{"mode", fmt.Errorf("%w: nvml: DeviceSetComputeMode: NO_PERMISSION", mig.ErrNoPermission), []string{"computeMode exclusive-process is not set: not permitted: nvml: DeviceSetComputeMode: NO_PERMISSION", "gpuSettings.manage"}},
		{"slice", fmt.Errorf("no nvidia-smi in /usr/bin: %w", fs.ErrNotExist), []string{"timeSlice short is not set: no nvidia-smi in /usr/bin", "that requires the driver's nvidia-smi, root and the capability SYS_ADMIN", "gpuSettings.manage"}},
		{"save", errors.New("disk full"), []string{"computeMode exclusive-process is not set: keep it for a restart: disk full"}},
		{"mode?", errors.New("no answer"), []string{"timeSlice short is not set: the driver does not tell how it is set: no answer"}},
	} {
		t.Run(test.call, func(t *testing.T) {
			f := newFakeSettings()
			f.fail[test.call] = test.err
			r := newSettingsRig(t, f)
			r.await("a warning", func() bool {
				all := strings.Join(r.agent.state.Load().plan.Warnings, "\n")
				return !slices.ContainsFunc(test.says, func(text string) bool { return !strings.Contains(all, text) })
			})
			r.shows(5)
			if test.call == "save" && len(f.calls) > 0 {
				t.Errorf("set without being kept: %v", f.calls)
			}
			// A failure is not retried at every look, but at once with another profile.
			f.change(func() { f.fail = map[string]error{} })
			r.policy.set(settingProfile(sharing.DefaultComputeMode, sharing.LongTimeSlice), nil)
			r.await("no warning", func() bool {
				return len(r.agent.state.Load().plan.Warnings) == 0 && r.told(1) == "timeSlice long applied"
			})
		})
	}
}
