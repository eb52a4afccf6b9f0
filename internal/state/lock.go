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

// LockName is the lock file's name in the device-plugins directory. StandbyName is the name of the
// file on which all programs that wait for the lock hold a shared lock.
const (
	LockName    = "virgate.lock"
	StandbyName = "virgate.standby"
)

// lockInterval is how often a waiting program tries to get the lock, and so how soon
// it takes over. (A blocking flock could not be cancelled at exit.)
const lockInterval = 5 * time.Millisecond

// Lock is held by the one Virgate that serves a device-plugins directory. The kernel releases it
// when the process ends, for whatever reason.
type Lock struct{ file *os.File }

// Acquire waits for the lock in dir, which need not exist yet. It calls waiting with each new
// reason to wait: ErrLocked, or an error of the file system. It fails only if ctx ends.
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
			standby, _ = tryLock(filepath.Join(dir, StandbyName), syscall.LOCK_SH) // If not now, at the next tick.
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

// AcquireLast returns the lock if no process has it or waits for it. It also returns false if that cannot
// be determined. A process that has served a directory, or has waited to, calls it after it has stopped
// doing so. If several processes end at once, the last one gets the lock: each has released its own locks
// before it checks the others', and a process that then has the lock either serves or is the last.
func AcquireLast(dir string) (*Lock, bool) {
	waits, err := tryLock(filepath.Join(dir, StandbyName), syscall.LOCK_EX)
	if err != nil || waits.Release() != nil {
		return nil, false
	}
	lock, err := tryLock(filepath.Join(dir, LockName), syscall.LOCK_EX)
	return lock, err == nil
}

// ErrLocked means that another process has the lock.
var ErrLocked = errors.New("another Virgate serves this node")

// tryLock gets a lock of the kind LOCK_EX or LOCK_SH, without waiting.
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
