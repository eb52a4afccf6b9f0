package state

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLockIsHeldByOne(t *testing.T) {
	dir := t.TempDir()
	first, err := Acquire(t.Context(), dir, func(error) { t.Error("waited for nobody") })
	if err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	acquired := make(chan error, 1)
	go func() {
		second, err := Acquire(t.Context(), dir, func(err error) { waiting <- err })
		if err == nil {
			err = second.Release()
		}
		acquired <- err
	}()
	if err := <-waiting; !errors.Is(err, ErrLocked) {
		t.Errorf("waits because of %v", err)
	}
	select {
	case err := <-acquired:
		t.Fatalf("two have the lock: %v", err)
	default:
	}
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	if err := <-acquired; err != nil {
		t.Error(err)
	}
}

func TestLockSaysWhyItWaits(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, LockName), 0o700); err != nil { // No file can be opened there.
		t.Fatal(err)
	}
	reasons := make(chan error, 10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := Acquire(ctx, dir, func(err error) { reasons <- err })
		ended <- err
	}()
	if err := <-reasons; errors.Is(err, ErrLocked) {
		t.Errorf("waits because of %v", err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
	if len(reasons) > 0 {
		t.Errorf("the same reason again: %v", <-reasons)
	}
}

func TestLockWaitEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var reason error
	if _, err := Acquire(ctx, filepath.Join(t.TempDir(), "missing"), func(err error) { reason = err }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if !errors.Is(reason, os.ErrNotExist) {
		t.Errorf("waits because of %v", reason)
	}
}

// TestLockWaitLeaksNothing: who stands by for weeks tries 200 times a second.
func TestLockWaitLeaksNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), LockName)
	lock, err := tryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Release() }()
	open := func() int {
		descriptors, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skipf("descriptors cannot be counted here: %v", err)
		}
		return len(descriptors)
	}
	before := open()
	for range 1000 {
		if _, err := tryLock(path); !errors.Is(err, ErrLocked) {
			t.Fatalf("got %v", err)
		}
	}
	if more := open() - before; more > 100 {
		t.Errorf("%d descriptors more", more)
	}
}
