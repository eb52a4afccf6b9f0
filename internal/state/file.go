package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
)

// Name is the file's name in the device-plugins directory. The kubelet removes
// sockets there at its start and leaves files alone.
const Name = "virgate_state.json"

// formatVersion is raised when an older program could not read the file right.
const formatVersion = 1

// maxSize is more than any node's state; a larger file is not ours.
const maxSize = 64 << 20

// envelope is the file's form.
type envelope struct {
	Version int `json:"version"`
	// Checksum is the CRC-32 (Castagnoli) of Sections as they stand in the file.
	Checksum uint32          `json:"checksum"`
	Sections json.RawMessage `json:"sections"`
}

// File is the state file. Its methods may be called from any goroutine.
type File struct {
	path string
	log  *slog.Logger

	mu       sync.Mutex
	sections map[string]json.RawMessage
}

// NewFile is the file in dir, not read yet.
func NewFile(dir string, log *slog.Logger) *File {
	return &File{path: filepath.Join(dir, Name), log: log, sections: map[string]json.RawMessage{}}
}

// Load reads the file. It never fails: without a file that can be used the
// state is empty, and one that cannot be is renamed to end in ".bad".
func (f *File) Load() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sections = map[string]json.RawMessage{}
	data, err := readLimited(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	var sections map[string]json.RawMessage
	if err == nil {
		sections, err = parse(data)
	}
	if err != nil {
		aside := f.path + ".bad"
		renamed := os.Rename(f.path, aside)
		f.log.Warn("state file set aside, starting without", "path", aside, "error", errors.Join(err, renamed))
		return
	}
	f.sections = sections
}

func readLimited(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxSize {
		return nil, fmt.Errorf("read state: %s is not a file of at most %d bytes", path, maxSize)
	}
	return os.ReadFile(path)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// parse checks a file's content and returns its sections.
func parse(data []byte) (map[string]json.RawMessage, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("parse state: %w", err)
	}
	if e.Version != formatVersion {
		return nil, fmt.Errorf("parse state: version %d, this program writes %d", e.Version, formatVersion)
	}
	if sum := crc32.Checksum(e.Sections, castagnoli); sum != e.Checksum {
		return nil, fmt.Errorf("parse state: checksum %d, want %d", sum, e.Checksum)
	}
	sections := map[string]json.RawMessage{}
	if err := json.Unmarshal(e.Sections, &sections); err != nil {
		return nil, fmt.Errorf("parse state: sections: %w", err)
	}
	if sections == nil {
		return nil, errors.New("parse state: no sections")
	}
	return sections, nil
}

// Read fills value from the section; false when there is none. A section that
// does not fit value is an error.
func (f *File) Read(section string, value any) (bool, error) {
	f.mu.Lock()
	raw, ok := f.sections[section]
	f.mu.Unlock()
	if !ok {
		return false, nil
	}
	if err := json.Unmarshal(raw, value); err != nil {
		return false, fmt.Errorf("read state section %s: %w", section, err)
	}
	return true, nil
}

// Write makes value the section's content and returns when it is on disk. On
// an error the file is as before, and the next Write tries again with all.
func (f *File) Write(section string, value any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.write(section, value)
}

// writeOrForget is Write, but after an error no later Write brings value along.
func (f *File) writeOrForget(section string, value any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	before, had := f.sections[section]
	err := f.write(section, value)
	switch {
	case err != nil && had:
		f.sections[section] = before
	case err != nil:
		delete(f.sections, section)
	}
	return err
}

// write is for whoever holds mu.
func (f *File) write(section string, value any) error {
	raw, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("write state section %s: %w", section, err)
	}
	f.sections[section] = raw
	sections, err := json.Marshal(f.sections)
	if err != nil {
		return fmt.Errorf("write state section %s: %w", section, err)
	}
	data, err := json.Marshal(envelope{Version: formatVersion, Checksum: crc32.Checksum(sections, castagnoli), Sections: sections})
	if err != nil {
		return fmt.Errorf("write state section %s: %w", section, err)
	}
	if err := replace(f.path, append(data, '\n')); err != nil {
		return fmt.Errorf("write state section %s: %w", section, err)
	}
	return nil
}
