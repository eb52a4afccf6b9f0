package configs

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNotes(t *testing.T) {
	document := `version: v1
flags:
  migStrategy: single
  useNodeFeatureAPI: false
  plugin:
    sharedDevicesAllocationPolicy: spread
    nvidiaCTKPath: /ctk
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
	const take = " are time-sliced; NVIDIA's plugin takes all"
	want := []Note{
		{3, "flags.migStrategy", "GPUs that do not conform are left out with a warning; NVIDIA's plugin does not start"},
		{4, "flags.useNodeFeatureAPI", inertNotHere},
		{6, "flags.plugin.sharedDevicesAllocationPolicy", "Virgate's own value; NVIDIA's plugin refuses it"},
		{7, "flags.plugin.nvidiaCTKPath", inertCTK},
		{9, "flags.gfd.sleepInterval", inertNotHere},
		{12, "resources.gpus[0]", "named here; NVIDIA's plugin reads resources and ignores it"},
		{14, "exclude", "Virgate's own: these are never offered; NVIDIA's plugin has no such key"},
		{19, entries + "[0].devices", "only the first devices" + take},
		{20, entries + "[0].replicas", "1 means exclusive, as without the entry; NVIDIA's plugin wants 2 or more"},
		{22, entries + "[1].devices", "only these devices" + take},
		{24, entries + "[1].rename", "renamed here; NVIDIA's plugin ignores it"},
		{25, entries + "[1].policy", "Virgate's own; NVIDIA's plugin has one policy for the node"},
		{26, entries + "[1].spread", "Virgate's own: a container never gets two devices of one unit; NVIDIA's plugin has no such key"},
	}
	if diff := cmp.Diff(want, parse(t, document).Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

func TestNotesOfSingleKeys(t *testing.T) {
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
		{"IMEX without channels", "imex: {required: true}", nil, []Note{{1, "imex.required", "has no effect without channels"}}},
		{"an override", "flags: {migStrategy: single}", Overrides{"flags.migStrategy": {Value: "mixed", Source: "--mig-strategy"}}, nil},
		{"a strategy of Virgate's among others", "flags: {plugin: {deviceListStrategy: [cdi-cri, driver-mounts]}}", nil,
			[]Note{{1, "flags.plugin.deviceListStrategy", "Virgate's own value; NVIDIA's plugin refuses it"}}},
		{"strategies of NVIDIA's plugin", "flags: {plugin: {deviceListStrategy: [cdi-cri, envvar], passDeviceSpecs: true}}", nil, nil},
		{"a key of Virgate's", "flags: {plugin: {driverMounts: {hostPath: /opt/nvidia}}}", nil,
			[]Note{{1, "flags.plugin.driverMounts.hostPath", "Virgate's own; NVIDIA's plugin has no such key"}}},
		{"an override without effect", "", Overrides{"flags.mpsRoot": {Value: "/mps", Source: "$MPS_ROOT"}},
			[]Note{{0, "flags.mpsRoot", "$MPS_ROOT: " + inertNoMPS}}},
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
