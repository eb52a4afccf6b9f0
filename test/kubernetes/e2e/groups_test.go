package e2e

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const groupRoot = "/sys/fs/cgroup"

// hierarchies are the roots of the machine's control groups: one in version 2,
// one for each controller before.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(filepath.Join(groupRoot, "cgroup.controllers")); err == nil {
		return []string{groupRoot}, nil
	}
	return filepath.Glob(filepath.Join(groupRoot, "*"))
}

// addGroups makes the node's own control groups of that name, below which the kubelet makes all others.
func addGroups(name string) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		group := filepath.Join(root, name)
		if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		// A group of the first version's cpuset is of no use without these.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				continue
			}
			if err := os.WriteFile(filepath.Join(group, file), value, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeGroups removes them and those that the kubelet and containerd made.
func removeGroups(name string) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	var all error
	for _, root := range roots {
		var groups []string
		err := filepath.WalkDir(filepath.Join(root, name), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				groups = append(groups, path)
			}
			return err
		})
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		all = errors.Join(all, err)
		for i := len(groups) - 1; i >= 0; i-- {
			all = errors.Join(all, unix.Rmdir(groups[i]))
		}
	}
	return all
}
