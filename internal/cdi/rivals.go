package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/virgate/virgate/plugin"
)

// rivals are the files of the folder that others wrote. An entry that two files
// of one folder have is no entry: the CDI library gives a runtime neither.
type rivals struct {
	// seen tells the files as they were when they were read.
	seen string
	// entries say which file has an entry of our vendor, by qualified name.
	entries map[string]string
}

// look reads the others' files again when one is new, changed or gone. What is
// no spec has no entries.
func (r *rivals) look(dir string, own map[string]bool) {
	// Where the folder cannot be read, no runtime reads a rival either.
	entries, _ := os.ReadDir(dir)
	var seen strings.Builder
	var paths []string
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		extension := filepath.Ext(path)
		if own[entry.Name()] || extension != ".json" && extension != ".yaml" {
			continue
		}
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			fmt.Fprintln(&seen, path, info.ModTime().UnixNano(), info.Size())
			paths = append(paths, path)
		}
	}
	if seen.String() == r.seen {
		return
	}
	*r = rivals{seen: seen.String(), entries: map[string]string{}}
	for _, path := range paths {
		spec, err := cdilib.ReadSpec(path, 0)
		if err != nil || spec.GetVendor() != plugin.CDIVendor {
			continue
		}
		for _, device := range spec.Devices {
			r.entries[plugin.CDIName(spec.GetClass(), device.Name)] = path
		}
	}
}

// without returns the names that no other file has, and an error that says which
// one of them another file has too.
func (r *rivals) without(names []string) ([]string, error) {
	var err error
	names = slices.DeleteFunc(names, func(name string) bool {
		path, rival := r.entries[name]
		if rival && err == nil {
			err = fmt.Errorf("%s has the entry %s too, so that a runtime takes neither", path, name)
		}
		return rival
	})
	return names, err
}
