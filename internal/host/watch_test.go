package host

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// watched is a Host with the usual times, whose clock stands still but when the
// test waits.
type watched struct {
	*Host
	specs   *specs
	log     *bytes.Buffer
	changes atomic.Int64
}

// inBubble runs the test on a Host that is watched.
func inBubble(t *testing.T, test func(t *testing.T, w *watched)) {
	synctest.Test(t, func(t *testing.T) {
		w := &watched{specs: &specs{}, log: &bytes.Buffer{}}
		w.Host = New(Options{Root: t.TempDir(), Specs: w.specs, Logger: slog.New(slog.NewTextHandler(w.log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- w.Watch(ctx, func() { w.changes.Add(1) }) }()
		test(t, w)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func pass(d time.Duration) { <-time.After(d) }

// changed says how often the Host called until now.
func (w *watched) changed() int64 {
	synctest.Wait()
	return w.changes.Load()
}

func both() []string { return []string{plugin.CDIName("gpu", "GPU-0"), plugin.CDIName("gpu", "0")} }

// TestNothingNewNoChange holds that nobody is woken for what they know.
func TestNothingNewNoChange(t *testing.T) {
	inBubble(t, func(t *testing.T, w *watched) {
		pass(time.Minute)
		if w.changed() != 0 {
			t.Error("changed before anything was asked for")
		}
		w.Prepare(by(sharing.Envvar), gpus())
		pass(time.Minute)
		if w.changed() != 0 || w.specs.writes != 0 {
			t.Errorf("%d changes, %d specs written without CDI", w.changed(), w.specs.writes)
		}
		w.specs.set(func() { w.specs.names = both() })
		w.Prepare(by(sharing.CDICRI), gpus())
		pass(time.Minute)
		if w.changed() != 0 || w.specs.writes < 50 {
			t.Errorf("%d changes, %d looks at the specs in a minute", w.changed(), w.specs.writes)
		}
		w.specs.set(func() { w.specs.names = nil })
		pass(1100 * time.Millisecond)
		if w.changed() == 0 {
			t.Error("entries that are gone change nothing")
		}
	})
}

// TestLateSpecs holds that specs that come late are told of when they come, and
// that the next ones are waited for again.
func TestLateSpecs(t *testing.T) {
	inBubble(t, func(t *testing.T, w *watched) {
		block := make(chan struct{})
		w.specs.set(func() { w.specs.block, w.specs.names = block, both() })
		start := time.Now()
		w.Prepare(by(sharing.CDICRI), gpus())
		if waited := time.Since(start); waited != 2*time.Second {
			t.Errorf("waited %s", waited)
		}
		pass(100 * time.Millisecond)
		w.specs.set(func() { w.specs.block = nil })
		close(block)
		if w.changed() == 0 {
			t.Error("not told when the specs are there")
		}

		block = make(chan struct{})
		w.specs.set(func() { w.specs.block = block })
		start = time.Now()
		w.Prepare(by(sharing.CDICRI), gpus())
		if waited := time.Since(start); waited != 2*time.Second {
			t.Errorf("waited %s the next time", waited)
		}
		close(block)
	})
}

// TestNobodyWaitsAtTheEnd holds that the end of the program, which waits for
// Prepare, is not held up by specs that nobody writes any more.
func TestNobodyWaitsAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		block := make(chan struct{})
		h := New(Options{Root: t.TempDir(), Specs: &specs{block: block}, Logger: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- h.Watch(ctx, func() {}) }()
		start := time.Now()
		go func() {
			pass(100 * time.Millisecond)
			cancel()
		}()
		h.Prepare(by(sharing.CDICRI), gpus())
		if waited := time.Since(start); waited != 100*time.Millisecond {
			t.Errorf("waited %s, and the end came after 100ms", waited)
		}
		close(block)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		start = time.Now()
		h.Prepare(by(sharing.CDICRI), gpus())
		if waited := time.Since(start); waited != 0 {
			t.Errorf("waited %s after the end", waited)
		}
	})
}

// TestProblemIsLoggedOnce holds that a problem that stays is one line.
func TestProblemIsLoggedOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, w *watched) {
		problem := func(err error) {
			w.specs.set(func() { w.specs.err = err })
			w.Prepare(by(sharing.CDICRI), gpus())
			pass(10 * time.Second)
			synctest.Wait()
		}
		problem(errors.New("driver is out"))
		problem(errors.New("disk is full"))
		problem(nil)
		if got := w.log.String(); strings.Count(got, "\n") != 2 || strings.Count(got, "cdi specs incomplete") != 2 {
			t.Errorf("logged:\n%s", got)
		}
	})
}
