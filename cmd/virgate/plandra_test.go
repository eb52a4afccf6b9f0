package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

// TestPlanDRA checks that plan --dra prints objects for kubectl: each with its kind, the same in both formats,
// and warnings apart from them.
func TestPlanDRA(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile.yaml")
	write := func(dra string) {
		t.Helper()
		document := "flags: {migStrategy: mixed}\nmig: {manage: true}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n" + dra
		if err := os.WriteFile(path, []byte(document), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("dra: {resources: [nvidia.com/gpu, nvidia.com/mig-1g.10gb, nvidia.com/mig-1g.5gb], dynamicMIG: true}\n")
	code, stdout, stderr := program(t, "plan", "--node", "sim:h100x2", "--node-name", "worker-1", "--config", path, "--dra", "-o", "yaml")
	if code != 0 || stderr != "warning: dra.resources: nvidia.com/mig-1g.5gb: nothing on this node has this name\n" {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	var kinds []string
	var devices int
	for document := range strings.SplitSeq(stdout, "---\n") {
		var slice resourceapi.ResourceSlice
		if err := yaml.Unmarshal([]byte(document), &slice); err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, slice.APIVersion+" "+slice.Kind+" "+slice.Name)
		devices += len(slice.Spec.Devices)
	}
	if diff := cmp.Diff([]string{
		"resource.k8s.io/v1 ResourceSlice 00000-gpu.virgate.github.io-worker-1", "resource.k8s.io/v1 ResourceSlice 00001-gpu.virgate.github.io-worker-1",
		"resource.k8s.io/v1 DeviceClass virgate-gpu.nvidia.com", "resource.k8s.io/v1 DeviceClass virgate-mig-1g.10gb.nvidia.com",
	}, kinds); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	if devices != 2*(7+1) {
		t.Errorf("%d devices, want 7 places and the whole GPU of two", devices)
	}
	_, inJSON, _ := program(t, "plan", "--node", "sim:h100x2", "--node-name", "worker-1", "--config", path, "--dra", "-o", "json")
	var list struct {
		Kind  string
		Items []map[string]any
	}
	if err := json.Unmarshal([]byte(inJSON), &list); err != nil || list.Kind != "List" || len(list.Items) != len(kinds) {
		t.Errorf("%v: %s of %d", err, list.Kind, len(list.Items))
	}
	if _, plain, _ := program(t, "plan", "--node", "sim:h100x2", "--node-name", "worker-1", "--config", path, "--dra"); plain != stdout {
		t.Error("YAML is not the default")
	}

	if _, named, _ := program(t, "plan", "--node", "sim:h100x2", "--config", path, "--dra", "--dra-nvidia-names"); !strings.Contains(named, "driver: gpu.nvidia.com\n") || strings.Contains(named, "virgate.github.io") {
		t.Errorf("under NVIDIA's name:\n%s", named)
	}

	// A GPU that cannot be divided on demand is reported.
	_, _, stderr = program(t, "plan", "--node", "sim:dgx-a100", "--config", path, "--dra")
	if !strings.Contains(stderr, "GPU 7 is offered whole: its MIG mode is off") {
		t.Error(stderr)
	}
	for output, want := range map[string]string{
		"table": "(?s)^KIND +NAME +DEVICES\nResourceSlice +00000-.*\nDeviceClass ",
		"wide":  "(?s)\\nResourceSlice +0000.* gpu-",
		"name":  "(?s)^resourceslice.resource.k8s.io/00000-.*\ndeviceclass.resource.k8s.io/[a-z.-]+\n",
	} {
		code, stdout, stderr := program(t, "plan", "--node", "sim:h100", "--config", path, "--dra", "-o", output)
		if code != 0 || !regexp.MustCompile(want).MatchString(stdout) {
			t.Errorf("-o %s: exit code %d, %s%s", output, code, stderr, stdout)
		}
	}
	if code, _, stderr := program(t, "plan", "--node", "sim:h100", "--config", path, "--dra", "--from", path); code != 2 {
		t.Errorf("exit code %d, %s", code, stderr)
	}
}
