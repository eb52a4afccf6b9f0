package gpusettings

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// fakeDriver has one GPU, and fails to set its time slice while err is set. It keeps nothing.
type fakeDriver struct {
	err   error
	calls []time.Time
}

func (*fakeDriver) Load() ([]ChangedGPU, error) { return nil, nil }

func (*fakeDriver) Save([]ChangedGPU) error { return nil }

func (d *fakeDriver) setTimeSlice(context.Context, string, sharing.TimeSlice) error {
	d.calls = append(d.calls, time.Now())
	return d.err
}

func (d *fakeDriver) settings(closed func() bool) *Settings {
	gpus := []sharing.GPU{{UUID: "GPU-a"}}
	slice := sharing.Unit{ID: "GPU-a", Driver: sharing.DriverSettings{TimeSlice: sharing.ShortTimeSlice}}
	plan := sharing.Plan{Resources: []sharing.Resource{{Units: []sharing.Unit{slice}}}}
	return New(Options{
		Driver: DriverSettings{
			Store: d,
			ComputeMode: func(context.Context, string) (sharing.ComputeMode, uint64, error) {
				return sharing.DefaultComputeMode, 1, nil
			},
			SetTimeSlice: d.setTimeSlice,
		},
		Inputs:  func() ([]sharing.GPU, sharing.Plan, bool) { return gpus, plan, true },
		Closed:  func(string) bool { return closed() },
		Changed: func() {},
		Looked:  func() {},
		Logger:  slog.New(slog.DiscardHandler),
	})
}

// TestFailuresAreTriedLessOften checks that a failed setting is tried again after 30 s, 1 min, 2 min and so on,
// but about every 10 minutes at least.
func TestFailuresAreTriedLessOften(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &fakeDriver{err: errors.New("no")}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := d.settings(func() bool { return false }).Run(ctx); err != nil {
			t.Fatal(err)
		}
		pause := lookInterval
		for i := 1; i < len(d.calls); i++ {
			if got := d.calls[i].Sub(d.calls[i-1]); got < pause || got > pause+lookInterval {
				t.Errorf("pause %d: %s, want %s", i, got, pause)
			}
			pause = min(2*pause, longestPause)
		}
		if len(d.calls) < 8 {
			t.Errorf("tried %d times in an hour", len(d.calls))
		}
	})
}

// TestClosedGPU checks that a closed GPU is not set, but is soon after it is open again.
func TestClosedGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, open := &fakeDriver{}, time.Now().Add(time.Minute)
		s := d.settings(func() bool { return time.Now().Before(open) })
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := s.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if len(d.calls) != 1 || d.calls[0].Before(open) || d.calls[0].Sub(open) > waitInterval {
			t.Errorf("set at %v, want once at %v", d.calls, open)
		}
		if got := s.All()["GPU-a"]; len(got) != 1 || got[0].State != status.SettingApplied {
			t.Errorf("settings %+v", got)
		}
	})
}

// TestBlockedGPU checks that a setting waits, and does not fail, while the driver cannot be used, and that an
// applied one stays applied.
func TestBlockedGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, begin := &fakeDriver{}, time.Now()
		s := d.settings(func() bool { return false })
		s.Blocked = func(string) string {
			past := time.Since(begin) //nolint:forbidigo // in a synctest bubble: the time is simulated
			if past < time.Minute || past > time.Hour && past < 2*time.Hour {
				return "GPU 1 is released"
			}
			return ""
		}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		var running sync.WaitGroup
		running.Go(func() { _ = s.Run(ctx) })
		defer running.Wait()
		defer cancel()
		for _, step := range []struct {
			after time.Duration
			want  status.GPUSetting
		}{
			{30 * time.Second, status.GPUSetting{State: status.SettingWaiting, Reason: "GPU 1 is released"}},
			{time.Minute, status.GPUSetting{State: status.SettingApplied}},
			{time.Hour, status.GPUSetting{State: status.SettingApplied}},
		} {
			<-time.After(step.after) //nolint:forbidigo // In a bubble.
			synctest.Wait()
			if got := s.All()["GPU-a"]; len(got) != 1 || got[0].State != step.want.State || got[0].Reason != step.want.Reason {
				t.Errorf("%s later: %+v, want %+v", step.after, got, step.want)
			}
		}
		if len(d.calls) != 1 || d.calls[0].Sub(begin) < time.Minute {
			t.Errorf("set at %v", d.calls)
		}
	})
}

// TestForeignComputeMode checks that a compute mode left by another program is reported if it keeps programs off
// a GPU that they should share, and only then.
func TestForeignComputeMode(t *testing.T) {
	t.Parallel()
	const shared, prohibited = "it is shared, and the second program on it fails", "no program can use it"
	for name, test := range map[string]struct {
		mode sharing.ComputeMode
		unit sharing.Unit
		gpu  sharing.GPU
		dra  bool
		fail error
		want string
	}{
		"shared, default":              {mode: sharing.DefaultComputeMode, unit: sharing.Unit{Replicas: 4}},
		"shared, exclusive process":    {mode: sharing.ExclusiveProcess, unit: sharing.Unit{Replicas: 4}, want: shared},
		"shared, prohibited":           {mode: sharing.ProhibitedCompute, unit: sharing.Unit{Replicas: 4}, want: prohibited},
		"by DRA":                       {mode: sharing.ExclusiveProcess, unit: sharing.Unit{Replicas: 4}, dra: true, want: shared},
		"exclusive, exclusive process": {mode: sharing.ExclusiveProcess, unit: sharing.Unit{Replicas: 1}},
		"exclusive, prohibited":        {mode: sharing.ProhibitedCompute, unit: sharing.Unit{Replicas: 1}, want: prohibited},
		"by MPS":                       {mode: sharing.ExclusiveProcess, unit: sharing.Unit{Replicas: 4, MPS: sharing.MPS{Shares: 4}}},
		"wanted":                       {mode: sharing.ExclusiveProcess, unit: sharing.Unit{Replicas: 4, Driver: sharing.DriverSettings{ComputeMode: sharing.ExclusiveProcess}}},
		"faulty":                       {mode: sharing.ProhibitedCompute, unit: sharing.Unit{Replicas: 4}, gpu: sharing.GPU{Health: sharing.Faulty("lost")}},
		"not told":                     {mode: sharing.ProhibitedCompute, unit: sharing.Unit{Replicas: 4}, fail: errors.New("NOT_SUPPORTED")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				mode, asked, changed := test.mode, 0, 0
				test.unit.ID, test.gpu.UUID = "GPU-a", "GPU-a"
				plan, byDRA := sharing.Plan{Resources: []sharing.Resource{{Units: []sharing.Unit{test.unit}}}}, map[string]sharing.Unit{}
				if test.dra {
					plan, byDRA = sharing.Plan{}, map[string]sharing.Unit{"GPU-a": test.unit}
				}
				gpus := []sharing.GPU{test.gpu}
				s := (&fakeDriver{}).settings(func() bool { return false })
				s.Driver.ComputeMode = func(context.Context, string) (sharing.ComputeMode, uint64, error) {
					asked++
					return mode, 1, test.fail
				}
				s.Inputs = func() ([]sharing.GPU, sharing.Plan, bool) { return gpus, plan, true }
				s.ByDRA = func() map[string]sharing.Unit { return byDRA }
				s.Changed = func() { changed++ }
				run := func(length time.Duration) {
					ctx, cancel := context.WithTimeout(t.Context(), length)
					defer cancel()
					if err := s.Run(ctx); err != nil {
						t.Fatal(err)
					}
				}
				run(time.Second)
				told := func() bool {
					return slices.ContainsFunc(s.Warnings(gpus), func(w string) bool {
						return strings.Contains(w, "its compute mode is "+string(test.mode)) && strings.Contains(w, test.want)
					})
				}
				if told() != (test.want != "") || test.want == "" && len(s.Warnings(gpus)) > 0 {
					t.Errorf("warnings %q, want %q", s.Warnings(gpus), test.want)
				}
				if test.want == "" {
					return
				}
				if changed != 1 {
					t.Errorf("%d changes were told", changed)
				}
				// It ends within half a minute, and many looks read once.
				asked, mode = 0, sharing.DefaultComputeMode
				for range 5 {
					run(time.Second)
				}
				if asked != 0 {
					t.Errorf("asked %d times within %s", asked, lookInterval)
				}
				run(lookInterval + time.Second)
				if left := s.Warnings(gpus); len(left) > 0 || changed != 2 {
					t.Errorf("after it was set back: %q, %d changes", left, changed)
				}
			})
		})
	}
}
