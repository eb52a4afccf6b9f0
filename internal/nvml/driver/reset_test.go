package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/mig"
)

// TestResetGPU runs a script in place of nvidia-smi, with the driver root as its root.
func TestResetGPU(t *testing.T) {
	root, shell := rootWithShell(t)
	place := func(name, script string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, "usr/bin", name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	options := Options{ContainerDriverRoot: root, DriverRoot: filepath.Join(root, "none")}
	err := ResetGPU(t.Context(), options, "00000000:3B:00.0")
	if err == nil || !strings.Contains(err.Error(), "no nvidia-smi in "+filepath.Join(root, "usr/bin")+", ") {
		t.Fatalf("without one: %v", err)
	}
	place("nvidia-smi-580", "#!"+shell+"\necho \"$@\" >/said\n")
	if err := os.Symlink("/usr/bin/nvidia-smi-580", filepath.Join(root, "usr/bin/nvidia-smi")); err != nil {
		t.Fatal(err)
	}
	if err := ResetGPU(t.Context(), options, "00000000:3B:00.0"); err != nil {
		t.Fatal(err)
	}
	said, err := os.ReadFile(filepath.Join(root, "said"))
	if err != nil || string(said) != "--gpu-reset -i 00000000:3B:00.0\n" {
		t.Errorf("it was called with %q, %v", said, err)
	}
	if err := SetTimeSlice(t.Context(), options, "GPU-1", 3); err != nil {
		t.Fatal(err)
	}
	said, err = os.ReadFile(filepath.Join(root, "said"))
	if err != nil || string(said) != "compute-policy -i GPU-1 --set-timeslice 3\n" {
		t.Errorf("it was called with %q, %v", said, err)
	}
	for script, want := range map[string]string{
		"echo Enabled": "true", "echo Disabled": "false", "echo '[N/A]'": `"[N/A]", and neither Enabled nor Disabled`, "exit 6": "exit status 6",
	} {
		place("nvidia-smi-580", "#!"+shell+"\necho \"$@\" >/said\n"+script+"\n")
		on, err := Persistence(t.Context(), options, "00000000:3B:00.0")
		if got := fmt.Sprint(on, err); !strings.HasPrefix(got, want) && !strings.Contains(got, want) {
			t.Errorf("persistence mode by %s: %s, want %s", script, got, want)
		}
		said, err = os.ReadFile(filepath.Join(root, "said"))
		if err != nil || string(said) != "-i 00000000:3B:00.0 --query-gpu=persistence_mode --format=csv,noheader\n" {
			t.Errorf("it was called with %q, %v", said, err)
		}
	}
	place("nvidia-smi-580", "#!"+shell+"\necho \"$@\" >>/said\n")
	if err := errors.Join(SetPersistence(t.Context(), options, "B", false), SetPersistence(t.Context(), options, "B", true)); err != nil {
		t.Fatal(err)
	}
	if said, err = os.ReadFile(filepath.Join(root, "said")); err != nil || !strings.HasSuffix(string(said), "-i B -pm 0\n-i B -pm 1\n") {
		t.Errorf("it was called with %q, %v", said, err)
	}
	place("nvidia-smi-580", "#!"+shell+"\necho 'The following GPUs could not be reset:'\necho '  GPU 3B: In use by another client' >&2\nexit 255\n")
	err = ResetGPU(t.Context(), options, "00000000:3B:00.0")
	if err == nil || !strings.HasSuffix(err.Error(), "exit status 255: The following GPUs could not be reset: GPU 3B: In use by another client") {
		t.Errorf("refused: %v", err)
	}
	if !errors.Is(err, mig.ErrInUse) {
		t.Errorf("what is in use: %v", err)
	}
	place("nvidia-smi-580", "#!"+shell+"\necho 'Resetting GPU 00000000:3B:00.0 is not supported.'\nexit 3\n")
	if err := ResetGPU(t.Context(), options, "00000000:3B:00.0"); err == nil || errors.Is(err, mig.ErrInUse) {
		t.Errorf("not supported: %v", err)
	}
	place("nvidia-smi-580", "#!"+shell+"\nwhile :; do :; done\n")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := ResetGPU(ctx, options, "00000000:3B:00.0"); err == nil {
		t.Error("one that hangs is waited for")
	}
}

// rootWithShell makes a folder that can be a process's root, with a shell, and usr/bin.
func rootWithShell(t *testing.T) (root, shell string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("to change the root requires root")
	}
	root = t.TempDir()
	shell, err := filepath.EvalSymlinks("/bin/sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range append([]string{shell}, libraries(t, shell)...) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(root, filepath.Dir(file)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, file), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root, shell
}

// libraries are those that the program is linked with.
func libraries(t *testing.T, program string) (files []string) {
	t.Helper()
	said, err := exec.Command("ldd", program).Output()
	if err != nil {
		t.Skipf("ldd: %v", err)
	}
	for _, word := range strings.Fields(string(said)) {
		if strings.HasPrefix(word, "/") {
			files = append(files, word)
		}
	}
	return files
}
