package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/configs"
)

// File takes the profile from a file, or from flags alone when Path is empty.
type File struct {
	// Path is a profile, or a ConfigMap manifest that has one. It may be a
	// symbolic link into a mounted ConfigMap.
	Path string
	// Key chooses a profile from a ConfigMap manifest with several.
	Key string
	// Overrides are the settings from flags and environment.
	Overrides configs.Overrides
	// Started are the settings that the process runs with; a profile that
	// needs others is refused.
	Started configs.Process
	// Labels are the Node's, of which the one for the MIG layout counts here; nil
	// where none are looked at.
	Labels *Labels

	// filled says that the file has had content. It is not taken for a profile that
	// says nothing then: who writes to it in place empties it first.
	filled atomic.Bool
}

// Profile reads the file and returns its profile. The error names file, line
// and field of every problem. It is configs.ErrPending while the Node's labels
// are not known and the profile depends on them.
func (f *File) Profile() (configs.Selected, error) {
	selected, err := f.read()
	if err == nil {
		selected, err = f.Labels.Layout(selected)
	}
	if err != nil {
		return configs.Selected{Name: f.Key, Source: f.source()}, err
	}
	if err := f.Started.Check(selected.Process); err != nil {
		return configs.Selected{Name: selected.Name, Source: selected.Source}, fmt.Errorf("%s: %w", selected, err)
	}
	return selected, nil
}

// Config reads the file and returns all that it says.
func (f *File) Config() (configs.Config, error) {
	selected, err := f.read()
	return configs.Config{Profile: selected.Profile, Process: selected.Process, Notes: selected.Notes}, err
}

func (f *File) read() (configs.Selected, error) {
	if f.Path == "" {
		config, err := configs.Parse("", nil, f.Overrides)
		return config.Select(f.source(), "", nil), err
	}
	data, err := readBounded(f.Path)
	if err != nil {
		return configs.Selected{}, fmt.Errorf("read profile: %w", err)
	}
	if len(data) > 0 {
		f.filled.Store(true)
	} else if f.filled.Load() {
		return configs.Selected{}, fmt.Errorf("%s: it had a profile and is empty now; one that says nothing is version: v1", f.Path)
	}
	return parse(f.Path, data, f.Key, f.Overrides)
}

// parse reads a profile, or a ConfigMap manifest that has one under key.
func parse(path string, data []byte, key string, overrides configs.Overrides) (configs.Selected, error) {
	file, err := configs.ParseFile(path, data, overrides)
	if err != nil {
		return configs.Selected{}, err
	}
	config, err := file.Select(key)
	if err != nil {
		return configs.Selected{}, err
	}
	return config.Select(path, key, map[string]string{"": string(data)}), nil
}

// source is what people call it.
func (f *File) source() string {
	if f.Path == "" {
		return "flags"
	}
	return f.Path
}

// readInterval is how often the file is read. Reading a few kilobytes costs
// less than being wrong about renames, symbolic links that move and editors
// that truncate, which a file watch has to follow one by one.
const readInterval = 200 * time.Millisecond

// Watch calls changed at once and whenever the file has other content, comes
// or goes, or the labels are others.
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
	tick := time.NewTicker(readInterval)
	defer tick.Stop()
	// Read before the first call: what changes after it is then noticed.
	last, lastErr := readBounded(f.Path)
	changed()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		data, err := readBounded(f.Path)
		if !bytes.Equal(data, last) || errors.Is(err, os.ErrNotExist) != errors.Is(lastErr, os.ErrNotExist) {
			changed()
		}
		last, lastErr = data, err
	}
}
