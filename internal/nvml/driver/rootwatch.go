package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/virgate/virgate/internal/driverroot"
)

// RootWatch detects that the driver root in this process's container is no longer the host's. A
// driver in a container of its own, such as the GPU Operator's, is unmounted lazily and mounted
// anew. A container with a bind mount of the old root then keeps it, although no other process has
// a path to it.
type RootWatch struct {
	// Mounted is the driver root that this process uses: Options.ContainerDriverRoot.
	Mounted string
	// Host is where this process sees the host's current driver root: in the folder that contains
	// the driver root, bound with mountPropagation HostToContainer.
	Host string
	// Interval is the time between two checks; 2 s when zero.
	Interval time.Duration
	// Logger logs when the host has no driver; nil disables it.
	Logger *slog.Logger
}

// Check returns the reason why the two roots cannot be compared. The host's root need not exist
// yet.
func (w RootWatch) Check() error {
	if !filepath.IsAbs(w.Host) {
		return fmt.Errorf("%q is no absolute path", w.Host)
	}
	if filepath.Clean(w.Host) == filepath.Clean(w.Mounted) {
		return fmt.Errorf(
			"%s is the driver root itself, which never sees its replacement: mount the folder that holds it", w.Host)
	}
	if _, err := os.Stat(w.Mounted); err != nil {
		return fmt.Errorf("there is no driver root to compare with: %w", err)
	}
	return nil
}

// Run returns an error when the host has another driver in place of the root, and nil when ctx
// ends. While the host has no driver there, a new container would have none either, so Run only
// logs that.
func (w RootWatch) Run(ctx context.Context) error {
	log := cmp.Or(w.Logger, slog.New(slog.DiscardHandler))
	ticker := time.NewTicker(cmp.Or(w.Interval, 2*time.Second))
	defer ticker.Stop()
	for before := rootMounted; ; {
		state, err := w.look()
		switch {
		case err != nil && before != rootGone:
			log.Warn("the driver root cannot be compared with the host's", "error", err)
		case state == rootReplaced:
			return fmt.Errorf(
				"the driver root of this container is not the host's any more: another driver is mounted at %s, "+
					"which only a new container gets", w.Host)
		case state == before:
		case state == rootGone:
			log.Warn("the driver root is no longer mounted on the host; waiting for the next one", "path", w.Host)
		default:
			log.Info("the driver root is mounted again", "path", w.Host)
		}
		before = state
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// rootState is what the host has in place of the driver root.
type rootState string

const (
	rootMounted  rootState = "the same"
	rootGone     rootState = "no driver"
	rootReplaced rootState = "another driver"
)

// look compares the roots by device and inode.
func (w RootWatch) look() (rootState, error) {
	mounted, err := os.Stat(w.Mounted)
	if err != nil {
		return rootGone, err
	}
	host, err := os.Stat(w.Host)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return rootGone, nil
	case err != nil:
		return rootGone, err
	case os.SameFile(mounted, host):
		return rootMounted, nil
	}
	if _, file, _ := find([]root{newRoot(w.Host)}, driverroot.LibraryFolders(), libraryName); file == "" {
		return rootGone, nil
	}
	return rootReplaced, nil
}
