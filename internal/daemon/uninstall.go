package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
)

// RemoveHostFiles removes everything that Virgate has written to the machine's device-plugins and
// CDI directories, and its file of feature labels. It returns the removed paths. If there is
// nothing, it creates nothing either, not even briefly the lock. It fails if a Virgate serves the
// machine.
func RemoveHostFiles(ctx context.Context, pluginDir, cdiDir, featureFile string) (removed []string, err error) {
	if _, err := os.Stat(pluginDir); err != nil {
		return nil, fmt.Errorf("find --device-plugin-dir: %w", err)
	}
	if paths, err := hostFiles(pluginDir, cdiDir, featureFile); err != nil || len(paths) == 0 {
		return nil, err
	}
	lock, err := lockOnce(ctx, pluginDir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Release() }()
	paths, err := hostFiles(pluginDir, cdiDir, featureFile)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, path := range paths {
		if err := os.Remove(path); err != nil {
			errs = append(errs, fmt.Errorf("remove what Virgate left: %w", err))
			continue
		}
		removed = append(removed, path)
	}
	return removed, errors.Join(errs...)
}

// hostFiles returns the files that RemoveHostFiles removes, in its order.
func hostFiles(pluginDir, cdiDir, featureFile string) (paths []string, err error) {
	if _, err := os.Lstat(featureFile); err == nil {
		paths = append(paths, featureFile)
	}
	for _, pattern := range []string{
		filepath.Join(cdiDir, cdi.SpecPattern), filepath.Join(pluginDir, "cdi", cdi.SpecPattern),
		filepath.Join(pluginDir, "cdi"),
		filepath.Join(pluginDir, plugin.SocketPattern), filepath.Join(pluginDir, state.Name+"*"),
		filepath.Join(pluginDir, state.StandbyName),
		// The lock comes last: before that, no other Virgate can serve.
		filepath.Join(pluginDir, state.LockName),
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("find %s: %w", pattern, err)
		}
		slices.Sort(found)
		paths = append(paths, found...)
	}
	return paths, nil
}
