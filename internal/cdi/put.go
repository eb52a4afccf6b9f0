package cdi

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// put has the CDI library judge and write the spec in a folder where no runtime
// looks, and moves it into place: a runtime sees the old file or the new one,
// whole and readable. The library on its own leaves a file behind each time
// when the disk is full, and makes files that only root can read.
func (f *file) put(spec *specs.Spec) error {
	folder := filepath.Join(f.dir, ".virgate")
	defer func() { _ = os.RemoveAll(folder) }()
	cache, err := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(folder))
	if err != nil {
		return err
	}
	if err := cache.WriteSpec(spec, f.name()); err != nil {
		return err
	}
	made := filepath.Join(folder, f.name())
	// Runtimes and tools that do not run as root read specs too.
	const readable = 0o644
	if err := os.Chmod(made, readable); err != nil {
		return err
	}
	// Older runtimes see a file appear only when it had another name in the same
	// folder before.
	const beside = ".tmp"
	if err := os.Rename(made, f.path()+beside); err != nil {
		return err
	}
	if err := os.Rename(f.path()+beside, f.path()); err != nil {
		_ = os.Remove(f.path() + beside)
		return err
	}
	return nil
}

// reason is what the system answered, without the name of a file that was made
// for one attempt: the same failure must read the same each time.
func reason(err error) error {
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return path.Err
	}
	return err
}
