package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// errNotSynced says that a file was replaced, and that a power cut may bring the
// one before it back.
var errNotSynced = errors.New("replaced, but its directory is not on disk")

// replace puts data in the place of the file at path: after a crash at any
// moment there is the old file or the new one. It returns when the new one is
// on disk. On an error the old one is in its place, but after errNotSynced the
// new one.
func replace(path string, data []byte, sync func(*os.File) error) (err error) {
	// Opened first: where that fails, for want of a descriptor, nothing has changed.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }() // It was only read.
	temporary, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	_, err = temporary.Write(data)
	if err == nil {
		err = temporary.Sync()
	}
	if err = errors.Join(err, temporary.Close()); err == nil {
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
