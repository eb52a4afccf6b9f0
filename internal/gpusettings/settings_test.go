package gpusettings

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// fakeDriver has one GPU, of which it fails to set the time slice while err is set. It keeps nothing.
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

// TestFailuresAreTriedLessOften holds that what cannot be set is tried again after 30 s, 1 min, 2 min
// and so on, but at least every 10 minutes or so.
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

// TestClosedGPU holds that nothing is set of a GPU that is closed, and soon after it no longer is.
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
