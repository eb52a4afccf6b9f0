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

// LockName is the lock file's name in the device-plugins directory, and StandbyName that of
// the file which all that wait for the lock have locked together.
const (
	LockName    = "virgate.lock"
	StandbyName = "virgate.standby"
)

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
	var standby *Lock
	defer func() {
		if standby != nil {
			_ = standby.Release()
		}
	}()
	for tick := time.Tick(lockInterval); ; {
		lock, err := tryLock(filepath.Join(dir, LockName), syscall.LOCK_EX)
		if err == nil {
			return lock, nil
		}
		if standby == nil && errors.Is(err, ErrLocked) {
			standby, _ = tryLock(filepath.Join(dir, StandbyName), syscall.LOCK_SH) // Else with the next tick.
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

// AcquireLast returns the lock if nobody has it and nobody waits for it; false too when that
// cannot be told. Who has served a directory, or waited to, asks when it does neither any
// more. Of several that end at once the last learns that it is: each has given up its
// own before it looks at that of the others, and whoever has the lock then serves or is the last.
func AcquireLast(dir string) (*Lock, bool) {
	waits, err := tryLock(filepath.Join(dir, StandbyName), syscall.LOCK_EX)
	if err != nil || waits.Release() != nil {
		return nil, false
	}
	lock, err := tryLock(filepath.Join(dir, LockName), syscall.LOCK_EX)
	return lock, err == nil
}

// ErrLocked says that another process has the lock.
var ErrLocked = errors.New("another Virgate serves this node")

// tryLock takes a lock of the kind LOCK_EX or LOCK_SH.
func tryLock(path string, kind int) (*Lock, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), kind|syscall.LOCK_NB); err != nil {
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
