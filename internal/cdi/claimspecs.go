package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/plugin/grant"
	"tags.cncf.io/container-device-interface/specs-go"
)

// ClaimSpecs writes the CDI entries that only one claim's containers get, in addition to the
// entries of its units: one file for each claim. Its methods may be called concurrently for
// different claims.
type ClaimSpecs struct {
	// Dir is the same folder as Options.Dir.
	Dir string
}

// claimClass is the CDI class of claims' entries.
const claimClass = "claim"

// ClaimName returns the qualified name of the entry for the claim's device with that number. It
// stays the same while the claim exists, because the kubelet keeps it across restarts and reboots.
func ClaimName(uid string, device int) string {
	return grant.CDIName(claimClass, claimEntry(uid, device))
}

func claimEntry(uid string, device int) string { return uid + "-" + strconv.Itoa(device) }

// Write replaces the claim's entries. They are keyed by the numbers of the claim's devices, and are
// on disk when Write returns.
func (s ClaimSpecs) Write(uid string, entries map[int]grant.Edits) error {
	var devices []specs.Device
	for _, number := range slices.Sorted(maps.Keys(entries)) {
		var edits specs.ContainerEdits
		for _, name := range slices.Sorted(maps.Keys(entries[number].Env)) {
			edits.Env = append(edits.Env, name+"="+entries[number].Env[name])
		}
		for _, m := range entries[number].Mounts {
			access := "rw"
			if m.ReadOnly {
				access = "ro"
			}
			edits.Mounts = append(edits.Mounts, &specs.Mount{
				HostPath:      m.HostPath,
				ContainerPath: m.ContainerPath,
				Options:       []string{access, "rbind", "nosuid", "nodev"},
			})
		}
		devices = append(devices, specs.Device{Name: claimEntry(uid, number), ContainerEdits: edits})
	}
	spec, err := newSpec(claimClass, devices, specs.ContainerEdits{})
	if err != nil {
		return err
	}
	if spec == nil {
		return s.Remove(uid)
	}
	f := s.file(uid)
	if _, err := f.write(spec); err != nil {
		return fmt.Errorf("%s: %w", f.path(), withoutPath(err))
	}
	return nil
}

// Remove removes the claim's entries, if it has any.
func (s ClaimSpecs) Remove(uid string) error {
	f := s.file(uid)
	if err := os.Remove(f.path()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Keep removes the entries of all claims except these.
func (s ClaimSpecs) Keep(uids []string) error {
	any := s.file("*")
	paths, err := filepath.Glob(any.path())
	if err != nil {
		return fmt.Errorf("find the CDI specs of claims: %w", err)
	}
	before, after, _ := strings.Cut(any.name(), "*")
	var errs []error
	for _, path := range paths {
		uid := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), before), after)
		if !slices.Contains(uids, uid) {
			errs = append(errs, s.Remove(uid))
		}
	}
	return errors.Join(errs...)
}

func (s ClaimSpecs) file(uid string) *file {
	return &file{
		dir:   s.Dir,
		class: claimClass,
		claim: uid,
	}
}
