package configsource

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
)

const (
	four = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	ten  = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func replicas(t *testing.T, f *File) int {
	t.Helper()
	profile, err := f.Profile()
	if err != nil || len(profile.Profile.TimeSlicing) == 0 {
		t.Fatal(profile, err)
	}
	return profile.Profile.TimeSlicing[0].Replicas
}

// startWatch starts Watch and returns a function that waits for a change.
func startWatch(t *testing.T, f interface {
	Watch(context.Context, func()) error
}) (next func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	changes := make(chan struct{}, 100)
	ended := make(chan error, 1)
	go func() { ended <- f.Watch(ctx, func() { changes <- struct{}{} }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return func() {
		t.Helper()
		<-changes
	}
}

// TestReadingEnds checks that reading a FIFO without a writer ends with the context, and that one with a writer
// is read.
func TestReadingEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	written := make(chan error, 1)
	go func() { written <- os.WriteFile(path, []byte(four), 0o600) }()
	if data, err := Read(ctx, path); err != nil || string(data) != four {
		t.Errorf("read %q, %v", data, err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	file := &File{Path: path, Done: ctx.Done()}
	ended := make(chan error, 2)
	go func() {
		_, err := Read(ctx, path)
		ended <- err
	}()
	go func() {
		_, err := file.Profile()
		if !errors.Is(err, configs.ErrPending) {
			t.Errorf("error is %v, want that the profile is not known", err)
		}
		ended <- err
	}()
	cancel()
	for range 2 {
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("error is %v", err)
		}
	}
	// Release a reader that still waits for a writer.
	if writer, err := os.OpenFile(path, os.O_RDWR, 0); err == nil {
		_ = writer.Close()
	}
}

func TestDirectoryForAFile(t *testing.T) {
	if _, err := (&File{Path: t.TempDir()}).Config(); err == nil || !strings.Contains(err.Error(), " is a directory: name a file in it; virgate run takes a directory by --config-dir") {
		t.Errorf("error is %v", err)
	}
}

// TestProfileParsedOnce checks that the same document is parsed only once: handling a GPU's fault reads the profile
// too, and must not wait for the parser.
func TestProfileParsedOnce(t *testing.T) {
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	file := &File{Path: filepath.Join(t.TempDir(), "profile.yaml"), Started: started.Startup}
	parses := 0
	var last *sharing.ReplicatedResource
	ask := func(content string) {
		write(t, file.Path, content)
		for range 5 {
			selected, err := file.Profile()
			if err != nil {
				t.Fatal(err)
			}
			// Each parsing allocates its own shares.
			if share := &selected.Profile.TimeSlicing[0]; share != last {
				parses, last = parses+1, share
			}
		}
	}
	for _, content := range []string{four, ten, four} {
		ask(content)
	}
	if parses != 3 {
		t.Errorf("parsed %d times for 15 requests of 3 contents, want 3", parses)
	}
}

func TestProfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.yaml")
	write(t, path, four)
	manifest := filepath.Join(t.TempDir(), "m.yaml")
	byMPS := filepath.Join(t.TempDir(), "mps.yaml")
	write(t, byMPS, "version: v1\nsharing:\n  mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}\n")
	write(t, manifest, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata:\n  a: |\n    version: v1\n  b: |\n    version: v2\n")
	for _, test := range []struct {
		name string
		file *File
		want string // of the error
	}{
		{"no file", &File{}, ""},
		{"a file", &File{Path: path}, ""},
		{"missing", &File{Path: path + "x"}, "read profile: open"},
		{"a bad override", &File{Path: path, Overrides: configs.Overrides{"flags.migStrategy": {Value: "most", Source: "$MIG_STRATEGY"}}}, "$MIG_STRATEGY"},
		{"a problem in a manifest", &File{Path: manifest}, "[data.b]"},
		{"a setting that cannot change", &File{Path: path, Overrides: configs.Overrides{"flags.nvidiaDriverRoot": {Value: "/new", Source: "--nvidia-driver-root"}}}, "flags.nvidiaDriverRoot: cannot change while the program runs (is /, wanted /new)"},
		{"MPS without daemons", &File{Path: byMPS}, "mps.yaml: sharing.mps.resources[0]: nothing runs MPS daemons on this node: the chart's mps.enabled does"},
	} {
		t.Run(test.name, func(t *testing.T) {
			started, err := configs.Parse("", nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			test.file.Started = started.Startup
			_, err = test.file.Profile()
			if (err == nil) != (test.want == "") || (err != nil && !strings.Contains(err.Error(), test.want)) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// TestTruncatedFile reads between truncating the file and writing it. A file that was empty from the start is a
// profile.
func TestTruncatedFile(t *testing.T) {
	f := &File{Path: filepath.Join(t.TempDir(), "p.yaml")}
	started, err := f.defaults()
	if err != nil {
		t.Fatal(err)
	}
	f.Started = started
	write(t, f.Path, "")
	if selected, err := f.Profile(); err != nil || len(selected.Profile.TimeSlicing) > 0 {
		t.Errorf("an empty file: %v, %v", selected.Profile.TimeSlicing, err)
	}
	write(t, f.Path, four)
	if got := replicas(t, f); got != 4 {
		t.Errorf("%d replicas, want 4", got)
	}
	write(t, f.Path, "")
	if _, err := f.Profile(); err == nil || !strings.Contains(err.Error(), f.Path+": it had a profile and is empty now") {
		t.Errorf("an emptied file: %v", err)
	}
	write(t, f.Path, ten)
	if got := replicas(t, f); got != 10 {
		t.Errorf("%d replicas, want 10", got)
	}
}

func TestEndlessFile(t *testing.T) {
	if _, err := (&File{Path: "/dev/zero"}).Profile(); err == nil || !strings.Contains(err.Error(), "/dev/zero: longer than 4194304 bytes") {
		t.Errorf("an endless file: %v", err)
	}
}

func TestWatchFollowsEdits(t *testing.T) {
	dir := t.TempDir()
	f := &File{Path: filepath.Join(dir, "p.yaml")}
	started, err := f.defaults()
	if err != nil {
		t.Fatal(err)
	}
	f.Started = started
	write(t, f.Path, four)
	next := startWatch(t, f)
	next()
	if got := replicas(t, f); got != 4 {
		t.Fatalf("%d replicas", got)
	}

	write(t, f.Path, ten) // In place.
	next()
	if got := replicas(t, f); got != 10 {
		t.Errorf("%d replicas after an edit in place", got)
	}

	write(t, f.Path+".new", four) // By rename.
	if err := os.Rename(f.Path+".new", f.Path); err != nil {
		t.Fatal(err)
	}
	next()
	if got := replicas(t, f); got != 4 {
		t.Errorf("%d replicas after a rename", got)
	}

	if err := os.Remove(f.Path); err != nil {
		t.Fatal(err)
	}
	next()
	if _, err := f.Profile(); err == nil {
		t.Error("a profile from a missing file")
	}
	write(t, f.Path, ten)
	next()
	if got := replicas(t, f); got != 10 {
		t.Errorf("%d replicas after the file came back", got)
	}
}

// TestWatchFollowsMountedConfigMap swaps directories as the kubelet does.
func TestWatchFollowsMountedConfigMap(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"v1": four, "v2": ten} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "any"), content)
	}
	link := func(target, name string) {
		t.Helper()
		if err := os.Symlink(target, filepath.Join(dir, name+".tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, name+".tmp"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	link("v1", "..data")
	link("..data/any", "any")
	f := &File{Path: filepath.Join(dir, "any")}
	started, err := f.defaults()
	if err != nil {
		t.Fatal(err)
	}
	f.Started = started
	next := startWatch(t, f)
	next()
	link("v2", "..data")
	next()
	if got := replicas(t, f); got != 10 {
		t.Errorf("%d replicas after the swap", got)
	}
}

// defaults are the settings of an empty document.
func (f *File) defaults() (configs.StartupSettings, error) {
	config, err := configs.Parse("", nil, f.Overrides)
	return config.Startup, err
}

func TestDirectory(t *testing.T) {
	d := &Directory{Path: filepath.Join(t.TempDir(), "profiles")}
	if _, err := d.Documents(); err == nil || !strings.Contains(err.Error(), "read profiles: ") {
		t.Errorf("without the directory: %v", err)
	}
	for _, dir := range []string{"", "sub"} {
		if err := os.Mkdir(filepath.Join(d.Path, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	next := startWatch(t, d)
	next()
	put := func(name, content string) { write(t, filepath.Join(d.Path, name), content) }
	put("four", four)
	next()
	put("..hidden", ten)
	put(".dotted", ten)
	next()
	got, err := d.Documents()
	if diff := cmp.Diff(configs.Documents{"four": four, ".dotted": ten}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	put("four", "")
	next()
	if _, err := d.Documents(); err == nil || !strings.Contains(err.Error(), d.Path+"/four: it had a profile and is empty now") {
		t.Errorf("an emptied document: %v", err)
	}
	put("four", strings.Repeat("#", maxDocument+1))
	next()
	if _, err := d.Documents(); err == nil || !strings.Contains(err.Error(), "four: longer than") {
		t.Errorf("a document that is too long: %v", err)
	}
}

// TestMountedDirectory checks that one reading has one version, even if the links of single files point elsewhere.
func TestMountedDirectory(t *testing.T) {
	dir := t.TempDir()
	for version, content := range map[string]string{"..1": four, "..2": ten} {
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, "a"), content)
	}
	for link, target := range map[string]string{"..data": "..1", "a": "..2/a"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	got, err := (&Directory{Path: dir}).Documents()
	if diff := cmp.Diff(configs.Documents{"a": four}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// TestSeenBetweenTwoLooks checks that a profile that came and went between two looks of Watch, but was read in
// between, counts as a change and is read again.
func TestSeenBetweenTwoLooks(t *testing.T) {
	dir := t.TempDir()
	d, f := &Directory{Path: dir}, &File{Path: filepath.Join(dir, "default")}
	inDirectory, inFile := startWatch(t, d), startWatch(t, f)
	inDirectory()
	inFile()
	write(t, f.Path, four)
	if got, err := d.Documents(); len(got) != 1 || err != nil {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := f.Config(); err != nil {
		t.Error(err)
	}
	if err := os.Remove(f.Path); err != nil {
		t.Fatal(err)
	}
	inDirectory()
	inFile()
}

// TestFileAndMIGLabel has a file's profile wait for the label only if the label matters.
func TestFileAndMIGLabel(t *testing.T) {
	nodes := newFakeServer()
	log := slog.New(slog.DiscardHandler)
	f := &File{Path: filepath.Join(t.TempDir(), "p.yaml")}
	f.Labels = NewNodeLabels(nodes, "n1", labelName, log)
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.Started = started.Startup
	write(t, f.Path, four)
	if _, err := f.Profile(); err != nil {
		t.Error(err)
	}
	write(t, f.Path, cutting)
	if _, err := f.Profile(); !errors.Is(err, configs.ErrPending) {
		t.Errorf("%v is not pending", err)
	}
	next := startWatch(t, f)
	next()
	for _, layout := range []string{"all-disabled", "all-1g.5gb"} {
		nodes.Change("n1", labeledNode("", layout))
		for {
			if selected, err := f.Profile(); err == nil && selected.Profile.MIG.Name == layout && selected.Layout == layout {
				break
			}
			next()
		}
		// Another layout can be forecast, without being in force.
		if selected, err := f.WithLabel(MIGLabel, "all-balanced"); err != nil || selected.Profile.MIG.Name != "all-balanced" {
			t.Errorf("foreseen %+v, %v", selected.Profile.MIG, err)
		}
	}
	if _, err := f.WithLabel(MIGLabel, "min"); !errors.Is(err, configs.ErrMIGLayout) {
		t.Error(err)
	}
	if _, err := f.WithLabel(labelName, "a"); err == nil || !strings.Contains(err.Error(), "no label of the Node chooses its profile, which is that of "+f.Path) {
		t.Error(err)
	}
	write(t, f.Path, four)
	if _, err := f.WithLabel(MIGLabel, "all-balanced"); err == nil || !strings.Contains(err.Error(), f.Path+": it does not have mig.manage: true") {
		t.Error(err)
	}
}
