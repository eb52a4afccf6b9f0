package chart

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestProgramHasTheFlags checks that every flag and variable in the DaemonSet is
// one that the program knows.
func TestProgramHasTheFlags(t *testing.T) {
	helps := map[string]string{}
	for _, name := range []string{"run", "uninstall"} {
		command := exec.Command("go", "run", "./cmd/virgate", name, "--help")
		command.Dir = "../.."
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
			continue // It has no DaemonSet, which is what it is for.
		}
		manifest, _, err := render(t, read(t, file))
		if err != nil {
			t.Fatal(err)
		}
		container := daemonSet(t, decode(t, manifest)).Spec.Template.Spec.Containers[0]
		want := "run"
		if file == "testdata/uninstall.values.yaml" {
			want = "uninstall"
		}
		help := helps[want]
		if container.Args[0] != want {
			t.Errorf("%s: starts %q", file, container.Args[0])
		}
		for _, argument := range container.Args[1:] {
			name, _, _ := strings.Cut(argument, "=")
			if !strings.Contains(help, name) {
				t.Errorf("%s: no flag %s", file, name)
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
				t.Errorf("%s: no variable %s", file, variable.Name)
			}
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
