package grants

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/virgate/virgate/sharing"
)

// entriesOf returns the CDI entries of an answer, as a runtime finds them.
func entriesOf(t *testing.T, answer *api.ContainerAllocateResponse) []string {
	t.Helper()
	_, entries, err := cdilib.ParseAnnotations(answer.Annotations)
	if err != nil {
		t.Fatal(err)
	}
	for _, device := range answer.CdiDevices {
		entries = append(entries, device.Name)
	}
	return entries
}

// inject does what a container runtime does with the entries.
func inject(t *testing.T, specs string, entries []string) *oci.Spec {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(specs))
	if err != nil {
		t.Fatal(err)
	}
	for path, errs := range cache.GetErrors() {
		t.Errorf("%s: %v", path, errs)
	}
	container := &oci.Spec{}
	if unknown, err := cache.InjectDevices(container, entries...); err != nil {
		t.Fatalf("%v: %v", unknown, err)
	}
	return container
}

// TestEntriesAreInjected follows each kind of CDI answer to the end: the container has the device nodes of
// its units, and NVIDIA's runtime is told not to act.
func TestEntriesAreInjected(t *testing.T) {
	for _, flags := range []string{
		"{migStrategy: mixed, plugin: {deviceListStrategy: cdi-annotations}}",
		"{migStrategy: mixed, plugin: {deviceListStrategy: cdi-cri}}",
		"{migStrategy: mixed, plugin: {deviceListStrategy: cdi-cri, deviceIDStrategy: index}}",
	} {
		for _, r := range requests() {
			t.Run(flags+" on "+r.node, func(t *testing.T) {
				t.Parallel()
				s := newStage(t, r.node, "flags: "+flags)
				container := inject(t, s.specs, entriesOf(t, s.allocate(t, r.resource, r.places...)))
				want := []string{"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"}
				for _, resource := range s.plan.Resources {
					if resource.Name == r.resource {
						want = append(want, nodesOf(s, resource, r.places)...)
					}
				}
				var got []string
				for _, device := range container.Linux.Devices {
					got = append(got, device.Path)
				}
				slices.Sort(want)
				slices.Sort(got)
				if diff := cmp.Diff(slices.Compact(want), got); diff != "" {
					t.Errorf("device nodes (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void"}, container.Process.Env); diff != "" {
					t.Errorf("variables (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func nodesOf(s stage, resource sharing.Resource, places []int) []string {
	var nodes []string
	for _, place := range places {
		nodes = append(nodes, s.nodes[resource.Devices[place].Unit]...)
	}
	return nodes
}

// TestTwoResourcesInOneContainer joins the answers of two resources as the kubelet does, and checks that
// the container has both GPUs.
func TestTwoResourcesInOneContainer(t *testing.T) {
	const profile = "\nsharing: {timeSlicing: {resources: [{name: gpu, devices: 1, replicas: 2, rename: shared}]}}"
	for _, strategy := range []string{"cdi-annotations", "cdi-cri", "volume-mounts", "driver-mounts"} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, "dgx-a100", "flags: {plugin: {deviceListStrategy: "+strategy+"}}"+profile)
			one, other := s.allocate(t, "nvidia.com/gpu", 0), s.allocate(t, "nvidia.com/shared", 0)
			for key, value := range other.Envs {
				if strategy != "driver-mounts" && one.Envs[key] != value {
					t.Errorf("%s is %q and %q", key, one.Envs[key], value)
				}
			}
			for key := range other.Annotations {
				if _, again := one.Annotations[key]; again {
					t.Errorf("both have the annotation %s", key)
				}
			}
			nodes := map[string]bool{}
			for _, entry := range slices.Concat(entriesOf(t, one), entriesOf(t, other)) {
				nodes[entry] = true
			}
			for _, mount := range slices.Concat(one.Mounts, other.Mounts) {
				if mount.HostPath == "/dev/null" {
					nodes[mount.ContainerPath] = true
				}
			}
			for _, device := range slices.Concat(one.Devices, other.Devices) {
				if number := strings.TrimPrefix(device.ContainerPath, "/dev/nvidia"); number == "0" || number == "1" {
					nodes[device.HostPath] = true
				}
			}
			if len(nodes) != 2 {
				t.Errorf("the container has %v, want two GPUs", nodes)
			}
		})
	}
}

// TestFilesAreNVIDIAs checks that the specs have the paths of NVIDIA's plugin: a second file with the same
// entries would make both unusable.
func TestFilesAreNVIDIAs(t *testing.T) {
	s := newStage(t, "dgx-a100", "flags: {gdsEnabled: true, plugin: {deviceListStrategy: cdi-cri}}")
	var names []string
	files, err := os.ReadDir(s.specs)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		names = append(names, file.Name())
		if info, err := os.Stat(filepath.Join(s.specs, file.Name())); err != nil || info.Mode().Perm() != 0o644 {
			t.Errorf("%s: %v, %v", file.Name(), info.Mode(), err)
		}
	}
	if diff := cmp.Diff([]string{"k8s.device-plugin.nvidia.com-gds.json", "k8s.device-plugin.nvidia.com-gpu.json"}, names); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}
