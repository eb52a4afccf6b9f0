package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/cdi"
)

// TestDriverComesLater holds that CDI specs are made of the driver that is there
// when they are made, not of what was there when the program started.
func TestDriverComesLater(t *testing.T) {
	mounted := filepath.Join(t.TempDir(), "driver-root")
	options := driverOptions(configs.Process{
		DriverRoot: "/run/nvidia/driver", DevRoot: "/run/nvidia/driver", ContainerDriverRoot: mounted,
		CDIHookPath: "/usr/bin/nvidia-cdi-hook", CDIFeatures: "one,two",
	}, slog.New(slog.DiscardHandler))
	finds := func(want cdi.Roots) {
		t.Helper()
		if diff := cmp.Diff(want, options.Find()); diff != "" {
			t.Errorf("roots (-want +got):\n%s", diff)
		}
	}
	finds(cdi.Roots{Driver: "/run/nvidia/driver", Dev: "/"})
	for _, step := range []struct {
		folder string
		want   cdi.Roots
	}{
		{mounted, cdi.Roots{Driver: mounted, Dev: "/"}},
		{filepath.Join(mounted, "dev"), cdi.Roots{Driver: mounted, Dev: mounted}},
	} {
		if err := os.MkdirAll(step.folder, 0o755); err != nil {
			t.Fatal(err)
		}
		finds(step.want)
	}
	if diff := cmp.Diff(cdi.Roots{Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver"}, options.Host); diff != "" {
		t.Errorf("the host's (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"one", "two"}, options.Features); diff != "" || options.HookPath != "/usr/bin/nvidia-cdi-hook" {
		t.Errorf("features (-want +got):\n%s\nhook %s", diff, options.HookPath)
	}
	if features := driverOptions(configs.Process{}, nil).Features; features != nil {
		t.Errorf("features %q of none", features)
	}
}
