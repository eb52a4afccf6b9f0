//go:build cgo

package gpu

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/mps"
)

// smi is the nvidia-smi for the C library's GPUs.
const smi = `#!/bin/sh
case "$1" in
--query-gpu=*)
	echo 0, GPU-00000000-0000-0000-0000-000000000000, 00000000:3B:00.0, NVIDIA Fake A100-SXM4-40GB, 40960
	echo 1, GPU-11111111-1111-1111-1111-111111111111, 00010000:3C:00.0, NVIDIA Fake A100-SXM4-40GB, 40960 ;;
-L)
	echo MIG 1g.5gb Device 0: '(UUID: MIG-00000000-0000-0000-0000-0000000000a0)'
	echo MIG 1g.5gb Device 1: '(UUID: MIG-00000000-0000-0000-0000-0000000000a2)' ;;
esac
`

// TestFindings runs the checks, except TestServe, on the C library of the driver's tests, in the order of
// make test-gpu. It checks that they pass, that each line of docs/internals/hardware.md which says that
// something is noted names findings, and that findings of these names exist.
func TestFindings(t *testing.T) {
	compiler, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler named cc")
	}
	if _, err := exec.LookPath("nvidia-smi"); err == nil {
		t.Skip("this machine has a driver")
	}
	source, err := os.ReadFile("../../internal/nvml/driver/testdata/fake.c")
	must(t, err)
	folder, out := t.TempDir(), t.TempDir()
	build := exec.CommandContext(t.Context(), compiler, "-shared", "-fPIC", "-DNEW", `-DVERSION="580.1"`, "-x", "c", "-o", filepath.Join(folder, "libnvidia-ml.so.1"), "-")
	build.Stdin = bytes.NewReader(source)
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, output)
	}
	for name, content := range map[string]string{"nvidia-smi": smi, "nvidia-cap1": "to configure MIG", "nvidia-cap2": "to monitor it"} {
		must(t, os.WriteFile(filepath.Join(folder, name), []byte(content), 0o700))
	}
	// TestMPS runs if this test may mount.
	build = exec.CommandContext(t.Context(), compiler, "-shared", "-fPIC", "-o", filepath.Join(folder, "libcuda.so.1"), "testdata/cuda.c")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, output)
	}
	build = exec.CommandContext(t.Context(), "go", "build", "-o", folder, "./cudaclient", "../mpscontrol")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, output)
	}
	must(t, os.Rename(filepath.Join(folder, "mpscontrol"), filepath.Join(folder, mps.ProgramName)))
	checks := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.skip", "^(TestFindings|TestServe)$")
	checks.Env = append(os.Environ(), "VIRGATE=unused", "CUDA_CLIENT="+filepath.Join(folder, "cudaclient"), "OUT="+out, "LD_LIBRARY_PATH="+folder, "NVIDIA_CAPS="+folder, "PATH="+folder+":"+os.Getenv("PATH"))
	if output, err := checks.CombinedOutput(); err != nil {
		t.Fatalf("the checks: %v\n%s", err, output)
	}
	data, err := os.ReadFile(filepath.Join(out, "findings.jsonl"))
	must(t, err)
	var noted []string
	for line := range strings.Lines(string(data)) {
		var f finding
		must(t, json.Unmarshal([]byte(line), &f))
		noted = append(noted, f.What)
	}
	page, err := os.ReadFile("../../docs/internals/hardware.md")
	must(t, err)
	_, list, _ := strings.Cut(string(page), "### Recorded by the checks\n")
	list, _, _ = strings.Cut(list, "\n### ")
	lines := 0
	for line := range strings.Lines(strings.ReplaceAll(list, "\n  ", " ")) {
		if !strings.HasPrefix(line, "* ") {
			continue
		}
		lines++
		names := regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(line[strings.LastIndex(line, ": ")+1:], -1)
		if len(names) == 0 {
			t.Errorf("no finding is named by: %s", line)
		}
		for _, name := range names {
			if !slices.Contains(noted, name[1]) {
				t.Errorf("nothing is noted as %q: %s", name[1], line)
			}
		}
	}
	if lines < 15 {
		t.Errorf("%d lines: are they read?", lines)
	}
}
