package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
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
	// sync brings a directory to the disk.
	sync func(*os.File) error

	mu       sync.Mutex
	sections map[string]json.RawMessage
	// trouble is the last write's error; nil before the first.
	trouble atomic.Pointer[error]
}

// NewFile is the file in dir, not read yet.
func NewFile(dir string, log *slog.Logger) *File {
	return &File{path: filepath.Join(dir, Name), log: log, sync: (*os.File).Sync, sections: map[string]json.RawMessage{}}
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
// an error the file is as before, or it has value and a power cut may take that
// back: a disk that fails at the last step does not say which. The next Write
// tries again with all.
func (f *File) Write(section string, value any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.write(section, value)
}

// writeOrForget is Write, but an error takes value back: it is not in the file,
// and no later Write brings it along.
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
	if errors.Is(err, errNotSynced) {
		err = errors.Join(err, f.put())
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
	if err := f.put(); err != nil {
		return fmt.Errorf("write state section %s: %w", section, err)
	}
	return nil
}

// Trouble says why the last write failed, and with it what the next run may not
// find; nil when it did not, and before the first. It does not wait for a write
// that is under way.
func (f *File) Trouble() error {
	if err := f.trouble.Load(); err != nil {
		return *err
	}
	return nil
}

// put brings the file to the sections, for whoever holds mu.
func (f *File) put() (err error) {
	defer func() { f.trouble.Store(&err) }()
	data, err := f.text()
	if err != nil {
		return err
	}
	return replace(f.path, data, f.sync)
}

// text is the file's content, an envelope. The sections are JSON already, and
// with thousands of devices a megabyte of it: json.Marshal would read through
// them twice more to find nothing to change.
func (f *File) text() ([]byte, error) {
	names := slices.Sorted(maps.Keys(f.sections))
	size := 2
	for _, name := range names {
		size += len(name) + len(f.sections[name]) + 16
	}
	sections := append(make([]byte, 0, size), '{')
	for i, name := range names {
		key, err := json.Marshal(name)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			sections = append(sections, ',')
		}
		sections = append(append(sections, key...), ':')
		sections = append(sections, f.sections[name]...)
	}
	sections = append(sections, '}')
	const frame = 64 // More than stands around them.
	text := fmt.Appendf(make([]byte, 0, len(sections)+frame), `{"version":%d,"checksum":%d,"sections":`, formatVersion, crc32.Checksum(sections, castagnoli))
	return append(append(text, sections...), "}\n"...), nil
}
