package cdi

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// FuzzExisting holds that whatever lies in the place of the spec, and beside it,
// the entries of the node's units are there afterwards, and what Write names is
// what a runtime finds.
func FuzzExisting(f *testing.F) {
	good := `{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"old","containerEdits":{"env":["A=B"]}}]}`
	f.Add([]byte(good), []byte(good))
	f.Add([]byte(`{"cdiVersion":"0.5`), []byte("cdiVersion: 0.5.0\nkind: k8s.device-plugin.nvidia.com/gpu\ndevices: [{name: GPU-0, containerEdits: {env: [A=B]}}]"))
	f.Add([]byte(`{"cdiVersion":"99.0.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[]}`), []byte("\x00"))
	f.Add([]byte(`{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[{"name":"0"},{"name":"0"},{"name":"\u001b"}]}`), []byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, there, beside []byte) {
		dir := t.TempDir()
		w := NewWriter(Options{Dir: dir, Source: Simulated{}, Logger: slog.New(slog.DiscardHandler)})
		for path, data := range map[string][]byte{w.units.file.path(): there, filepath.Join(dir, "other.yaml"): beside} {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		names, err := w.Write(t.Context(), boards(2), nil)
		cache, failed := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(dir))
		if failed != nil {
			t.Fatal(failed)
		}
		found := cache.ListDevices()
		for _, name := range names {
			if !slices.Contains(found, name) {
				t.Errorf("no runtime finds %s", name)
			}
		}
		if err == nil && !slices.Contains(names, "k8s.device-plugin.nvidia.com/gpu=GPU-1") {
			t.Errorf("no error, and the entries are %q", names)
		}
	})
}
