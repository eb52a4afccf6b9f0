package configsource

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/virgate/virgate/configs"
)

// File reads the profile from a file, or from flags only if Path is empty.
type File struct {
	// Path is a profile, or a ConfigMap manifest with one; it may be a symbolic link.
	Path string
	// Key chooses a profile from a ConfigMap manifest with several.
	Key string
	// Overrides are the settings from flags and environment.
	Overrides configs.Overrides
	// Started are the settings of this process; a profile that needs others is refused.
	Started configs.StartupSettings
	// Labels are the Node's, for the MIG layout label; nil if they are not read.
	Labels *NodeLabels
	// Done cancels a read that waits, as on a FIFO; nil disables it.
	Done <-chan struct{}

	content polled[[]byte]
	filled  filled // used by content.read alone
	// last is the last parsed file. The profile is read whenever anything on the node changes, and
	// parsing takes far longer than comparing a few kilobytes.
	mu   sync.Mutex
	last *parsedFile
}

type parsedFile struct {
	data     []byte
	selected configs.SelectedProfile
	err      error
}

// Profile reads the file and returns its profile. The error names file, line and field of every
// problem. It is configs.ErrPending while the profile depends on the Node's labels and they are
// unknown.
func (f *File) Profile() (configs.SelectedProfile, error) {
	selected, err := f.parse()
	if err == nil {
		selected, err = f.Labels.Layout(selected)
	}
	if errors.Is(err, context.Canceled) { // A cancelled read is not an error in the profile.
		err = fmt.Errorf("%w: %w", configs.ErrPending, err)
	}
	if err != nil {
		return configs.SelectedProfile{Name: f.Key, Source: cmp.Or(f.Path, flagsSource)}, err
	}
	return checkStarted(selected, nil, f.Started)
}

// WithLabel is like NodeSource.WithLabel. Only the MIG layout label changes anything here.
func (f *File) WithLabel(label, value string) (configs.SelectedProfile, error) {
	wanted := configs.SelectedProfile{Name: f.Key, Source: cmp.Or(f.Path, flagsSource)}
	if label != MIGLabel {
		return wanted, fmt.Errorf("no label of the Node chooses its profile, which is that of %s", wanted)
	}
	now, err := f.Labels.with(label, value)
	if err != nil {
		return wanted, err
	}
	selected, err := f.parse()
	if err == nil {
		selected, err = f.Labels.layout(now, selected)
	}
	return checkStarted(selected, cmp.Or(err, checkLayout(label, selected)), f.Started)
}

// Config reads the file and returns its whole configuration.
func (f *File) Config() (configs.Config, error) {
	selected, err := f.parse()
	return selected.Config, err
}

func (f *File) parse() (configs.SelectedProfile, error) {
	if f.Path == "" {
		return parseFlags(f.Overrides)
	}
	data, err := f.read()
	if err != nil {
		return configs.SelectedProfile{}, fmt.Errorf("read profile: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last == nil || !bytes.Equal(f.last.data, data) {
		f.last = &parsedFile{data: data}
		f.last.selected, f.last.err = parseFile(Name(f.Path), data, f.Key, f.Overrides)
	}
	return f.last.selected, f.last.err
}

func (f *File) read() ([]byte, error) {
	return f.content.read(func() ([]byte, error) {
		data, err := readUntil(f.Done, f.Path)
		if err == nil {
			err = f.filled.check(f.Path, data)
		}
		return data, err
	}, bytes.Equal)
}

// filled are the paths of files that were once not empty. If one is empty later, that is not an empty
// profile but an error: a program that rewrites a file in place empties it first.
type filled map[string]bool

func (f *filled) check(path string, data []byte) error {
	if len(data) == 0 && (*f)[path] {
		return fmt.Errorf("%s: it had a profile and is empty now; one that says nothing is version: v1", path)
	}
	if len(data) > 0 && *f == nil {
		*f = filled{}
	}
	if len(data) > 0 {
		(*f)[path] = true
	}
	return nil
}

// parseFile reads a profile, or a ConfigMap manifest with one under key.
func parseFile(path string, data []byte, key string, overrides configs.Overrides) (configs.SelectedProfile, error) {
	file, err := configs.ParseKey(path, data, key, overrides)
	if err != nil {
		return configs.SelectedProfile{}, err
	}
	config, err := file.Select(key)
	if err != nil {
		return configs.SelectedProfile{}, err
	}
	return config.SelectedFrom(path, key, map[string]string{"": string(data)}), nil
}

// flagsSource is the displayed source of a profile without a document.
const flagsSource = "flags"

// parseFlags returns the profile of flags and environment only.
func parseFlags(overrides configs.Overrides) (configs.SelectedProfile, error) {
	config, err := configs.Parse("", nil, overrides)
	return config.SelectedFrom(flagsSource, "", nil), err
}

// Watch calls changed at once and whenever the content or the labels have changed.
func (f *File) Watch(ctx context.Context, changed func()) error {
	var following sync.WaitGroup
	defer following.Wait()
	if f.Labels != nil {
		following.Go(func() { _ = f.Labels.Watch(ctx, changed) })
	}
	if f.Path == "" {
		changed()
		<-ctx.Done()
		return nil
	}
	f.content.watch(ctx, func() { _, _ = f.read() }, changed)
	return nil
}

// Directory holds profiles in files named after them, like a mounted ConfigMap.
type Directory struct {
	Path string

	content polled[configs.Documents]
	filled  filled // used by content.read alone
}

// String returns the path.
func (d *Directory) String() string { return d.Path }

// Documents reads the files. Like NVIDIA's config-manager, it skips directories and names that
// begin with "..", which the kubelet uses itself.
func (d *Directory) Documents() (configs.Documents, error) {
	return d.content.read(d.documents, maps.Equal[configs.Documents, configs.Documents])
}

func (d *Directory) documents() (configs.Documents, error) {
	// A mounted ConfigMap changes when this link changes: its target is one version.
	dir := d.Path
	if target, err := filepath.EvalSymlinks(filepath.Join(dir, "..data")); err == nil {
		dir = target
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read profiles: %w", err)
	}
	documents := configs.Documents{}
	for _, file := range files {
		path := filepath.Join(dir, file.Name())
		info, err := os.Stat(path)
		if strings.HasPrefix(file.Name(), "..") || err == nil && !info.Mode().IsRegular() {
			continue
		}
		var data []byte
		if err == nil {
			data, err = readLimited(path)
		}
		if err == nil && dir == d.Path { // The kubelet writes each version of a ConfigMap anew.
			err = d.filled.check(path, data)
		}
		switch {
		case err == nil:
			documents[file.Name()] = string(data)
		case !errors.Is(err, os.ErrNotExist):
			return nil, fmt.Errorf("read profiles: %w", err)
		}
	}
	return documents, nil
}

// Watch calls changed at once and whenever a file changes, appears or disappears.
func (d *Directory) Watch(ctx context.Context, changed func()) error {
	d.content.watch(ctx, func() { _, _ = d.Documents() }, changed)
	return nil
}

// maxDocument is the size limit of a document, in bytes; a ConfigMap has at most 1 MiB in total
// (Kubernetes, api/validation).
const maxDocument = 4 << 20

// Stdin is the path of standard input, which can be read once.
const Stdin = "-"

// Name returns the name of the file in messages.
func Name(path string) string {
	if path == Stdin {
		return "<stdin>"
	}
	return path
}

// Read reads a file of at most maxDocument. It returns when ctx ends even while it waits for a FIFO
// or standard input.
func Read(ctx context.Context, path string) ([]byte, error) { return readUntil(ctx.Done(), path) }

func readUntil(done <-chan struct{}, path string) (data []byte, err error) {
	if info, err := os.Stat(path); path != Stdin && (err != nil || info.Mode().IsRegular() || info.IsDir()) {
		return readLimited(path)
	}
	read := make(chan struct{})
	var got []byte
	var failed error
	// Not every kind of file has a call that cancels a read, so this one may stay until the program
	// ends.
	go func() {
		defer close(read)
		got, failed = readLimited(path)
	}()
	select {
	case <-read:
		return got, failed
	case <-done:
		return nil, fmt.Errorf("%s: %w", Name(path), context.Canceled)
	}
}

// readLimited reads a file of at most maxDocument.
func readLimited(path string) ([]byte, error) {
	file := os.Stdin // Opening /dev/stdin may be refused if another user owns it.
	if path != Stdin {
		var err error
		file, err = os.Open(path)
		if err != nil {
			return nil, err
		}
	}
	data, err := io.ReadAll(io.LimitReader(file, maxDocument+1))
	err = errors.Join(err, file.Close())
	if errors.Is(err, syscall.EISDIR) {
		return nil,
			fmt.Errorf(
				"%s is a directory: name a file in it; virgate run takes a directory by --config-dir, where the "+
					"Node's label chooses the file", path)
	} else if err != nil {
		return nil, err
	}
	if len(data) > maxDocument {
		return nil, fmt.Errorf("%s: longer than %d bytes", Name(path), maxDocument)
	}
	if path == Stdin && len(bytes.TrimSpace(data)) == 0 {
		return nil, fmt.Errorf("%s: nothing to read: standard input is empty", Name(path))
	}
	if path == Stdin && !hasDocument(data) {
		return nil, fmt.Errorf("%s: nothing to read: standard input has only comments", Name(path))
	}
	return data, nil
}

// hasDocument returns false for YAML with only comments. In a file, that is a profile without
// settings. From a program, such as helm, it means that no output came.
func hasDocument(data []byte) bool {
	for line := range bytes.Lines(data) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && string(line) != "---" {
			return true
		}
	}
	return false
}

// readInterval is the interval at which files are read. Reading a few kilobytes is cheaper than
// errors with renames, moved symbolic links and editors that truncate, which a file watch must
// handle one by one.
const readInterval = 200 * time.Millisecond

// polled counts the changes of something that is read repeatedly. Each reading is compared with the
// previous one, whichever caller made that. Otherwise a file that exists only briefly, between two
// checks of Watch, would stay in force.
type polled[T any] struct {
	mu      sync.Mutex
	last    T
	lastErr error
	changes atomic.Int64
}

func (p *polled[T]) read(do func() (T, error), equal func(a, b T) bool) (T, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	value, err := do()
	if !equal(value, p.last) || fmt.Sprint(err) != fmt.Sprint(p.lastErr) {
		p.changes.Add(1)
	}
	p.last, p.lastErr = value, err
	return value, err
}

// watch calls changed at once and whenever a reading has differed; look makes the readings.
func (p *polled[T]) watch(ctx context.Context, look, changed func()) {
	tick := time.NewTicker(readInterval)
	defer tick.Stop()
	look() // Before the first call, so that later changes are noticed.
	told := p.changes.Load()
	changed()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		look()
		if now := p.changes.Load(); now != told {
			told = now
			changed()
		}
	}
}
