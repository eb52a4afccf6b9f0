package chart

import (
	"cmp"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestProgramHasTheFlags checks that every flag and variable in the DaemonSet and the hook is
// one that the program knows.
func TestProgramHasTheFlags(t *testing.T) {
	program, helps := filepath.Join(t.TempDir(), "virgate"), map[string]string{}
	build := exec.Command("go", "build", "-o", program, "./cmd/virgate")
	build.Dir = "../.."
	if said, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	for _, line := range []string{"run --help-all", "uninstall --help", "mps --help", "end-daemonset --help"} {
		name, flag, _ := strings.Cut(line, " ")
		command := exec.Command(program, name, flag)
		help, err := command.Output()
		if err != nil {
			t.Fatal(err)
		}
		helps[name] = string(help)
	}
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if file == "testdata/disabled.values.yaml" {
			continue // It has no DaemonSet by design.
		}
		manifest, _, err := render(t, read(t, file))
		if err != nil {
			t.Fatal(err)
		}
		objects := decode(t, manifest)
		pod, hook := daemonSet(t, objects).Spec.Template.Spec, corev1.PodSpec{}
		for _, object := range objects {
			if job, ok := object.(*batchv1.Job); ok {
				hook = job.Spec.Template.Spec
			}
		}
		for _, container := range slices.Concat(pod.InitContainers, pod.Containers, hook.Containers) {
			checkFlags(t, fmt.Sprintf("%s, %s", file, container.Name), container, helps)
		}
	}
}

func checkFlags(t *testing.T, where string, container corev1.Container, helps map[string]string) {
	t.Helper()
	command, arguments := container.Args[0], container.Args[1:]
	if len(arguments) > 0 && !strings.HasPrefix(arguments[0], "-") {
		command, arguments = command+" "+arguments[0], arguments[1:]
	}
	want := map[string]string{
		"uninstall":     "uninstall",
		"mps":           "mps",
		"end-daemonset": "end-daemonset",
	}[container.Name]
	if strings.HasPrefix(where, "testdata/uninstall.values.yaml") {
		want = "uninstall"
	}
	help := helps[command]
	if command != cmp.Or(want, "run") || help == "" {
		t.Errorf("%s: starts %q", where, command)
	}
	for _, argument := range arguments {
		name, _, _ := strings.Cut(argument, "=")
		if !strings.Contains(help, name) {
			t.Errorf("%s: no flag %s", where, name)
		}
	}
	for _, variable := range container.Env {
		switch variable.Name {
		case "NODE_NAME":
			continue // Also for $(NODE_NAME) in an argument.
		case "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES":
			continue // For NVIDIA's container runtime.
		}
		if !strings.Contains(help, "$"+variable.Name) {
			t.Errorf("%s: no variable %s", where, variable.Name)
		}
	}
}

func daemonSet(t *testing.T, objects []runtime.Object) *appsv1.DaemonSet {
	t.Helper()
	for _, object := range objects {
		if set, ok := object.(*appsv1.DaemonSet); ok {
			return set
		}
	}
	t.Fatal("no DaemonSet")
	return nil
}
