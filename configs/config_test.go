package configs

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/virgate/virgate/sharing"
)

var compareSelectors = cmp.Comparer(func(a, b sharing.Selector) bool { return a == b })

func selectors(t *testing.T, texts ...string) []sharing.Selector {
	t.Helper()
	var list []sharing.Selector
	for _, text := range texts {
		selector, err := sharing.ParseSelector(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, selector)
	}
	return list
}

// withDefaults is the profile of an empty document, changed.
func withDefaults(change func(*sharing.Profile)) sharing.Profile {
	p := sharing.Profile{
		MIGStrategy: sharing.MIGNone,
		GPUNames:    []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		Policy:      sharing.Distributed,
		DeviceIDs:   sharing.ByUUID,
		Grants: sharing.Grants{
			Strategies: []sharing.DeviceListStrategy{sharing.Envvar}, AnnotationPrefix: "cdi.k8s.io/",
			DriverHostPath: "/usr/local/nvidia", DriverContainerPath: "/usr/local/nvidia",
		},
		Health: sharing.DefaultHealthRules(),
		MIG:    sharing.MIGConfig{WhenBusy: sharing.WaitWhenBusy},
	}
	if change != nil {
		change(&p)
	}
	return p
}

func shares(list ...sharing.ReplicatedResource) func(*sharing.Profile) {
	return func(p *sharing.Profile) { p.TimeSlicing = list }
}

func parse(t *testing.T, document string) Config {
	t.Helper()
	config, err := Parse("doc.yaml", []byte(document), nil)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestParseProfile(t *testing.T) {
	const first = "sharing.timeSlicing.resources[0]"
	gpu4 := sharing.ReplicatedResource{Path: first, Resource: "nvidia.com/gpu", Replicas: 4, Policy: sharing.Distributed}
	tests := []struct {
		name, document string
		want           sharing.Profile
	}{
		{"empty", "", withDefaults(nil)},
		{"only a comment", "# nothing\n", withDefaults(nil)},
		{"null", "null", withDefaults(nil)},
		{"ends in a document mark", "version: v1\n---\n", withDefaults(nil)},
		{"null sections", "version:\nflags:\nresources: ~\nsharing: null\nimex:\nmig:\nhealth:\nexclude:\n", withDefaults(nil)},
		{"null inner sections", "flags: {plugin: , gfd: , migStrategy: }\nsharing: {timeSlicing: , mps: }\nresources: {gpus: , mig: }", withDefaults(nil)},
		{"empty sections", "flags: {plugin: {}, gfd: {}}\nresources: {gpus: [], mig: []}\nsharing: {timeSlicing: {resources: []}, mps: {resources: []}}\nimex: {channelIDs: []}\nexclude: []", withDefaults(nil)},
		{"JSON", `{"version":"v1","sharing":{"timeSlicing":{"resources":[{"name":"nvidia.com/gpu","replicas":4}]}}}`, withDefaults(shares(gpu4))},
		{"unqualified name", "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}", withDefaults(shares(gpu4))},
		{"devices all", "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, devices: all}]}}", withDefaults(shares(gpu4))},
		{"flags", "flags: {migStrategy: mixed, plugin: {deviceIDStrategy: index, sharedDevicesAllocationPolicy: packed}}", withDefaults(func(p *sharing.Profile) {
			p.MIGStrategy, p.DeviceIDs, p.Policy = sharing.MIGMixed, sharing.ByIndex, sharing.Packed
		})},
		{"policy of the node is the entry's", "flags: {plugin: {sharedDevicesAllocationPolicy: spread}}\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, spread: strict}]}}", withDefaults(func(p *sharing.Profile) {
			share := gpu4
			share.Policy, share.SpreadStrict = sharing.Spread, true
			p.Policy, p.TimeSlicing = sharing.Spread, []sharing.ReplicatedResource{share}
		})},
		{"fail requests greater than one", "sharing: {timeSlicing: {failRequestsGreaterThanOne: yes}}", withDefaults(func(p *sharing.Profile) { p.FailRequestsGreaterThanOne = true })},
		{"MPS", `
flags: {mpsRoot: /var/mps, plugin: {sharedDevicesAllocationPolicy: spread}}
sharing:
  mps:
    renameByDefault: true
    resources:
    - {name: gpu, replicas: 10, devices: [0, 1]}
    - {name: gpu, replicas: 4, policy: packed, memory: {limit: share}, rename: part}
`, withDefaults(func(p *sharing.Profile) {
			p.Policy, p.Grants.MPSRoot = sharing.Spread, "/var/mps"
			p.TimeSlicing = []sharing.ReplicatedResource{
				{Path: "sharing.mps.resources[0]", Resource: "nvidia.com/gpu", Replicas: 10, Rename: "nvidia.com/gpu.shared", Policy: sharing.Distributed, Select: sharing.Selection{List: selectors(t, "0", "1")}, MPS: true},
				{Path: "sharing.mps.resources[1]", Resource: "nvidia.com/gpu", Replicas: 4, Rename: "nvidia.com/part", Policy: sharing.Packed, MPS: true, Guard: sharing.MemoryGuard{Share: true, Grace: 30 * time.Second}},
			}
		})},
		{"MPS beside time-slicing: what selects some comes first", `
sharing:
  mps:
    failRequestsGreaterThanOne: false
    resources: [{name: gpu, replicas: 3}]
  timeSlicing:
    resources: [{name: gpu, replicas: 2, devices: 1}]
`, withDefaults(shares(
			sharing.ReplicatedResource{Path: first, Resource: "nvidia.com/gpu", Replicas: 2, Policy: sharing.Distributed, Select: sharing.Selection{Count: 1}},
			sharing.ReplicatedResource{Path: "sharing.mps.resources[0]", Resource: "nvidia.com/gpu", Replicas: 3, Policy: sharing.Distributed, MPS: true, SeveralShares: true},
		))},
		{"one policy for all entries of a name", `
sharing:
  timeSlicing:
    resources:
    - {name: gpu, replicas: 1, devices: [7]}
    - {name: gpu, replicas: 4, policy: spread, spread: strict}
`, withDefaults(shares(
			sharing.ReplicatedResource{Path: first, Resource: "nvidia.com/gpu", Replicas: 1, Policy: sharing.Spread, SpreadStrict: true, Select: sharing.Selection{List: selectors(t, "7")}},
			sharing.ReplicatedResource{Path: "sharing.timeSlicing.resources[1]", Resource: "nvidia.com/gpu", Replicas: 4, Policy: sharing.Spread, SpreadStrict: true},
		))},
		{"rename by default", `
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {name: gpu, replicas: 1, devices: 1}
    - {name: gpu, replicas: 1, devices: 2, rename: whole}
    - {name: gpu, replicas: 2, rename: twice, devices: 1}
    - {name: gpu, replicas: 3}
`, withDefaults(shares(
			sharing.ReplicatedResource{Path: first, Resource: "nvidia.com/gpu", Replicas: 1, Policy: sharing.Distributed, Select: sharing.Selection{Count: 1}},
			sharing.ReplicatedResource{Path: "sharing.timeSlicing.resources[1]", Resource: "nvidia.com/gpu", Replicas: 1, Rename: "nvidia.com/whole", Policy: sharing.Distributed, Select: sharing.Selection{Count: 2}},
			sharing.ReplicatedResource{Path: "sharing.timeSlicing.resources[2]", Resource: "nvidia.com/gpu", Replicas: 2, Rename: "nvidia.com/twice", Policy: sharing.Distributed, Select: sharing.Selection{Count: 1}},
			sharing.ReplicatedResource{Path: "sharing.timeSlicing.resources[3]", Resource: "nvidia.com/gpu", Replicas: 3, Rename: "nvidia.com/gpu.shared", Policy: sharing.Distributed},
		))},
		{"every form of selector", `
exclude: [2, "00000000:3B:00.0"]
sharing:
  timeSlicing:
    resources:
    - name: gpu
      replicas: 4
      devices: [0, "1", 0:1, GPU-b1028956-cfa2-0990-bf4a-5da9abb51763, MIG-b1028956-cfa2-0990-bf4a-5da9abb51763]
`, withDefaults(func(p *sharing.Profile) {
			share := gpu4
			share.Select.List = selectors(t, "0", "1", "0:1", "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763", "MIG-b1028956-cfa2-0990-bf4a-5da9abb51763")
			p.Exclude, p.TimeSlicing = selectors(t, "2", "00000000:3B:00.0"), []sharing.ReplicatedResource{share}
		})},
		{"names", "resources: {gpus: [{pattern: A100, name: a100}], mig: [{pattern: 1g.*, name: example.com/small}]}", withDefaults(func(p *sharing.Profile) {
			p.GPUNames = []sharing.NamingRule{{Pattern: "A100", Name: "nvidia.com/a100"}, {Pattern: "*", Name: "nvidia.com/gpu"}}
			p.MIGNames = []sharing.NamingRule{{Pattern: "1g.*", Name: "example.com/small"}}
		})},
		{"the last name is not appended twice", `resources: {gpus: [{pattern: "*", name: nvidia.com/gpu}]}`, withDefaults(nil)},
		{"a last name of one's own", `resources: {gpus: [{pattern: "*", name: any}]}`, withDefaults(func(p *sharing.Profile) {
			p.GPUNames = []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/any"}, {Pattern: "*", Name: "nvidia.com/gpu"}}
		})},
		{"anchors and merge keys", `
sharing:
  timeSlicing:
    resources:
    - &base {name: gpu, replicas: 4, devices: [0]}
    - {devices: [1], <<: *base}
    - {<<: [{devices: [2]}, *base], replicas: 5}
`, withDefaults(func(p *sharing.Profile) {
			a, b, c := gpu4, gpu4, gpu4
			a.Select.List, b.Select.List, c.Select.List = selectors(t, "0"), selectors(t, "1"), selectors(t, "2")
			b.Path, c.Path, c.Replicas = "sharing.timeSlicing.resources[1]", "sharing.timeSlicing.resources[2]", 5
			p.TimeSlicing = []sharing.ReplicatedResource{a, b, c}
		})},
		{"the same selector for two resources", `
flags: {migStrategy: mixed}
sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, devices: [0]}, {name: mig-1g.5gb.me, replicas: 4, devices: [0]}]}}
`, withDefaults(func(p *sharing.Profile) {
			a, b := gpu4, gpu4
			a.Select.List, b.Select.List = selectors(t, "0"), selectors(t, "0")
			b.Path, b.Resource = "sharing.timeSlicing.resources[1]", "nvidia.com/mig-1g.5gb.me"
			p.MIGStrategy, p.TimeSlicing = sharing.MIGMixed, []sharing.ReplicatedResource{a, b}
		})},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := parse(t, test.document).Profile
			if diff := cmp.Diff(test.want, got, compareSelectors, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("profile (-want +got):\n%s", diff)
			}
			if len(test.want.TimeSlicing) > 0 && test.want.TimeSlicing[0].Select.All() != got.TimeSlicing[0].Select.All() {
				t.Errorf("selection is %+v", got.TimeSlicing[0].Select)
			}
		})
	}
}

func TestParseProcess(t *testing.T) {
	defaults := StartupSettings{FailOnInitError: true, DriverRoot: "/", DevRoot: "/", ContainerDriverRoot: "/driver-root", DeviceDiscoveryStrategy: "auto"}
	with := func(change func(*StartupSettings)) StartupSettings {
		settings := defaults
		change(&settings)
		return settings
	}
	hook := func(path string) StartupSettings { return with(func(s *StartupSettings) { s.CDIHookPath = path }) }
	tests := []struct {
		name, document string
		want           StartupSettings
	}{
		{"empty", "", defaults},
		{"empty paths are the defaults", `flags: {nvidiaDriverRoot: "", nvidiaDevRoot: "", plugin: {containerDriverRoot: ""}}`, defaults},
		{"the dev root follows the driver root", "flags: {nvidiaDriverRoot: /run/nvidia/driver}",
			StartupSettings{FailOnInitError: true, DriverRoot: "/run/nvidia/driver", DevRoot: "/run/nvidia/driver", ContainerDriverRoot: "/driver-root", DeviceDiscoveryStrategy: "auto"}},
		{"everything", "flags: {failOnInitError: off, nvidiaDriverRoot: /a, nvidiaDevRoot: /b, deviceDiscoveryStrategy: nvml, plugin: {containerDriverRoot: /c, nvidiaCTKPath: /d, cdiFeatureFlags: [x, z], cdiDisableHooks: [update-ldcache, chmod]}, mpsRoot: /e}",
			StartupSettings{MPSRoot: "/e", DriverRoot: "/a", DevRoot: "/b", ContainerDriverRoot: "/c", DeviceDiscoveryStrategy: "nvml", CDIHookPath: "/d", CDIFeatures: "x,z", CDIDisableHooks: "update-ldcache,chmod"}},
		{"the hook by Virgate's own key", "flags: {plugin: {nvidiaCDIHookPath: /own}}", hook("/own")},
		{"the hook by both keys", "flags: {plugin: {nvidiaCDIHookPath: /own, nvidiaCTKPath: /opt/nvidia-ctk}}", hook("/opt/nvidia-ctk")},
		{"no hooks, as text", `flags: {plugin: {cdiDisableHooks: " all "}}`, with(func(s *StartupSettings) { s.CDIDisableHooks = "all" })},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, parse(t, test.document).Startup); diff != "" {
				t.Errorf("process (-want +got):\n%s", diff)
			}
		})
	}
}

// TestBooleans has the words that YAML 1.1 and NVIDIA's plugin take for true
// and false.
func TestBooleans(t *testing.T) {
	words := map[string]bool{
		"true": true, "True": true, "TRUE": true, "yes": true, "Yes": true, "YES": true, "on": true, "On": true, "ON": true, "y": true, "Y": true,
		"false": false, "False": false, "FALSE": false, "no": false, "No": false, "NO": false, "off": false, "Off": false, "OFF": false, "n": false, "N": false,
	}
	for word, want := range words {
		if got := parse(t, "flags: {failOnInitError: "+word+"}").Startup.FailOnInitError; got != want {
			t.Errorf("%s is read as %v", word, got)
		}
		for _, text := range []string{`"` + word + `"`, "!!str " + word} {
			if _, err := Parse("", []byte("flags: {failOnInitError: "+text+"}"), nil); err == nil {
				t.Errorf("%s is accepted for a switch", text)
			}
		}
		if _, err := Parse("", []byte("flags: {plugin: {nvidiaCDIHookPath: "+word+"}}"), nil); err == nil {
			t.Errorf("a bare %s is accepted as text", word)
		}
		parse(t, `flags: {plugin: {nvidiaCDIHookPath: "`+word+`"}}`)
	}
}

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
    nvidiaCDIHookPath: /document
    cdiDisableHooks: chmod
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
		"flags.plugin.nvidiaCTKPath":      {Value: "/usr/bin/hook", Source: "$NVIDIA_CDI_HOOK_PATH"},
		"flags.plugin.cdiDisableHooks":    {Value: "update-ldcache, enable-cuda-compat", Source: "$CDI_DISABLE_HOOKS"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if p := config.Profile; p.MIGStrategy != sharing.MIGMixed || p.DeviceIDs != sharing.ByIndex {
		t.Errorf("profile has strategy %s and IDs by %s", p.MIGStrategy, p.DeviceIDs)
	}
	want := StartupSettings{
		DriverRoot: "/override", DevRoot: "/override", ContainerDriverRoot: "/driver-root", DeviceDiscoveryStrategy: "nvml",
		CDIHookPath: "/usr/bin/hook", CDIDisableHooks: "update-ldcache,enable-cuda-compat",
	}
	if diff := cmp.Diff(want, config.Startup); diff != "" {
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
		{"another channel", "", "imex.channelIDs", "1",
			Problem{File: "$X", Path: "imex.channelIDs", Value: `"1"`, Message: "expected [] or [0]"}},
		{"a channel twice", "", "imex.channelIDs", "0,0",
			Problem{File: "$X", Path: "imex.channelIDs", Value: `"0,0"`, Message: "expected [] or [0]"}},
		{"unknown setting", "", "flags.nothing", "x",
			Problem{File: "$X", Path: "flags.nothing", Value: `"x"`, Message: "no such setting"}},
		{"the document is still judged", "flags: {migStrategy: mixd}", "flags.migStrategy", "mixed",
			Problem{File: "doc.yaml", Line: 1, Column: 22, Path: "flags.migStrategy", Value: `"mixd"`, Message: "expected none, single or mixed"}},
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

// TestOverrideProblemOnce has two documents in one file, with the same override.
func TestOverrideProblemOnce(t *testing.T) {
	manifest := "apiVersion: v1\nkind: ConfigMap\ndata: {a: '', b: ''}\n"
	_, err := ParseFile("map.yaml", []byte(manifest), Overrides{"flags.migStrategy": {Value: "x", Source: "--mig-strategy"}})
	const want = `--mig-strategy: flags.migStrategy: expected none, single or mixed (got "x")`
	if err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
}

func TestProcessCheck(t *testing.T) {
	have := StartupSettings{FailOnInitError: true, DriverRoot: "/a", DevRoot: "/a", ContainerDriverRoot: "/c", DeviceDiscoveryStrategy: "auto"}
	if err := have.CheckUnchanged(have); err != nil {
		t.Errorf("without a change: %v", err)
	}
	next := have
	next.FailOnInitError, next.DevRoot = false, "/b"
	const want = "flags.failOnInitError: cannot change while the program runs (is true, wanted false): restart it\n" +
		"flags.nvidiaDevRoot: cannot change while the program runs (is /a, wanted /b): restart it"
	if err := have.CheckUnchanged(next); err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
	for _, next := range []StartupSettings{{DriverRoot: "/x"}, {ContainerDriverRoot: "/x"}, {DeviceDiscoveryStrategy: "nvml"}, {CDIHookPath: "/x"}, {CDIFeatures: "x"}, {CDIDisableHooks: "x"}, {MPSRoot: "/x"}} {
		if err := (StartupSettings{}).CheckUnchanged(next); err == nil {
			t.Errorf("a change to %+v is accepted", next)
		}
	}
}

func TestNotes(t *testing.T) {
	document := `version: v1
flags:
  migStrategy: single
  useNodeFeatureAPI: false
  plugin:
    sharedDevicesAllocationPolicy: spread
    nvidiaCDIHookPath: /hook
  gfd:
    sleepInterval: 60s
resources:
  gpus:
  - {pattern: A100, name: a100}
  - {pattern: "*", name: gpu}
exclude: [3]
sharing:
  timeSlicing:
    resources:
    - name: gpu
      devices: 1
      replicas: 1
    - name: gpu
      devices: [0]
      replicas: 2
      rename: two
      policy: spread
      spread: strict
`
	const entries = "sharing.timeSlicing.resources"
	const take = " are shared; NVIDIA's plugin takes all"
	want := []Note{
		{3, "flags.migStrategy", "GPUs that do not conform are left out with a warning; NVIDIA's plugin does not start"},
		{4, "flags.useNodeFeatureAPI", "has no effect: it configures GPU feature discovery, not the device plugin"},
		{6, "flags.plugin.sharedDevicesAllocationPolicy", "Virgate's own value; NVIDIA's plugin refuses it"},
		{7, "flags.plugin.nvidiaCDIHookPath", "Virgate's own; NVIDIA's plugin has no such key"},
		{9, "flags.gfd.sleepInterval", "has no effect: it configures GPU feature discovery, not the device plugin"},
		{12, "resources.gpus[0]", "named here; NVIDIA's plugin reads resources and ignores it"},
		{12, "resources.gpus[0]", sharing.NotEvicted},
		{14, "exclude", "Virgate's own: these are never offered; NVIDIA's plugin has no such key"},
		{19, entries + "[0].devices", "only the first devices" + take},
		{20, entries + "[0].replicas", "1 means exclusive, as without the entry; NVIDIA's plugin wants 2 or more"},
		{22, entries + "[1].devices", "only these devices" + take},
		{24, entries + "[1].rename", "renamed here; NVIDIA's plugin ignores it"},
		{24, entries + "[1].rename", sharing.NotEvicted},
		{25, entries + "[1].policy", "Virgate's own; NVIDIA's plugin has one policy for the node"},
		{26, entries + "[1].spread", "Virgate's own: a container never gets two devices of one unit; NVIDIA's plugin has no such key"},
	}
	if diff := cmp.Diff(want, parse(t, document).Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

func TestNotesOfSingleKeys(t *testing.T) {
	const unknown = "has no effect, no GPU or partition has this name: expected nvidia.com/gpu, nvidia.com/mig- and a MIG profile, or a name from resources"
	tests := []struct {
		name, document string
		overrides      Overrides
		want           []Note
	}{
		{"what NVIDIA's plugin does too", "flags: {migStrategy: mixed}\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2, rename: gpu.shared}]}}", nil, nil},
		{"its own default name", `resources: {gpus: [{pattern: "*", name: gpu}]}`, nil, nil},
		{"an empty section", "sharing: {timeSlicing: {}}", nil, nil},
		{"no resources", "sharing: {timeSlicing: {renameByDefault: true}}", nil,
			[]Note{{1, "sharing.timeSlicing", "names no resources, so nothing is time-sliced; NVIDIA's plugin refuses this"}}},
		{"strategy none", "flags: {migStrategy: none}", nil,
			[]Note{{1, "flags.migStrategy", "GPUs with MIG enabled are not offered; NVIDIA's plugin offers them as whole GPUs, on which nothing runs"}}},
		{"nothing said, nothing noted", "", nil, nil},
		{"IMEX", "imex: {channelIDs: [0], required: true}", nil, nil},
		{"an override", "flags: {migStrategy: single}", Overrides{"flags.migStrategy": {Value: "mixed", Source: "--mig-strategy"}}, nil},
		{"a strategy of Virgate's among others", "flags: {plugin: {deviceListStrategy: [cdi-cri, driver-mounts]}}", nil,
			[]Note{{1, "flags.plugin.deviceListStrategy", "Virgate's own value; NVIDIA's plugin refuses it"}}},
		{"strategies of NVIDIA's plugin", "flags: {plugin: {deviceListStrategy: [cdi-cri, envvar], passDeviceSpecs: true}}", nil, nil},
		{"a key of Virgate's", "flags: {plugin: {driverMounts: {hostPath: /opt/nvidia}}}", nil,
			[]Note{{1, "flags.plugin.driverMounts.hostPath", "Virgate's own; NVIDIA's plugin has no such key"}}},
		{"an override without effect", "", Overrides{"flags.plugin.kubeletSocket": {Value: "/k", Source: "$KUBELET_SOCKET"}},
			[]Note{{0, "flags.plugin.kubeletSocket", "$KUBELET_SOCKET: " + "has no effect: Virgate finds the kubelet's socket in its --device-plugin-dir"}}},
		{"a name that NVIDIA's plugin takes too", "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu.shared, replicas: 2}, {name: h100, replicas: 2}]}}\nresources: {gpus: [{pattern: '*', name: gpu}]}", nil,
			[]Note{{1, "sharing.timeSlicing.resources[0].name", "has no effect, no GPU or partition has this name: expected nvidia.com/gpu, nvidia.com/mig- and a MIG profile, or a name from resources"},
				{1, "sharing.timeSlicing.resources[1].name", "has no effect, no GPU or partition has this name: expected nvidia.com/gpu, nvidia.com/mig- and a MIG profile, or a name from resources"}}},
		{"names that resources could make", "sharing: {timeSlicing: {resources: [{name: gpu-b, replicas: 2}, {name: pgpu, replicas: 2}, {name: mig-small, replicas: 2}, {name: mig-7, replicas: 2}]}}\nresources: {gpus: [{pattern: '*', name: gpu-a}]}", nil,
			[]Note{{1, "sharing.timeSlicing.resources[0].name", unknown + ", did you mean nvidia.com/gpu-a?"}, {1, "sharing.timeSlicing.resources[1].name", unknown + ", did you mean nvidia.com/gpu?"},
				{1, "sharing.timeSlicing.resources[2].name", unknown}, {1, "sharing.timeSlicing.resources[3].name", unknown}, {2, "resources.gpus[0]", "named here; NVIDIA's plugin reads resources and ignores it"}}},
		{"a model that is no misspelling of another", "resources: {gpus: [{pattern: A100, name: a100}]}\nsharing: {mps: {resources: [{name: h100, replicas: 2}]}}", nil,
			[]Note{{1, "resources.gpus[0]", "named here; NVIDIA's plugin reads resources and ignores it"}, {1, "resources.gpus[0]", sharing.NotEvicted},
				{2, "sharing.mps.resources[0].name", "has no effect, no GPU or partition has this name: expected nvidia.com/gpu, nvidia.com/mig- and a MIG profile, or a name from resources, did you mean nvidia.com/a100?"}}},
		{"MPS", "sharing: {mps: {failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 2}]}}", nil, nil},
		{"MPS, several shares", "sharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 2}]}}", nil,
			[]Note{{1, "sharing.mps.failRequestsGreaterThanOne", "a container may have several shares of one unit, and their part of it; NVIDIA's plugin has one limit for all"}}},
		{"MPS of partitions", "sharing: {mps: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}", nil,
			[]Note{{1, "sharing.mps.resources[0]", "partitions have a daemon each; NVIDIA's plugin refuses them"}}},
		{"MPS beside time-slicing", "sharing:\n  timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0]}]}\n  mps: {resources: [{name: gpu, replicas: 2}]}", nil,
			[]Note{{2, "sharing.timeSlicing.resources[0].devices", "only these devices are shared; NVIDIA's plugin takes all"},
				{3, "sharing.mps", "beside timeSlicing; NVIDIA's plugin takes one of the two for a node"}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			config, err := Parse("", []byte(test.document), test.overrides)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, config.Notes); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
		})
	}
}

var update = flag.Bool("update", false, "write the golden files")

// TestBadDocuments compares all problems of each document with the golden file
// beside it.
func TestBadDocuments(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := ParseFile(filepath.Base(file), data, nil)
			var problems Problems
			if !errors.As(err, &problems) {
				t.Fatalf("error is %T %v, want Problems", err, err)
			}
			empty := File{Name: got.Name, Kind: got.Kind}
			if diff := cmp.Diff(empty, got, compareSelectors); diff != "" {
				t.Errorf("a bad document has content (-want +got):\n%s", diff)
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".want"
			text := problems.Error() + "\n"
			if *update {
				if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), text); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

func TestExamples(t *testing.T) {
	files, err := fs.Glob(os.DirFS("."), "examples/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(file, data, nil); err != nil {
			t.Errorf("%s does not parse:\n%v", file, err)
		}
		if !strings.HasPrefix(string(data), "# ") {
			t.Errorf("%s does not begin with what it is for", file)
		}
		names = append(names, strings.TrimSuffix(path.Base(file), ".yaml"))
	}
	want := []string{
		"dra-mps", "dra-partitions", "dra-time-slices", "excluded-gpu", "exclusive", "grants-cdi", "grants-driver-mounts", "grants-volume-mounts", "health", "memory-guard", "mig-balanced", "mig-layouts", "mig-mixed", "mig-replicas", "mig-single", "mps", "names-by-model", "side-by-side", "time-slices",
		"time-slicing-10-packed", "time-slicing-10-renamed", "time-slicing-10", "time-slicing-4-renamed", "time-slicing-4",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("examples (-want +got):\n%s", diff)
	}
}

// TestCheckMPS checks that only a shared unit needs a daemon.
func TestCheckMPS(t *testing.T) {
	for _, test := range []struct{ document, want string }{
		{"sharing: {mps: {resources: [{name: gpu, replicas: 1}]}}", ""},
		{"sharing: {mps: {resources: [{name: gpu, devices: [0], replicas: 1}, {name: gpu, replicas: 3}]}}", "sharing.mps.resources[1]: "},
		{"flags: {mpsRoot: /run/mps}\nsharing: {mps: {resources: [{name: gpu, replicas: 3}]}}", ""},
	} {
		err := parse(t, test.document).CheckMPS()
		if (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.document, err, test.want)
		}
	}
}

// TestCheckNode has a profile whose replicas fit into a list on one node and not on another.
func TestCheckNode(t *testing.T) {
	gpus := func(count int) (gpus []sharing.GPU) {
		for i := range count {
			gpus = append(gpus, sharing.GPU{Index: i, UUID: fmt.Sprintf("GPU-%d", i)})
		}
		return gpus
	}
	const shares = "sharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 16384}\n"
	for _, test := range []struct {
		name, document string
		gpus           int
		want           string
	}{
		{"two GPUs", shares, 2, ""},
		{"no GPU", shares, 0, ""},
		{"three GPUs", shares, 3, "f[any]:4: sharing.timeSlicing.resources[0].replicas: 3 units of nvidia.com/gpu with so many replicas are too many on this node, the kubelet takes no list beyond 4 MiB, which is 39321 devices: write at most 13107, or offer them under several names, by devices and rename (got 16384)"},
		{"beside another entry", "sharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, devices: [0], replicas: 39000}\n    - {name: gpu, replicas: 200}\n", 3, "f[any]:5: sharing.timeSlicing.resources[1].replicas: 2 units of nvidia.com/gpu with so many replicas are too many on this node, the kubelet takes no list beyond 4 MiB, which is 39321 devices: write at most 160, or offer them under several names, by devices and rename (got 200)"},
		{"under two names", "sharing: {timeSlicing: {resources: [{name: gpu, devices: [0], replicas: 39000, rename: many}, {name: gpu, replicas: 200}]}}", 3, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := ""
			if err := parse(t, test.document).SelectedFrom("f", "any", nil).CheckNode(gpus(test.gpus)); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func TestExcludeByPattern(t *testing.T) {
	config := parse(t, "exclude: [{pattern: T400}, 3]")
	if diff := cmp.Diff([]string{"T400", "3"}, []string{config.Profile.Exclude[0].String(), config.Profile.Exclude[1].String()}); diff != "" {
		t.Error(diff)
	}
	if !config.Profile.Exclude[0].MatchGPU(sharing.GPU{Model: "NVIDIA T400 4GB"}) || config.Profile.Exclude[0].MatchGPU(sharing.GPU{Model: "Tesla T4"}) {
		t.Error("the pattern selects other GPUs")
	}
}

func TestDRA(t *testing.T) {
	const shared = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, rename: shared}]}}\n"
	for _, test := range []struct {
		document string
		want     sharing.DRAConfig
		notes    string
	}{
		{"", sharing.DRAConfig{}, ""},
		{"dra: {}", sharing.DRAConfig{}, ""},
		{"dra: {resources: all}", sharing.DRAConfig{All: true}, ""},
		{"dra: {resources: []}", sharing.DRAConfig{}, ""},
		{shared + "dra: {resources: [shared, mig-1g.5gb, nvidia.com/gpu]}", sharing.DRAConfig{Resources: []string{"nvidia.com/shared", "nvidia.com/mig-1g.5gb", "nvidia.com/gpu"}}, ""},
		{"mig: {manage: true}\ndra: {resources: all, dynamicMIG: true}", sharing.DRAConfig{All: true, DynamicMIG: true}, ""},
		{"dra: {dynamicMIG: true}", sharing.DRAConfig{DynamicMIG: true}, "dra.dynamicMIG: has no effect without mig.manage: true, dra.dynamicMIG: has no effect without resources"},
	} {
		config := parse(t, test.document)
		if diff := cmp.Diff(test.want, config.Profile.DRA); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.document, diff)
		}
		var notes []string
		for _, note := range config.Notes {
			if strings.HasPrefix(note.Path, "dra.") {
				notes = append(notes, note.Path+": "+note.Message)
			}
		}
		if got := strings.Join(notes, ", "); got != test.notes {
			t.Errorf("%s: notes %q, want %q", test.document, got, test.notes)
		}
	}
	dra := sharing.DRAConfig{Resources: []string{"nvidia.com/gpu"}}
	if !dra.Offers("nvidia.com/gpu") || dra.Offers("nvidia.com/gpu.shared") || (sharing.DRAConfig{}).Offers("nvidia.com/gpu") || !(sharing.DRAConfig{All: true}).Offers("a/b") {
		t.Error("Offers")
	}
}

func TestRetireAfter(t *testing.T) {
	for _, test := range []struct {
		document, problem string
		want              sharing.RetireAfter
	}{
		{"", "", sharing.RetireAfter{}},
		{"retireAfter: {}", "", sharing.RetireAfter{}},
		{"retireAfter: {shrink: 0s}", "", sharing.RetireAfter{ShrinkSet: true}},
		{"retireAfter: {shrink: 10m, switch: 90s}", "", sharing.RetireAfter{Shrink: 10 * time.Minute, ShrinkSet: true, Switch: 90 * time.Second}},
		{"retireAfter: {shrink: -1s}", "retireAfter.shrink: expected a duration from 0s", sharing.RetireAfter{}},
		{"retireAfter: {switch: soon}", "retireAfter.switch: expected a duration from 0s", sharing.RetireAfter{}},
		{"retireAfter: {rename: 1s}", "retireAfter.rename", sharing.RetireAfter{}},
	} {
		config, err := Parse("", []byte(test.document), nil)
		if (err == nil) != (test.problem == "") || err != nil && !strings.Contains(err.Error(), test.problem) {
			t.Errorf("%s: error %v, want %q", test.document, err, test.problem)
		}
		if config.Profile.RetireAfter != test.want {
			t.Errorf("%s: %+v, want %+v", test.document, config.Profile.RetireAfter, test.want)
		}
	}
}
