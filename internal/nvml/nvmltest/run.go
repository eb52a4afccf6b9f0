// Package nvmltest says what every back-end of nvml.Library must do: one suite
// for the simulator, for traces and, where there is one, for a real driver. It
// only reads, so that it may run on a node that works.
package nvmltest

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/sharing"
)

// Unknown in Expect says that the number may be any.
const Unknown = -1

// Expect is what is known of a node beforehand.
type Expect struct {
	// GPUs and Partitions are how many there are on the whole node.
	GPUs, Partitions int
	// Event makes the GPU of that index have XID 94; nil when nothing can. A
	// trace in which it did needs no second one.
	Event func(t *testing.T, gpu int)
}

// Run holds the suite against the libraries that open returns, which it has not
// opened yet: one for each part.
func Run(t *testing.T, open func(t *testing.T) nvml.Library, expect Expect) {
	t.Run("life", func(t *testing.T) { life(t, open(t)) })
	for _, part := range []struct {
		name string
		hold func(*testing.T, nvml.Library, Expect)
	}{
		{"boards", boards}, {"partitions", partitions}, {"profiles", profiles}, {"cutting", cutting},
		{"neighbours", neighbours}, {"events", events},
	} {
		t.Run(part.name, func(t *testing.T) {
			lib := open(t)
			must(t, lib.Init())
			defer func() { must(t, lib.Shutdown()) }()
			part.hold(t, lib, expect)
		})
	}
	t.Run("scan", func(t *testing.T) { scan(t, open(t), expect) })
}

// Tour is the suite on one library, opened once, and always in the same order.
// It makes each call that Run does, so a trace of it is one that Run can be held
// against.
func Tour(t *testing.T, lib nvml.Library, expect Expect) {
	must(t, lib.Init())
	defer func() { must(t, lib.Shutdown()) }()
	for _, hold := range []func(*testing.T, nvml.Library, Expect){boards, partitions, profiles, cutting, neighbours, events} {
		hold(t, lib, expect)
	}
}

// life holds that the library counts how often it is opened, and answers only
// while it is.
func life(t *testing.T, lib nvml.Library) {
	closed := func(when string) {
		t.Helper()
		if _, err := lib.DeviceGetCount(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("DeviceGetCount %s: %v, want UNINITIALIZED", when, err)
		}
		if err := lib.Shutdown(); !errors.Is(err, nvml.Uninitialized) {
			t.Errorf("Shutdown %s: %v, want UNINITIALIZED", when, err)
		}
	}
	closed("before Init")
	for _, times := range []int{1, 2} {
		for range times {
			must(t, lib.Init())
		}
		for range times {
			if _, err := lib.DeviceGetCount(); err != nil {
				t.Errorf("DeviceGetCount between Init and the last Shutdown: %v", err)
			}
			must(t, lib.Shutdown())
		}
		closed("after the last Shutdown")
	}
}

// scan holds that two looks see the same.
func scan(t *testing.T, lib nvml.Library, expect Expect) {
	look := func() []sharing.GPU {
		gpus, err := nvml.Scan(lib)
		must(t, err)
		return gpus
	}
	first := look()
	if diff := cmp.Diff(first, look()); diff != "" {
		t.Errorf("the second look (-first +second):\n%s", diff)
	}
	found := 0
	for _, gpu := range first {
		found += len(gpu.Partitions)
	}
	number(t, "GPUs", len(first), expect.GPUs)
	number(t, "partitions", found, expect.Partitions)
}

func number(t *testing.T, what string, got, want int) {
	t.Helper()
	if want != Unknown && got != want {
		t.Errorf("%d %s, want %d", got, what, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fails holds that the error is one of NVML's, with its code and its call.
func fails(t *testing.T, call string, err error, codes ...nvml.Return) {
	t.Helper()
	failed, ok := errors.AsType[*nvml.Error](err)
	if !ok {
		t.Errorf("%s: %v is no *nvml.Error", call, err)
		return
	}
	if failed.Call == "" || failed.Return == nvml.Success {
		t.Errorf("%s: %#v does not tell the call and a code", call, failed)
	}
	if len(codes) > 0 && !slices.Contains(codes, failed.Return) {
		t.Errorf("%s: %v, want one of %v", call, err, codes)
	}
}

// optional holds that a call which a board or a driver need not have, if it
// fails, says that it is not there.
func optional(t *testing.T, call string, err error) bool {
	t.Helper()
	if err != nil {
		fails(t, call, err, nvml.NotSupported, nvml.FunctionNotFound, nvml.NoPermission, nvml.InvalidArgument)
	}
	return err == nil
}
