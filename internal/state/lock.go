package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// LockName is the lock file's name in the device-plugins directory.
const LockName = "virgate.lock"

// lockInterval is how often a waiting program tries to get the lock, and so how soon
// it takes over. (A blocking flock could not be cancelled at exit.)
const lockInterval = 5 * time.Millisecond

// Lock is held by the one Virgate that serves a device-plugins directory. The kernel
// releases it when the process ends, however that happens.
type Lock struct{ file *os.File }

// Acquire waits for the lock in dir, which need not exist yet. It calls waiting with each
// new reason to wait: ErrLocked, or a file system's error. It fails only when ctx ends.
func Acquire(ctx context.Context, dir string, waiting func(err error)) (*Lock, error) {
	said := ""
	for tick := time.Tick(lockInterval); ; {
		lock, err := tryLock(filepath.Join(dir, LockName))
		if err == nil {
			return lock, nil
		}
		if err.Error() != said {
			said = err.Error()
			waiting(err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the lock in %s: %w", dir, ctx.Err())
		case <-tick:
		}
	}
}

// ErrLocked says that another process has the lock.
var ErrLocked = errors.New("another Virgate serves this node")

func tryLock(path string) (*Lock, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrLocked
		} else {
			err = fmt.Errorf("lock %s: %w", path, err)
		}
		return nil, errors.Join(err, file.Close())
	}
	return &Lock{file}, nil
}

// Release lets a successor serve.
func (l *Lock) Release() error { return l.file.Close() }
