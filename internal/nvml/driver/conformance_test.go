//go:build cgo

package driver

import (
	"errors"
	"os"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/trace"
	"github.com/virgate/virgate/test/nvmltest"
)

// TestConformance runs the suite on this machine's driver. Without one it is skipped, unless $VIRGATE_DRIVER is
// "required". It only reads. With $VIRGATE_TRACE it writes a masked trace to that file, which may be added to the
// testdata of package trace.
func TestConformance(t *testing.T) {
	open := func(t *testing.T) nvml.Library {
		lib, err := Open(Options{})
		must(t, err)
		return lib
	}
	lib := open(t)
	err := lib.Init()
	if err != nil && os.Getenv("VIRGATE_DRIVER") == "required" {
		t.Fatal(err)
	}
	if errors.Is(err, nvml.LibraryNotFound) || errors.Is(err, nvml.DriverNotLoaded) {
		t.Skipf("no driver: %v", err)
	}
	must(t, err)
	must(t, lib.Shutdown())
	expect := nvmltest.Expect{GPUs: nvmltest.Unknown, Partitions: nvmltest.Unknown}
	nvmltest.Run(t, open, expect)
	t.Run("with deadlines", func(t *testing.T) {
		nvmltest.Run(t, func(t *testing.T) nvml.Library { return nvml.WithDeadlines(open(t), nvml.Limits{}) }, expect)
	})

	path := os.Getenv("VIRGATE_TRACE")
	if path == "" {
		return
	}
	file, err := os.Create(path)
	must(t, err)
	nvmltest.RunOnce(t, trace.Record(open(t), file, trace.Options{Failed: func(err error) { t.Error(err) }}), expect)
	must(t, file.Close())
}
