package policy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
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
}

// Profile reads the file and returns its profile. The error names file, line
// and field of every problem.
func (f *File) Profile() (sharing.Profile, error) {
	config, err := f.Config()
	if err != nil {
		return sharing.Profile{}, err
	}
	if err := f.Started.Check(config.Process); err != nil {
		return sharing.Profile{}, fmt.Errorf("%s: %w", f.Path, err)
	}
	return config.Profile, nil
}

// Config reads the file and returns all that it says.
func (f *File) Config() (configs.Config, error) {
	if f.Path == "" {
		return configs.Parse("", nil, f.Overrides)
	}
	data, err := os.ReadFile(f.Path)
	if err != nil {
		return configs.Config{}, fmt.Errorf("read profile: %w", err)
	}
	file, err := configs.ParseFile(f.Path, data, f.Overrides)
	if err != nil {
		return configs.Config{}, err
	}
	return file.Select(f.Key)
}

// readInterval is how often the file is read. Reading a few kilobytes costs
// less than being wrong about renames, symbolic links that move and editors
// that truncate, which a file watch has to follow one by one.
const readInterval = 200 * time.Millisecond

// Watch calls changed at once and whenever the file has other content, comes
// or goes.
func (f *File) Watch(ctx context.Context, changed func()) error {
	if f.Path == "" {
		changed()
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(readInterval)
	defer tick.Stop()
	// Read before the first call: what changes after it is then noticed.
	last, lastErr := os.ReadFile(f.Path)
	changed()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		data, err := os.ReadFile(f.Path)
		if !bytes.Equal(data, last) || errors.Is(err, os.ErrNotExist) != errors.Is(lastErr, os.ErrNotExist) {
			changed()
		}
		last, lastErr = data, err
	}
}
