package nvml_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// TestVersionMismatch checks that the error for different versions of libraries and kernel module gives a remedy,
// and that Watch ends after 10 s, because a new container may have other libraries. Watch waits out a shorter
// mismatch.
func TestVersionMismatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		must(t, sim.SetWorld("other-module=570.124.06"))
		began := time.Now()
		var told error
		watched := nvml.NewNode(sim, nvml.Options{})
		err := watched.Watch(t.Context(), func() { _, told = watched.Inventory() })
		const want = "the driver's libraries are of version 580.65.06 and the loaded kernel module is of 570.124.06: reload the module, or reboot the node"
		for _, err := range []error{err, told} {
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "MISMATCH") || !errors.Is(err, nvml.LibRMVersionMismatch) {
				t.Errorf("%v, want %s", err, want)
			}
		}
		if lasted := elapsed(began); lasted != 10*time.Second || !strings.Contains(err.Error(), "for 10s") {
			t.Errorf("ended after %s: %v", lasted, err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		sim := simulate(t, "t4")
		end := sim.InjectFault("Init", simnode.Fault{Return: nvml.LibRMVersionMismatch})
		w := watchWith(t, sim, nvml.Options{})
		if _, err := w.Inventory(); err == nil || !strings.Contains(err.Error(), "are of different versions: reload the module") {
			t.Errorf("without their versions: %v", err)
		}
		pass(9 * time.Second)
		end()
		pass(2 * time.Second)
		if gpus, err := w.Inventory(); err != nil || len(gpus) != 1 {
			t.Errorf("after the mismatch: %d GPUs, %v", len(gpus), err)
		}
		pass(time.Minute) // The next one is another one.
	})
}

// TestVersionMismatches checks that any other failure in between restarts the time.
func TestVersionMismatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mismatches nvml.Mismatches
		bad := &nvml.Error{Call: "Init", Return: nvml.LibRMVersionMismatch}
		for _, step := range []struct {
			after time.Duration
			err   error
			lasts bool
		}{
			{0, bad, false}, {9 * time.Second, bad, false}, {0, nvml.DriverNotLoaded, false},
			{time.Second, bad, false}, {9 * time.Second, bad, false}, {time.Second, bad, true},
			{time.Second, nil, false}, {time.Hour, bad, false},
		} {
			pass(step.after)
			if _, err := mismatches.Lasting(step.err); (err != nil) != step.lasts {
				t.Errorf("%v after %s more: %v", step.err, step.after, err)
			}
		}
	})
}
