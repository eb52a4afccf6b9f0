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

// formatVersion is raised when an older program could no longer read the file correctly.
const formatVersion = 1

// maxSize is more than the state of any node needs; a larger file is not Virgate's.
const maxSize = 64 << 20

type envelope struct {
	Version int `json:"version"`
	// Checksum is the CRC-32 (Castagnoli) of Sections, byte for byte as in the file.
	Checksum uint32          `json:"checksum"`
	Sections json.RawMessage `json:"sections"`
}

// File is the state file. Its methods may be called from any goroutine.
type File struct {
	path string
	log  *slog.Logger
	// sync is (*os.File).Sync, which tests replace.
	sync func(*os.File) error

	mu       sync.Mutex
	sections map[string]json.RawMessage
	// writeError is the last write's error; nil before the first.
	writeError atomic.Pointer[error]
}

// NewFile returns the file in dir, without reading it.
func NewFile(dir string, log *slog.Logger) *File {
	return &File{
		path:     filepath.Join(dir, Name),
		log:      log,
		sync:     (*os.File).Sync,
		sections: map[string]json.RawMessage{},
	}
}

// Load reads the file. It never fails: without a usable file the state is empty, and an unusable
// file gets a name that ends in ".bad".
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

// Read decodes the section into value. It returns false if there is no such section, and an error
// if the section does not fit value.
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

// Write makes value the section's content, and returns once it is on disk. After an error, either
// the file is as before, or it has the value but a power cut may undo that: a disk that fails at
// the last step does not say which. The next Write writes all sections again.
func (f *File) Write(section string, value any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.write(section, value)
}

// WriteOrForget is Write, except that after an error no later Write includes value.
func (f *File) WriteOrForget(section string, value any) error {
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

// write is called with mu locked.
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

// WriteError returns the error of the last write; nil if that succeeded, and before the first. After an
// error, the next run may not find what was to be kept. WriteError does not wait for a write in progress.
func (f *File) WriteError() error {
	if err := f.writeError.Load(); err != nil {
		return *err
	}
	return nil
}

// put writes the sections to the file; it is called with mu locked.
func (f *File) put() (err error) {
	defer func() { f.writeError.Store(&err) }()
	data, err := f.text()
	if err != nil {
		return err
	}
	return replace(f.path, data, f.sync)
}

// text returns the file's content, an envelope, in pieces. It is put together by hand because the
// sections are JSON already: json.Marshal would read and copy up to a megabyte.
func (f *File) text() ([][]byte, error) {
	text := [][]byte{nil, []byte("{")}
	for i, name := range slices.Sorted(maps.Keys(f.sections)) {
		key, err := json.Marshal(name)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			key = slices.Concat([]byte(","), key)
		}
		text = append(text, key, []byte(":"), f.sections[name])
	}
	text = append(text, []byte("}"))
	checksum := uint32(0)
	for _, piece := range text {
		checksum = crc32.Update(checksum, castagnoli, piece)
	}
	text[0] = fmt.Appendf(nil, `{"version":%d,"checksum":%d,"sections":`, formatVersion, checksum)
	return append(text, []byte("}\n")), nil
}

// errNotSynced means that a file was replaced, but a power cut may bring back the old one.
var errNotSynced = errors.New("replaced, but its directory is not on disk")

// replace replaces the file at path atomically: after a crash at any moment, there is either the
// old file or the new one. It returns once the new one is on disk. After an error the old file is
// still there, except after errNotSynced: then it is the new one.
func replace(path string, data [][]byte, sync func(*os.File) error) (err error) {
	// Open it first, so that nothing has changed if there is no descriptor left.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // It was only read.
	temporary, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	for i := 0; i < len(data) && err == nil; i++ {
		_, err = temporary.Write(data[i])
	}
	if err == nil {
		err = temporary.Sync()
	}
	err = errors.Join(err, temporary.Close())
	if err == nil {
		err = os.Rename(temporary.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary.Name()))
	}
	if err := sync(dir); err != nil {
		return fmt.Errorf("%w: %w", errNotSynced, err)
	}
	return nil
}
