package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/virgate/virgate/plugin/grant"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"
)

// file is one spec on disk.
type file struct {
	dir, class string
	// claim is the UID of the claim to which the entries belong; empty for other files.
	claim string
	// spec is the file's current content, or its last usable content; nil if there was none.
	spec *specs.Spec
	// seen is the file's info from when spec was read or written; nil without a usable file.
	seen fs.FileInfo
	// stale is true if the file could not be replaced.
	stale bool
}

// path returns the same path as NVIDIA's plugin uses: a runtime accepts an entry from neither of
// two files that have it.
func (f *file) path() string { return filepath.Join(f.dir, f.name()) }

// SpecPattern matches the names of all files that a Writer creates in its folder.
const SpecPattern = grant.CDIVendor + "-*.json"

func (f *file) name() string {
	if f.claim != "" {
		return cdilib.GenerateTransientSpecName(grant.CDIVendor, f.class, f.claim) + ".json"
	}
	return cdilib.GenerateSpecName(grant.CDIVendor, f.class) + ".json"
}

// refresh reads the file if it has changed. It reports whether the file may have to be written,
// because it has changed, is missing or is stale. An unusable file counts as missing, and the error
// says why it is unusable.
func (f *file) refresh() (changed bool, err error) {
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

// update writes the file, or removes it if spec is nil.
func (f *file) update(spec *specs.Spec) error {
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
	info, err := f.write(spec)
	if err != nil {
		return fmt.Errorf("write the CDI spec %s: %w", f.path(), withoutPath(err))
	}
	f.seen, f.spec = info, spec
	return nil
}

// write has the CDI library validate and write the spec in a temporary folder, and then moves the
// file into place. A runtime therefore sees either the old file or the new one, complete and
// readable. The library alone would leave a file behind each time the disk is full, and it creates
// files that only root can read.
//
// Each call uses a folder of its own because another Virgate process may be writing too. info
// describes this call's file, even if the other process has replaced it since.
func (f *file) write(spec *specs.Spec) (info fs.FileInfo, err error) {
	if err := os.MkdirAll(f.dir, 0o755); err != nil {
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
	made, beside := filepath.Join(folder, f.name()), folder+".tmp"
	// Runtimes and tools that do not run as root also read specs.
	if err := os.Chmod(made, 0o644); err != nil {
		return nil, err
	}
	info, err = os.Stat(made)
	if err != nil {
		return nil, err
	}
	// Older runtimes notice a new file only if it was renamed within the folder.
	if err := os.Rename(made, beside); err != nil {
		return nil, err
	}
	if err := os.Rename(beside, f.path()); err != nil {
		_ = os.Remove(beside)
		return nil, err
	}
	return info, nil
}

// withoutPath removes the name of a temporary file from an error, so that the same failure always
// has the same text.
func withoutPath(err error) error {
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return path.Err
	}
	if link := (*os.LinkError)(nil); errors.As(err, &link) {
		return link.Err
	}
	return err
}

// specFiles holds the CDI specs of other programs, by path.
type specFiles map[string]specFile

// specFile is a spec as it was when it was read.
type specFile struct {
	info fs.FileInfo
	// entries holds the hardware that each entry gives, by qualified name; see hardwareOf.
	entries map[string][]string
}

// refresh reads the new and changed files in the folders, except own. A file that is not a spec has
// no entries.
func (s *specFiles) refresh(own map[string]bool, dirs ...string) {
	before := *s
	*s = specFiles{}
	for _, dir := range dirs {
		// If the folder cannot be read, a runtime cannot read it either.
		entries, _ := os.ReadDir(dir)
		for _, entry := range entries {
			path := filepath.Join(dir, entry.Name())
			extension := filepath.Ext(path)
			if own[entry.Name()] || extension != ".json" && extension != ".yaml" {
				continue
			}
			info, err := os.Stat(path)
			switch known, ok := before[path]; {
			case err != nil || !info.Mode().IsRegular():
			case ok && same(info, known.info):
				(*s)[path] = known
			default:
				(*s)[path] = specFile{info, readEntries(path)}
			}
		}
	}
}

func readEntries(path string) map[string][]string {
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil {
		return nil
	}
	entries := make(map[string][]string, len(spec.Devices))
	common := hardwareOf(spec.ContainerEdits)
	for _, device := range spec.Devices {
		entries[parser.QualifiedName(spec.GetVendor(), spec.GetClass(), device.Name)] = slices.Concat(common,
			hardwareOf(device.ContainerEdits))
	}
	return entries
}

// entry returns the hardware that the entry gives, and whether a file has the entry.
func (s *specFiles) entry(name string) (hardware []string, found bool) {
	for _, file := range *s {
		hardware, found = file.entries[name]
		if found {
			break
		}
	}
	return hardware, found
}

// filter returns the names that no file has, and an error for the first name that one has: the CDI
// library rejects an entry that two files of one folder have.
func (s *specFiles) filter(names []string) ([]string, error) {
	var err error
	names = slices.DeleteFunc(names, func(name string) bool {
		for _, path := range slices.Sorted(maps.Keys(*s)) {
			if _, conflict := (*s)[path].entries[name]; conflict {
				if err == nil {
					err = fmt.Errorf("%s has the entry %s too, so that a runtime takes neither", path, name)
				}
				return true
			}
		}
		return false
	})
	return names, err
}
