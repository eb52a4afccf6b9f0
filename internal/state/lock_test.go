package state

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
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

// TestLockWaitLeaksNothing checks that tries for the lock leak no file descriptors: a standby tries 200 times a
// second for weeks.
func TestLockWaitLeaksNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), LockName)
	lock, err := tryLock(path, syscall.LOCK_EX)
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
		if _, err := tryLock(path, syscall.LOCK_EX); !errors.Is(err, ErrLocked) {
			t.Fatalf("got %v", err)
		}
	}
	if more := open() - before; more > 100 {
		t.Errorf("%d descriptors more", more)
	}
}

func TestLastOfADirectory(t *testing.T) {
	dir := t.TempDir()
	lock := func(name string, kind int) *Lock {
		t.Helper()
		lock, err := tryLock(filepath.Join(dir, name), kind)
		if err != nil {
			t.Fatal(err)
		}
		return lock
	}
	for _, test := range []struct {
		name, file string
		kind       int
	}{{"another serves", LockName, syscall.LOCK_EX}, {"another stands by", StandbyName, syscall.LOCK_SH}} {
		other := lock(test.file, test.kind)
		if _, last := AcquireLast(dir); last {
			t.Errorf("%s, and this is the last", test.name)
		}
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
	}
	last, ok := AcquireLast(dir)
	if !ok {
		t.Fatal("alone, and not the last")
	}
	if _, err := tryLock(filepath.Join(dir, LockName), syscall.LOCK_EX); !errors.Is(err, ErrLocked) {
		t.Errorf("the last does not have the lock: %v", err)
	}
	if err := last.Release(); err != nil {
		t.Fatal(err)
	}
	if _, ok := AcquireLast(filepath.Join(dir, "missing")); ok {
		t.Error("the last of a directory that is not there")
	}
}

// TestStandbyIsSeen checks that a standby is visible from its notice until it no longer waits.
func TestStandbyIsSeen(t *testing.T) {
	dir := t.TempDir()
	standby := filepath.Join(dir, StandbyName)
	serving, err := tryLock(filepath.Join(dir, LockName), syscall.LOCK_EX)
	if err != nil {
		t.Fatal(err)
	}
	seen := func() bool {
		lock, err := tryLock(standby, syscall.LOCK_EX)
		if err == nil {
			err = lock.Release()
		} else if errors.Is(err, ErrLocked) {
			return true
		}
		if err != nil {
			t.Error(err)
		}
		return false
	}
	stand := func() (giveUp func()) {
		ctx, cancel := context.WithCancel(t.Context())
		waiting, ended := make(chan struct{}, 2), make(chan error)
		go func() {
			_, err := Acquire(ctx, dir, func(error) { waiting <- struct{}{} })
			ended <- err
		}()
		<-waiting
		return func() {
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	}
	first, second := stand(), stand()
	for _, giveUp := range []func(){first, second} {
		if !seen() {
			t.Error("who waits is not seen")
		}
		giveUp()
	}
	if seen() {
		t.Error("who has waited is still seen")
	}
	waiting, ended := make(chan struct{}, 2), make(chan error)
	go func() {
		lock, err := Acquire(t.Context(), dir, func(error) { waiting <- struct{}{} })
		if err == nil && seen() {
			err = errors.New("who serves is seen as standing by")
		}
		if err == nil {
			err = lock.Release()
		}
		ended <- err
	}()
	<-waiting
	if err := serving.Release(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestSomebodyIsTheLast ends a serving and several waiting programs at the same time: each time, one of them
// finds that it is the last.
func TestSomebodyIsTheLast(t *testing.T) {
	dir := t.TempDir()
	for round := range 300 {
		serving, err := Acquire(t.Context(), dir, func(err error) { t.Errorf("round %d: %v", round, err) })
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var last atomic.Int32
		leave := func(lock *Lock) {
			if lock != nil {
				if err := lock.Release(); err != nil {
					t.Error(err)
				}
			}
			if lock, ok := AcquireLast(dir); ok {
				last.Add(1)
				if err := lock.Release(); err != nil {
					t.Error(err)
				}
			}
		}
		waiting := make(chan struct{}, 2)
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				lock, _ := Acquire(ctx, dir, func(error) { waiting <- struct{}{} })
				leave(lock)
			})
		}
		<-waiting
		<-waiting
		all.Go(cancel)
		all.Go(func() { leave(serving) })
		all.Wait()
		if last.Load() == 0 {
			t.Fatalf("round %d: nobody was the last", round)
		}
	}
}
