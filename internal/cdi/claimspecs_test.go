package cdi

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// TestClaimSpecs checks that a runtime finds the entries of a claim's containers by stable names, and that the
// files are removed with their claims.
func TestClaimSpecs(t *testing.T) {
	s := ClaimSpecs{Dir: t.TempDir()}
	const uid, other = "11111111-aaaa-4000-8000-000000000000", "22222222-aaaa-4000-8000-000000000000"
	write := func(uid string, shares int) {
		t.Helper()
		mps := grant.MPSAccess("/run/nvidia/mps", "GPU-a", sharing.NewMPSLimit(shares, 4, 16<<30))
		if err := s.Write(uid, map[int]grant.Edits{1: mps}); err != nil {
			t.Fatal(err)
		}
	}
	files := func() (names []string) {
		entries, err := os.ReadDir(s.Dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	write(uid, 1)
	write(uid, 2)
	write(other, 1)
	write("none", 1)
	for range 2 { // A claim that is allocated again may have no entries any more.
		if err := s.Write("none", nil); err != nil {
			t.Fatal(err)
		}
	}
	if got := files(); len(got) != 2 {
		t.Fatalf("files %q", got)
	}
	if match, err := filepath.Match(SpecPattern, files()[0]); !match || err != nil {
		t.Errorf("%s is left behind when Virgate is removed", files()[0])
	}
	cache, err := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(s.Dir))
	if err != nil {
		t.Fatal(err)
	}
	device := cache.GetDevice(ClaimName(uid, 1))
	if device == nil {
		t.Fatalf("no %s in %v, %v", ClaimName(uid, 1), cache.ListDevices(), cache.GetErrors())
	}
	if got, want := strings.Join(device.ContainerEdits.Env, " "), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M CUDA_MPS_PIPE_DIRECTORY=/mps/GPU-a/pipe"; got != want {
		t.Errorf("variables %s", got)
	}
	var mounts []string
	for _, m := range device.ContainerEdits.Mounts {
		mounts = append(mounts, m.HostPath+":"+m.ContainerPath+":"+m.Options[0])
	}
	if want := []string{"/run/nvidia/mps/GPU-a/pipe:/mps/GPU-a/pipe:ro", "/run/nvidia/mps/GPU-a/shm:/dev/shm:rw"}; !slices.Equal(mounts, want) {
		t.Errorf("mounts %q", mounts)
	}

	unit := filepath.Join(s.Dir, "k8s.device-plugin.nvidia.com-gpu.json")
	if err := os.WriteFile(unit, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Keep([]string{uid}); err != nil {
		t.Fatal(err)
	}
	if got := files(); len(got) != 2 || !strings.Contains(strings.Join(got, " "), uid) {
		t.Errorf("kept %q", got)
	}
	for range 2 {
		if err := s.Remove(uid); err != nil {
			t.Fatal(err)
		}
	}
	if got := files(); !slices.Equal(got, []string{filepath.Base(unit)}) {
		t.Errorf("left %q", got)
	}
}
