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
//
// The folder is this call's own, for another Virgate may be writing too, and
// info is of the file that was put there, even when the other has replaced it
// since.
func (f *file) put(spec *specs.Spec) (info fs.FileInfo, err error) {
	const everyone = 0o755
	if err := os.MkdirAll(f.dir, everyone); err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp(f.dir, ".virgate-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	cache, err := cdilib.NewCache(cdilib.WithAutoRefresh(false), cdilib.WithSpecDirs(folder))
	if err != nil {
		return nil, err
	}
	if err := cache.WriteSpec(spec, f.name()); err != nil {
		return nil, err
	}
	made := filepath.Join(folder, f.name())
	if info, err = readable(made); err != nil {
		return nil, err
	}
	return info, f.moveIn(made, folder+".tmp")
}

// readable lets runtimes and tools read the spec that do not run as root.
func readable(path string) (fs.FileInfo, error) {
	const everyone = 0o644
	if err := os.Chmod(path, everyone); err != nil {
		return nil, err
	}
	return os.Stat(path)
}

// moveIn gives the spec its place by way of another name in the same folder:
// older runtimes see a file appear only when it had one before.
func (f *file) moveIn(made, beside string) error {
	if err := os.Rename(made, beside); err != nil {
		return err
	}
	if err := os.Rename(beside, f.path()); err != nil {
		_ = os.Remove(beside)
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
	if link := (*os.LinkError)(nil); errors.As(err, &link) {
		return link.Err
	}
	return err
}
