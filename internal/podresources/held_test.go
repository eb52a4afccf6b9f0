package podresources

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

func (n *node) expectHeld(source *Source, want ...sharing.Allocation) {
	n.t.Helper()
	got, err := source.Held(n.ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("held: %s", diff)
	}
}

func TestHeld(t *testing.T) {
	n := startNode(t, simkubelet.Options{HoldPods: true})
	source := n.source(nil)
	stop := n.offer("a.sock", devices("a", "b", "c", "d", "e")...)
	n.expectHeld(source)

	second := n.add(simkubelet.Pod{Namespace: "n", Name: "second", Containers: []simkubelet.Container{
		{Name: "init", Init: true, Requests: wants(2)},
		{Name: "main", Requests: wants(1)},
	}})
	first := n.add(simkubelet.Pod{Namespace: "n", Name: "first", Containers: []simkubelet.Container{{Name: "main", Requests: wants(2)}}})
	named := []sharing.Allocation{
		{Namespace: "n", Pod: "first", Container: "main", Resource: gpu, Devices: []string{"c", "d"}},
		{Namespace: "n", Pod: "second", Container: "init", Resource: gpu, Devices: []string{"b"}}, // not in List
		{Namespace: "n", Pod: "second", Container: "main", Resource: gpu, Devices: []string{"a"}},
	}
	n.expectHeld(source, named...)

	// The one connection outlives the kubelet; nobody is named yet.
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	unnamed := []sharing.Allocation{
		{Pod: "uid:" + second.UID, Container: "init", Resource: gpu, Devices: []string{"a", "b"}},
		{Pod: "uid:" + second.UID, Container: "main", Resource: gpu, Devices: []string{"a"}},
		{Pod: "uid:" + first.UID, Container: "main", Resource: gpu, Devices: []string{"c", "d"}},
	}
	n.expectHeld(source, unnamed...)
	stop()
	if err := n.Start(n.ctx); err != nil {
		t.Fatal(err)
	}
	n.expectHeld(source, unnamed...)
	n.offer("b.sock", devices("a", "b", "c", "d", "e")...)
	if err := n.RestorePods(n.ctx); err != nil {
		t.Fatal(err)
	}
	awaitPodResources(t, source)
	n.expectHeld(source, named...)

	// A pod that is gone is held on to until the kubelet writes again.
	if err := n.DeletePod("n", "first"); err != nil {
		t.Fatal(err)
	}
	n.expectHeld(source, unnamed[2], named[1], named[2])
}

// awaitPodResources waits until the connection is there again.
func awaitPodResources(t *testing.T, source *Source) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		if _, err := list(t.Context(), source); err == nil {
			return
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestHeldFromOneSource(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	n.offer("a.sock", devices("a", "b")...)
	pod := n.add(simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{{Name: "c", Requests: wants(1)}}})
	named := sharing.Allocation{Namespace: "n", Pod: "p", Container: "c", Resource: gpu, Devices: []string{"a"}}
	unnamed := sharing.Allocation{Pod: "uid:" + pod.UID, Container: "c", Resource: gpu, Devices: []string{"a"}}
	elsewhere := t.TempDir()
	old := filepath.Join(t.TempDir(), "old")
	broken := filepath.Join(t.TempDir(), "broken")
	for _, dir := range []string{old, broken} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "kubelet.sock"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(broken, checkpointName), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name   string
		change func(*Options)
		want   sharing.Allocation
		err    error
		texts  []string
	}{
		{name: "both", want: named},
		{name: "no PodResources", change: func(o *Options) { o.Socket = "" }, want: unnamed},
		{name: "PodResources does not answer", change: func(o *Options) { o.Socket = elsewhere + "/none" }, want: unnamed},
		{name: "no checkpoint, kubelet long up", change: func(o *Options) { o.CheckpointDir = old }, want: named},
		{
			name: "no checkpoint ever, kubelet just started", want: named,
			change: func(o *Options) { o.CheckpointDir, o.Now = old, time.Now },
		},
		{
			name: "broken checkpoint, kubelet just started", change: func(o *Options) { o.CheckpointDir, o.Now = broken, time.Now },
			err: ErrIncomplete, texts: []string{"kubelet started 0s ago", filepath.Join(broken, checkpointName) + ": parse checkpoint"},
		},
		{
			name: "no checkpoint, no kubelet.sock", change: func(o *Options) { o.CheckpointDir = elsewhere },
			err: ErrIncomplete, texts: []string{"kubelet.sock", checkpointName},
		},
		{
			name: "no directory", change: func(o *Options) { o.CheckpointDir = "" },
			err: ErrIncomplete, texts: []string{"start unknown", "no directory"},
		},
		{
			name: "nothing", change: func(o *Options) { o.CheckpointDir, o.Socket = elsewhere, elsewhere+"/none" },
			err: ErrUnknown, texts: []string{"PodResources: ", elsewhere + "/none", "checkpoint: ", checkpointName},
		},
		{
			name: "nothing configured", change: func(o *Options) { o.CheckpointDir, o.Socket = "", "" },
			err: ErrUnknown, texts: []string{"no socket", "no directory"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			source := n.source(row.change)
			if row.err == nil {
				n.expectHeld(source, row.want)
				return
			}
			held, err := source.Held(n.ctx)
			if !errors.Is(err, row.err) || held != nil {
				t.Fatalf("got %v and %v, want %v", held, err, row.err)
			}
			for _, text := range row.texts {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%q does not say %q", err, text)
				}
			}
		})
	}
}

func TestSettlingTakesAMinute(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kubelet.sock")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	start := time.Now().Truncate(time.Second)
	if err := os.Chtimes(path, start, start); err != nil {
		t.Fatal(err)
	}
	for age, settled := range map[time.Duration]bool{
		-time.Hour: false, 0: false, time.Minute - 1: false, time.Minute: true, time.Hour: true,
	} {
		source := New(Options{CheckpointDir: dir, Now: func() time.Time { return start.Add(age) }})
		if err := source.settled(); (err == nil) != settled {
			t.Errorf("at %v: got %v", age, err)
		}
	}
}

func TestApplied(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	both := n.source(nil)
	file := n.source(func(o *Options) { o.Socket = "" })
	stop := n.offer("a.sock", devices("b", "a", "!c")...)
	n.add(simkubelet.Pod{Name: "p", Containers: []simkubelet.Container{{Name: "c", Requests: wants(1)}}})
	expect := func(source *Source, want map[string][]string) {
		t.Helper()
		got, err := source.Applied(n.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	two := map[string][]string{gpu: {"a", "b"}}
	expect(both, two)
	expect(file, two)

	// The kubelet's memory follows a stream's end, its checkpoint does not.
	stop()
	n.await(func(s simkubelet.Snapshot) bool { return !s.Resources[gpu].Connected })
	expect(both, map[string][]string{})
	expect(file, two)
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	expect(both, two)

	if _, err := New(Options{}).Applied(n.ctx); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
}

// Without PodResources nothing is known of a file half of which is missing.
func TestBrokenCheckpoint(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, checkpointName), []byte(`{"Data":{`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{CheckpointDir: dir}).Held(t.Context()); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
}
