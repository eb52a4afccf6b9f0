package simkubelet

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func (r *rig) checkpoint() checkpointData {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.options.Dir, checkpointName))
	if err != nil {
		r.t.Fatal(err)
	}
	var read checkpoint
	if err := json.Unmarshal(text, &read); err != nil {
		r.t.Fatal(err)
	}
	return read.Data
}

func TestCheckpoint(t *testing.T) {
	r := startRig(t, Options{})
	p := r.startPlugin(gpu, "a.sock", healthy("a@0+1", "b")...)
	status := r.add(oneContainer("pod", 2))
	entries := r.checkpoint().PodDeviceEntries
	if len(entries) != 1 {
		t.Fatalf("got %+v, want one entry", entries)
	}
	want := podDevicesEntry{
		PodUID: status.UID, ContainerName: "c", ResourceName: gpu,
		DeviceIDs: map[int64][]string{0: {"a"}, 1: {"a"}, -1: {"b"}},
	}
	want.AllocResp = entries[0].AllocResp
	if diff := cmp.Diff(want, entries[0]); diff != "" || len(want.AllocResp) == 0 {
		t.Error(diff)
	}

	// A pod that has ended remains until it is forgotten and the file is written.
	r.remove("default", "pod")
	p.send(healthy("a@0+1", "b", "c")...)
	if got := r.checkpoint(); len(got.PodDeviceEntries) != 1 || !slices.Equal(got.RegisteredDevices[gpu], []string{"a", "b", "c"}) {
		t.Errorf("got %+v, want the dead pod and the new list", got)
	}
	r.add(oneContainer("next", 1))
	if got := r.checkpoint().PodDeviceEntries; len(got) != 1 || got[0].PodUID == status.UID {
		t.Errorf("got %+v, want the new pod alone", got)
	}

	// The end of a plugin does not write the file.
	p.server.Stop()
	r.awaitCounts(gpu, 0, 3)
	if got := r.checkpoint().RegisteredDevices[gpu]; len(got) != 3 {
		t.Errorf("got %q, want the health before the end", got)
	}
}

func TestUnreadableCheckpoint(t *testing.T) {
	for name, text := range map[string]string{
		"syntax":   "{",
		"response": `{"Data":{"PodDeviceEntries":[{"PodUID":"u","AllocResp":"/w=="}]}}`,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, checkpointName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := New(Options{Dir: dir}).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "checkpoint") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func FuzzRestoreCheckpoint(f *testing.F) {
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"u","DeviceIDs":{"-1":["a"],"0":null},"AllocResp":"CgA="}],"RegisteredDevices":{"r":null}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p := newProcess()
		if p.restoreCheckpoint(text, time.Now()) != nil {
			return
		}
		if err := p.saveCheckpoint(t.TempDir()); err != nil {
			t.Errorf("what was read cannot be written: %v", err)
		}
	})
}
