package configs

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

func TestOverridesWin(t *testing.T) {
	document := `
flags:
  migStrategy: single
  failOnInitError: true
  nvidiaDriverRoot: /document
  deviceDiscoveryStrategy: tegra
  plugin:
    deviceListStrategy: [cdi-cri]
    deviceIDStrategy: uuid
    passDeviceSpecs: true
imex: {channelIDs: [0]}
`
	config, err := Parse("doc.yaml", []byte(document), Overrides{
		"flags.migStrategy":               {Value: "mixed", Source: "--mig-strategy"},
		"flags.failOnInitError":           {Value: "0", Source: "$FAIL_ON_INIT_ERROR"},
		"flags.nvidiaDriverRoot":          {Value: "/override", Source: "--nvidia-driver-root"},
		"flags.deviceDiscoveryStrategy":   {Value: "nvml", Source: "--device-discovery-strategy"},
		"flags.plugin.deviceListStrategy": {Value: " envvar ", Source: "$DEVICE_LIST_STRATEGY"},
		"flags.plugin.deviceIDStrategy":   {Value: "index", Source: "$DEVICE_ID_STRATEGY"},
		"flags.plugin.passDeviceSpecs":    {Value: "F", Source: "$PASS_DEVICE_SPECS"},
		"imex.channelIDs":                 {Value: "", Source: "--imex-channel-ids"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if p := config.Profile; p.MIGStrategy != sharing.MIGMixed || p.DeviceIDs != sharing.ByIndex {
		t.Errorf("profile has strategy %s and IDs by %s", p.MIGStrategy, p.DeviceIDs)
	}
	want := Process{
		DriverRoot: "/override", DevRoot: "/override", ContainerDriverRoot: "/driver-root", DeviceDiscoveryStrategy: "nvml",
		CDIHookPath: "/usr/bin/nvidia-cdi-hook",
	}
	if diff := cmp.Diff(want, config.Process); diff != "" {
		t.Errorf("process (-want +got):\n%s", diff)
	}
}

func TestOverrideProblems(t *testing.T) {
	tests := []struct {
		name, document, path, value string
		want                        Problem
	}{
		{"impossible", "", "flags.migStrategy", "mixd",
			Problem{File: "$X", Path: "flags.migStrategy", Value: `"mixd"`, Message: "expected none, single or mixed"}},
		{"no switch", "", "flags.failOnInitError", "",
			Problem{File: "$X", Path: "flags.failOnInitError", Value: `""`, Message: "expected true or false"}},
		{"relative path", "", "flags.nvidiaDevRoot", "dev",
			Problem{File: "$X", Path: "flags.nvidiaDevRoot", Value: `"dev"`, Message: "expected an absolute path"}},
		{"an item of a list", "", "flags.plugin.deviceListStrategy", "envvar,what",
			Problem{File: "$X", Path: "flags.plugin.deviceListStrategy", Value: `"envvar,what"`, Message: "expected envvar, volume-mounts, cdi-annotations, cdi-cri or driver-mounts"}},
		{"an empty list", "", "flags.plugin.deviceListStrategy", "",
			Problem{File: "$X", Path: "flags.plugin.deviceListStrategy", Value: `""`, Message: "expected envvar, volume-mounts, cdi-annotations, cdi-cri or driver-mounts"}},
		{"not supported", "flags: {deviceDiscoveryStrategy: nvml}", "flags.deviceDiscoveryStrategy", "tegra",
			Problem{File: "$X", Path: "flags.deviceDiscoveryStrategy", Value: `"tegra"`, Message: "is not supported yet, only auto or nvml"}},
		{"the root of a container", "", "flags.plugin.driverMounts.containerPath", "//",
			Problem{File: "$X", Path: "flags.plugin.driverMounts.containerPath", Value: `"//"`, Message: "expected a folder below /"}},
		{"no number", "", "imex.channelIDs", "0,a",
			Problem{File: "$X", Path: "imex.channelIDs", Value: `"0,a"`, Message: "expected whole numbers from 0"}},
		{"numbers that are not supported", "", "imex.channelIDs", "0",
			Problem{File: "$X", Path: "imex.channelIDs", Value: `"0"`, Message: "is not supported yet"}},
		{"unknown setting", "", "flags.nothing", "x",
			Problem{File: "$X", Path: "flags.nothing", Value: `"x"`, Message: "no such setting"}},
		{"the document is still judged", "flags: {migStrategy: mixd}", "flags.migStrategy", "mixed",
			Problem{File: "doc.yaml", Line: 1, Path: "flags.migStrategy", Value: `"mixd"`, Message: "expected none, single or mixed"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("doc.yaml", []byte(test.document), Overrides{test.path: {Value: test.value, Source: "$X"}})
			var got Problems
			if !errors.As(err, &got) {
				t.Fatalf("error is %v", err)
			}
			if diff := cmp.Diff(Problems{test.want}, got); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// TestOverrideProblemOnce has two documents in one file, which meet the same
// override.
func TestOverrideProblemOnce(t *testing.T) {
	manifest := "apiVersion: v1\nkind: ConfigMap\ndata: {a: '', b: ''}\n"
	_, err := ParseFile("map.yaml", []byte(manifest), Overrides{"flags.migStrategy": {Value: "x", Source: "--mig-strategy"}})
	const want = `--mig-strategy: flags.migStrategy: expected none, single or mixed (got "x")`
	if err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
}
