package configs

import (
	"testing"

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
		GPUNames:    []sharing.Naming{{Pattern: "*", Name: "nvidia.com/gpu"}},
		Policy:      sharing.Distributed,
		DeviceIDs:   sharing.ByUUID,
		Grants: sharing.Grants{
			Strategies: []sharing.ListStrategy{sharing.Envvar}, AnnotationPrefix: "cdi.k8s.io/",
			DriverHostPath: "/usr/local/nvidia", DriverContainerPath: "/usr/local/nvidia",
		},
		Health: sharing.DefaultHealthRules(),
		MIG:    sharing.Repartition{WhenBusy: sharing.Wait},
	}
	if change != nil {
		change(&p)
	}
	return p
}

func shares(list ...sharing.Share) func(*sharing.Profile) {
	return func(p *sharing.Profile) { p.Shares = list }
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
	gpu4 := sharing.Share{Path: first, Resource: "nvidia.com/gpu", Replicas: 4, Policy: sharing.Distributed}
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
			p.Policy, p.Shares = sharing.Spread, []sharing.Share{share}
		})},
		{"fail requests greater than one", "sharing: {timeSlicing: {failRequestsGreaterThanOne: yes}}", withDefaults(func(p *sharing.Profile) { p.OneShareOnly = true })},
		{"one policy for all entries of a name", `
sharing:
  timeSlicing:
    resources:
    - {name: gpu, replicas: 1, devices: [7]}
    - {name: gpu, replicas: 4, policy: spread, spread: strict}
`, withDefaults(shares(
			sharing.Share{Path: first, Resource: "nvidia.com/gpu", Replicas: 1, Policy: sharing.Spread, SpreadStrict: true, Select: sharing.Selection{List: selectors(t, "7")}},
			sharing.Share{Path: "sharing.timeSlicing.resources[1]", Resource: "nvidia.com/gpu", Replicas: 4, Policy: sharing.Spread, SpreadStrict: true},
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
			sharing.Share{Path: first, Resource: "nvidia.com/gpu", Replicas: 1, Policy: sharing.Distributed, Select: sharing.Selection{Count: 1}},
			sharing.Share{Path: "sharing.timeSlicing.resources[1]", Resource: "nvidia.com/gpu", Replicas: 1, Rename: "nvidia.com/whole", Policy: sharing.Distributed, Select: sharing.Selection{Count: 2}},
			sharing.Share{Path: "sharing.timeSlicing.resources[2]", Resource: "nvidia.com/gpu", Replicas: 2, Rename: "nvidia.com/twice", Policy: sharing.Distributed, Select: sharing.Selection{Count: 1}},
			sharing.Share{Path: "sharing.timeSlicing.resources[3]", Resource: "nvidia.com/gpu", Replicas: 3, Rename: "nvidia.com/gpu.shared", Policy: sharing.Distributed},
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
			p.Exclude, p.Shares = selectors(t, "2", "00000000:3B:00.0"), []sharing.Share{share}
		})},
		{"names", "resources: {gpus: [{pattern: A100, name: a100}], mig: [{pattern: 1g.*, name: example.com/small}]}", withDefaults(func(p *sharing.Profile) {
			p.GPUNames = []sharing.Naming{{Pattern: "A100", Name: "nvidia.com/a100"}, {Pattern: "*", Name: "nvidia.com/gpu"}}
			p.MIGNames = []sharing.Naming{{Pattern: "1g.*", Name: "example.com/small"}}
		})},
		{"the last name is not appended twice", `resources: {gpus: [{pattern: "*", name: nvidia.com/gpu}]}`, withDefaults(nil)},
		{"a last name of one's own", `resources: {gpus: [{pattern: "*", name: any}]}`, withDefaults(func(p *sharing.Profile) {
			p.GPUNames = []sharing.Naming{{Pattern: "*", Name: "nvidia.com/any"}, {Pattern: "*", Name: "nvidia.com/gpu"}}
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
			p.Shares = []sharing.Share{a, b, c}
		})},
		{"the same selector for two resources", `
flags: {migStrategy: mixed}
sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4, devices: [0]}, {name: mig-1g.5gb.me, replicas: 4, devices: [0]}]}}
`, withDefaults(func(p *sharing.Profile) {
			a, b := gpu4, gpu4
			a.Select.List, b.Select.List = selectors(t, "0"), selectors(t, "0")
			b.Path, b.Resource = "sharing.timeSlicing.resources[1]", "nvidia.com/mig-1g.5gb.me"
			p.MIGStrategy, p.Shares = sharing.MIGMixed, []sharing.Share{a, b}
		})},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := parse(t, test.document).Profile
			if diff := cmp.Diff(test.want, got, compareSelectors, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("profile (-want +got):\n%s", diff)
			}
			if len(test.want.Shares) > 0 && test.want.Shares[0].Select.All() != got.Shares[0].Select.All() {
				t.Errorf("selection is %+v", got.Shares[0].Select)
			}
		})
	}
}

func TestParseProcess(t *testing.T) {
	defaults := Process{FailOnInitError: true, DriverRoot: "/", DevRoot: "/", ContainerDriverRoot: "/driver-root", DeviceDiscoveryStrategy: "auto", CDIHookPath: "/usr/bin/nvidia-cdi-hook"}
	tests := []struct {
		name, document string
		want           Process
	}{
		{"empty", "", defaults},
		{"empty paths are the defaults", `flags: {nvidiaDriverRoot: "", nvidiaDevRoot: "", plugin: {containerDriverRoot: ""}}`, defaults},
		{"the dev root follows the driver root", "flags: {nvidiaDriverRoot: /run/nvidia/driver}",
			Process{FailOnInitError: true, DriverRoot: "/run/nvidia/driver", DevRoot: "/run/nvidia/driver", ContainerDriverRoot: "/driver-root", DeviceDiscoveryStrategy: "auto", CDIHookPath: "/usr/bin/nvidia-cdi-hook"}},
		{"everything", "flags: {failOnInitError: off, nvidiaDriverRoot: /a, nvidiaDevRoot: /b, deviceDiscoveryStrategy: nvml, plugin: {containerDriverRoot: /c, nvidiaCDIHookPath: /d, cdiFeatureFlags: [x, z]}}",
			Process{DriverRoot: "/a", DevRoot: "/b", ContainerDriverRoot: "/c", DeviceDiscoveryStrategy: "nvml", CDIHookPath: "/d", CDIFeatures: "x,z"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, parse(t, test.document).Process); diff != "" {
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
		if got := parse(t, "flags: {failOnInitError: "+word+"}").Process.FailOnInitError; got != want {
			t.Errorf("%s is read as %v", word, got)
		}
		for _, text := range []string{`"` + word + `"`, "!!str " + word} {
			if _, err := Parse("", []byte("flags: {failOnInitError: "+text+"}"), nil); err == nil {
				t.Errorf("%s is accepted for a switch", text)
			}
		}
		if _, err := Parse("", []byte("flags: {mpsRoot: "+word+"}"), nil); err == nil {
			t.Errorf("a bare %s is accepted as text", word)
		}
		parse(t, `flags: {mpsRoot: "`+word+`"}`)
	}
}
