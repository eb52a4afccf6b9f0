package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/virgate/virgate/plugin"
)

// file is one spec on disk.
type file struct {
	dir, class string
	// spec is what the file holds, or held last; nil while it has held nothing.
	spec *specs.Spec
	// seen is the file when spec was read or written; nil when there is none that
	// can be used.
	seen fs.FileInfo
	// stale says that the file should have become another one and has not.
	stale bool
}

// path is where NVIDIA's plugin writes the spec too. Two files with one entry
// would make it unusable.
func (f *file) path() string { return filepath.Join(f.dir, f.name()) }

func (f *file) name() string { return cdilib.GenerateSpecName(plugin.CDIVendor, f.class) + ".json" }

// look reads the file if it is another one than it was, and says whether
// something has to be done about it: it was read anew, or is missing. One that
// cannot be used counts as missing, and then the error says why.
func (f *file) look() (changed bool, err error) {
	info, err := os.Stat(f.path())
	if err == nil && same(info, f.seen) {
		return f.stale, nil
	}
	f.seen = nil
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return true, nil
	case err != nil:
		return true, fmt.Errorf("look at the CDI spec: %w", err)
	case !info.Mode().IsRegular():
		return true, fmt.Errorf("look at the CDI spec: %s is no file", f.path())
	}
	read, err := cdilib.ReadSpec(f.path(), 0)
	if err != nil {
		return true, fmt.Errorf("read the CDI spec: %w", err)
	}
	f.seen, f.spec = info, read.Spec
	return true, nil
}

func same(a, b fs.FileInfo) bool {
	return b != nil && os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// replace brings the file to spec, nil for no file. Until it has, the file is
// stale.
func (f *file) replace(spec *specs.Spec) error {
	err := f.bring(spec)
	f.stale = err != nil
	return err
}

func (f *file) bring(spec *specs.Spec) error {
	if reflect.DeepEqual(spec, f.spec) && (spec == nil) == (f.seen == nil) {
		return nil
	}
	if spec == nil {
		if err := os.Remove(f.path()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the CDI spec: %w", err)
		}
		f.seen, f.spec = nil, nil
		return nil
	}
	info, err := f.put(spec)
	if err != nil {
		return fmt.Errorf("write the CDI spec %s: %w", f.path(), reason(err))
	}
	f.seen, f.spec = info, spec
	return nil
}
