package grants

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

// request is a request for devices of a node's resource, by their places in its list.
type request struct {
	node, resource string
	places         []int
}

// requests are for whole GPUs, for shares (two of them of one GPU), and for partitions.
func requests() []request {
	return []request{
		{"dgx-a100", "nvidia.com/gpu", []int{3, 1}},
		{"t4", "nvidia.com/gpu", []int{0}},
		{"dgx-a100+all-1g.5gb", "nvidia.com/mig-1g.5gb", []int{8, 0}},
		{"a30x4+all-balanced", "nvidia.com/mig-1g.6gb", []int{1}},
	}
}

func TestAnswers(t *testing.T) {
	const sharing = "\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 3}]}}"
	const imex = "\nimex: {channelIDs: [0], required: true}"
	profiles := []struct{ name, flags string }{
		{"envvar", `{migStrategy: mixed}`},
		{"envvar-index", `{migStrategy: mixed, plugin: {deviceIDStrategy: index}}`},
		{"envvar-nodes", `{migStrategy: mixed, plugin: {passDeviceSpecs: true}}`},
		{"envvar-nodes-devroot", `{migStrategy: mixed, nvidiaDevRoot: /run/nvidia/driver, plugin: {passDeviceSpecs: true}}`},
		{"envvar-extras", `{migStrategy: mixed, gdsEnabled: true, mofedEnabled: true, gdrcopyEnabled: true}`},
		{"volume-mounts", `{migStrategy: mixed, plugin: {deviceListStrategy: volume-mounts}}`},
		{"volume-mounts-index", `{migStrategy: mixed, plugin: {deviceListStrategy: volume-mounts, deviceIDStrategy: index}}`},
		{"cdi-annotations", `{migStrategy: mixed, plugin: {deviceListStrategy: cdi-annotations}}`},
		{"cdi-annotations-prefix", `{migStrategy: mixed, plugin: {deviceListStrategy: cdi-annotations, cdiAnnotationPrefix: example.com/}}`},
		{"cdi-cri", `{migStrategy: mixed, plugin: {deviceListStrategy: cdi-cri}}`},
		{"cdi-cri-index", `{migStrategy: mixed, plugin: {deviceListStrategy: cdi-cri, deviceIDStrategy: index}}`},
		{"cdi-cri-extras", `{migStrategy: mixed, gdsEnabled: true, mofedEnabled: true, gdrcopyEnabled: true, plugin: {deviceListStrategy: cdi-cri, passDeviceSpecs: true}}`},
		{"driver-mounts", `{migStrategy: mixed, plugin: {deviceListStrategy: driver-mounts}}`},
		{"imex-envvar", `{migStrategy: mixed, plugin: {passDeviceSpecs: true}}` + imex},
		{"imex-volume-mounts", `{migStrategy: mixed, plugin: {deviceListStrategy: volume-mounts}}` + imex},
		{"imex-cdi", `{migStrategy: mixed, gdsEnabled: true, plugin: {deviceListStrategy: "cdi-cri,cdi-annotations"}}` + imex},
		{"imex-driver-mounts", `{migStrategy: mixed, plugin: {deviceListStrategy: driver-mounts}}` + imex},
		{"several", `{migStrategy: mixed, gdsEnabled: true, plugin: {deviceListStrategy: "envvar,volume-mounts,cdi-annotations,cdi-cri", passDeviceSpecs: true}}`},
	}
	for _, profile := range profiles {
		t.Run(profile.name, func(t *testing.T) {
			t.Parallel()
			var answers bytes.Buffer
			for _, r := range requests() {
				document := "flags: " + profile.flags
				if r.node == "t4" {
					document += sharing
				}
				answers.WriteString("# " + r.node + ": " + r.resource + "\n")
				answers.WriteString(indented(t, newStage(t, r.node, document), r) + "\n")
			}
			compare(t, filepath.Join("testdata", profile.name+".txt"), answers.String())
		})
	}
}

func indented(t *testing.T, s stage, r request) string {
	t.Helper()
	data, err := protojson.Marshal(s.allocate(t, r.resource, r.places...))
	if err != nil {
		t.Fatal(err)
	}
	// protojson varies its whitespace on purpose.
	var out bytes.Buffer
	if err := json.Indent(&out, data, "", "  "); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func compare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; go test ./test/grants -update writes it", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// TestGrantCase is the case "grant": two GPUs by driver-mounts.
func TestGrantCase(t *testing.T) {
	s := newStage(t, "dgx-a100", "flags: {plugin: {deviceListStrategy: driver-mounts}}")
	answer := s.allocate(t, "nvidia.com/gpu", 0, 1)
	units := s.plan.Resources[0].Units
	want := map[string]string{"NVIDIA_VISIBLE_DEVICES": units[0].ID + "," + units[1].ID, "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
	if diff := cmp.Diff(want, answer.Envs); diff != "" {
		t.Errorf("variables (-want +got):\n%s", diff)
	}
	var devices []string
	for _, d := range answer.Devices {
		devices = append(devices, d.HostPath+" "+d.ContainerPath+" "+d.Permissions)
	}
	text := strings.Join(devices, "\n")
	for _, node := range []string{"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if !strings.Contains(text, node+" "+node+" rwm") {
			t.Errorf("no %s in %q", node, devices)
		}
	}
	if len(answer.Mounts) != 1 || answer.Mounts[0].HostPath != "/usr/local/nvidia" || answer.Mounts[0].ContainerPath != "/usr/local/nvidia" || !answer.Mounts[0].ReadOnly {
		t.Errorf("mounts are %v", answer.Mounts)
	}
}
