package scenario

import (
	"fmt"
	"os"
	"path/filepath"
)

func (c *call) replaceProfile() error {
	if c.not {
		return os.Remove(c.profile())
	}
	if len(c.arguments) != 1 {
		return errUsage
	}
	return c.putProfile(c.take())
}

// putProfile replaces the profile as a whole, as careful editors do.
func (c *call) putProfile(file string) error {
	data := c.script.ReadFile(file)
	next := c.profile() + ".new"
	if err := os.WriteFile(next, []byte(data), 0o600); err != nil {
		return err
	}
	c.hasProfile = true
	return os.Rename(next, c.profile())
}

// mount does what a kubelet does with a ConfigMap volume: a new folder for each
// version, the link ..data that moves to it in one step, and a link for each
// key that goes through ..data and never changes.
func (c *call) mount() error {
	if len(c.arguments) != 2 {
		return errUsage
	}
	volume := c.script.MkAbs(c.take())
	data := c.script.ReadFile(c.take())
	if err := os.MkdirAll(volume, 0o750); err != nil {
		return err
	}
	old, _ := os.Readlink(filepath.Join(volume, "..data"))
	version, err := os.MkdirTemp(volume, "..version_")
	if err != nil {
		return err
	}
	const key = "profile.yaml"
	if err := os.WriteFile(filepath.Join(version, key), []byte(data), 0o600); err != nil {
		return err
	}
	next := filepath.Join(volume, "..data_tmp")
	if err := os.Symlink(filepath.Base(version), next); err != nil {
		return err
	}
	if err := os.Rename(next, filepath.Join(volume, "..data")); err != nil {
		return err
	}
	if old == "" {
		return os.Symlink(filepath.Join("..data", key), filepath.Join(volume, key))
	}
	if err := os.RemoveAll(filepath.Join(volume, old)); err != nil {
		return fmt.Errorf("remove the old version: %w", err)
	}
	return nil
}
