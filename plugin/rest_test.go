package plugin

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/virgate/virgate/sharing"
)

// resting is a manager in simulated time, whose directory is missing, and the kubelet that it
// reads. It belongs in a synctest bubble.
type resting struct {
	*Manager
	// unreadable: each reading fails, after a millisecond. hangs: it lasts until ending is closed. full: the store
	// saves nothing.
	unreadable, hangs, full atomic.Bool
	ending                  chan struct{}
	// readings counts readings of the kubelet, steps the manager's steps, saves attempts to save.
	readings, steps, saves atomic.Int64
}

func (r *resting) read() error {
	r.readings.Add(1)
	if r.hangs.Load() {
		<-r.ending
	}
	<-time.After(time.Millisecond) //nolint:forbidigo // in a synctest bubble: the time is simulated
	if r.unreadable.Load() {
		return errors.New("no socket")
	}
	return nil
}

func (r *resting) Held(context.Context) ([]sharing.Allocation, error) { return nil, r.read() }

// Applied has every list applied at once.
func (r *resting) Applied(context.Context) (map[string][]string, error) {
	err := r.read()
	applied := map[string][]string{}
	for _, s := range r.status.Load().servers {
		for _, e := range s.current.Load().list.Entries {
			if e.Healthy {
				applied[s.name] = append(applied[s.name], e.ID)
			}
		}
	}
	return applied, err
}

func (r *resting) Serving(context.Context, string) (bool, error) { return false, nil }

func (r *resting) Load() (Lists, error) { return nil, nil }

func (r *resting) Save(Lists) error {
	r.saves.Add(1)
	if r.full.Load() {
		return errors.New("no space left on device")
	}
	return nil
}

// rest runs the test with a manager.
func rest(t *testing.T, test func(r *resting)) {
	synctest.Test(t, func(t *testing.T) {
		r := &resting{ending: make(chan struct{})}
		r.Manager = NewManager(Options{
			Dir:     filepath.Join(t.TempDir(), "missing"),
			Kubelet: r,
			Store:   r,
			Logger:  slog.New(slog.DiscardHandler),
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- r.Run(ctx) }()
		go func() {
			for ; ; r.steps.Add(1) {
				select {
				case <-r.status.Load().superseded:
				case <-ctx.Done():
					return
				}
			}
		}()
		test(r)
		close(r.ending)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// pass lets time pass, and returns how many steps and readings were made in it.
func (r *resting) pass(d time.Duration) (steps, readings int64) {
	steps, readings = r.steps.Load(), r.readings.Load()
	<-time.After(d) //nolint:forbidigo // in a synctest bubble: the time is simulated
	synctest.Wait()
	return r.steps.Load() - steps, r.readings.Load() - readings
}

// openStream is a stream on which lists are sent. It is not empty, so that each is another one.
type openStream struct {
	grpc.ServerStream
	_ int
}

// send has the newest lists sent, each on a new stream.
func (r *resting) send() {
	r.pass(10 * time.Millisecond) // The first lists wait for a reading.
	for _, s := range r.status.Load().servers {
		s.sent.Store(&sentList{s.current.Load(), &openStream{}})
		s.listed.Notify()
	}
	synctest.Wait()
}

// grant has Allocate grant the first device of the only resource.
func (r *resting) grant() {
	s := r.status.Load().servers[0]
	s.current.Load().uses[0].granted.Store(r.options.Now().UnixNano())
	s.grants.Notify()
}

// applied reports whether the status shows that the kubelet has the only list, and was readable.
func (r *resting) applied() bool {
	status := r.Status()
	return status.Resources[0].Applied && status.KubeletSeen
}

// TestUnreadableKubeletIsReadRarely has an unreadable kubelet for an hour. It is read less and less often, even
// if pods are granted, and often again after a change.
func TestUnreadableKubeletIsReadRarely(t *testing.T) {
	rest(t, func(r *resting) {
		r.unreadable.Store(true)
		r.Apply(planOf(nil, "gpu=4:A,B"))
		r.send()
		r.pass(time.Minute)
		if steps, readings := r.pass(10 * time.Minute); steps > 130 || readings > 130 { // Of lists and of holders.
			t.Errorf("%d steps, %d readings in ten minutes", steps, readings)
		}
		r.grant()
		r.pass(time.Minute)
		if steps, readings := r.pass(10 * time.Minute); steps > 260 || readings > 260 {
			t.Errorf("%d steps, %d readings in ten minutes after a grant", steps, readings)
		}

		// Grants keep coming, and the kubelet becomes readable.
		for range 600 {
			r.grant()
			r.pass(100 * time.Millisecond)
		}
		r.unreadable.Store(false)
		for range 100 {
			r.grant()
			r.pass(100 * time.Millisecond)
		}
		if !r.applied() {
			t.Error("ten seconds after the kubelet can be read, it is not known what it has")
		}
	})
	for name, change := range map[string]func(*resting){
		"a list":   func(r *resting) { r.Apply(planOf(nil, "gpu=5:A,B")); r.send() },
		"a stream": func(r *resting) { r.send() },
	} {
		t.Run(name, func(t *testing.T) {
			rest(t, func(r *resting) {
				r.unreadable.Store(true)
				r.Apply(planOf(nil, "gpu=4:A,B"))
				r.send()
				r.pass(time.Hour)
				change(r)
				r.pass(time.Second)
				r.unreadable.Store(false)
				r.pass(500 * time.Millisecond)
				if !r.applied() {
					t.Error("half a second after the kubelet can be read, it is not known what it has")
				}
			})
		})
	}
}

// TestAReadingMakesOneStep drops a resource: until it has stopped, the kubelet is read every half second, with
// one step each time.
func TestAReadingMakesOneStep(t *testing.T) {
	rest(t, func(r *resting) {
		r.Apply(planOf(nil, "gpu=4:A,B"))
		r.send()
		r.pass(time.Minute)
		r.Apply(planOf(nil, "other=4:C,D"))
		r.send()
		r.pass(time.Second)
		steps, readings := r.pass(20 * time.Second)
		if readings != 80 || steps != 40 {
			t.Errorf("%d steps for %d readings, want 40 for 80: 2 in half a second", steps, readings)
		}
	})
}

// TestHungReadingHoldsNothingUp has a reading hang while there is something to do at a set time.
func TestHungReadingHoldsNothingUp(t *testing.T) {
	t.Run("a resource is to stop", func(t *testing.T) {
		rest(t, func(r *resting) {
			r.Apply(planOf(nil, "gpu=4:A"))
			r.send()
			r.pass(time.Minute)
			r.Apply(sharing.Plan{})
			r.send()
			r.pass(35 * time.Second)
			r.hangs.Store(true) // Its devices have left, and the list is empty.
			r.send()
			if steps, _ := r.pass(20 * time.Second); steps < 38 {
				t.Errorf("%d steps in 20 seconds", steps)
			}
			r.pass(11 * time.Second)
			if left := r.Status().Resources; len(left) > 0 {
				t.Errorf("%s is still served", left[0].Name)
			}
		})
	})
	t.Run("lists are to be kept", func(t *testing.T) {
		rest(t, func(r *resting) {
			r.Apply(planOf(nil, "gpu=4:A"))
			r.send()
			r.pass(time.Minute)
			r.hangs.Store(true)
			r.full.Store(true)
			r.Apply(planOf(nil, "gpu=5:A"))
			r.send()
			r.pass(time.Second)
			r.saves.Store(0)
			if r.pass(time.Minute); r.saves.Load() < 5 {
				t.Errorf("tried %d times in a minute", r.saves.Load())
			}
		})
	})
	t.Run("a device is to be refused", func(t *testing.T) {
		now := time.Now()
		entry := Entry{Phase: Removing, Switching: true, Since: now}
		settling := entry
		settling.Applied = now
		r := &reconciler{
			Manager: NewManager(Options{Now: func() time.Time { return now }}),
			lists:   Lists{"gpu": {Entries: []Entry{entry, settling}}},
		}
		r.schedule.stepped = now
		r.schedule.change()
		if _, any := r.schedule.next(r); !any || r.schedule.due != (reading{applied: true}) {
			t.Fatalf("%+v is read next", r.schedule.due)
		}
		if wait, waits := r.schedule.awaitReading(); waits && wait > r.options.Timing.Settle {
			t.Errorf("the step comes %s later, want %s at most", wait, r.options.Timing.Settle)
		}
	})
}
