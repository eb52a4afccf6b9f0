package plugin

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/virgate/virgate/sharing"
)

// holdingOn is a kubelet that shows another plugin's devices for a while.
type holdingOn struct {
	until time.Time
	err   error
	asked int
	// patience is how many calls it answers, 0 for all; later calls hang.
	patience int
}

func (h *holdingOn) Serving(ctx context.Context, _ string) (bool, error) {
	h.asked++
	if h.patience > 0 && h.asked > h.patience {
		<-ctx.Done()
		return false, ctx.Err()
	}
	return time.Now().Before(h.until), h.err
}

func (*holdingOn) Held(context.Context) ([]sharing.Allocation, error)   { return nil, nil }
func (*holdingOn) Applied(context.Context) (map[string][]string, error) { return nil, nil }

// TestBarrier measures, in simulated time, how soon the barrier ends after the kubelet has no device to grant any
// more.
func TestBarrier(t *testing.T) {
	for _, row := range []struct {
		name     string
		holds    time.Duration
		err      error
		late     time.Duration // at most
		asked    int           // at most
		patience int
		givesUp  bool          // and logs it
		untilEnd time.Duration // zero for no end
	}{
		{name: "let go already", asked: 1},
		{name: "lets go at once", holds: time.Millisecond, late: 4 * time.Millisecond, asked: 2},
		{name: "lets go soon", holds: 12 * time.Millisecond, late: 5 * time.Millisecond, asked: 3},
		{name: "takes a second", holds: time.Second, late: 50 * time.Millisecond, asked: 26},
		{name: "never", holds: time.Hour, givesUp: true, asked: 210},
		{name: "never, and then does not answer", holds: time.Hour, patience: 3, givesUp: true, asked: 4},
		{name: "does not say", holds: time.Hour, err: errors.New("no socket"), asked: 1},
		{name: "the program ends", holds: time.Hour, untilEnd: time.Millisecond, asked: 1},
		{name: "the program ends without an answer", holds: time.Hour, patience: 1, untilEnd: time.Second, asked: 2},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				kubelet := &holdingOn{until: began.Add(row.holds), err: row.err, patience: row.patience}
				ctx := t.Context()
				if row.untilEnd > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, row.untilEnd)
					defer cancel()
				}
				var log strings.Builder
				(&server{Options: Options{Kubelet: kubelet, Logger: slog.New(slog.NewTextHandler(&log, nil))}}).awaitBarrier(ctx)
				took, want := time.Since(began), row.holds //nolint:forbidigo // in a synctest bubble: the time is simulated
				switch {
				case row.err != nil:
					want = 0
				case row.untilEnd > 0:
					want = row.untilEnd
				case row.givesUp:
					want = barrierTimeout
				}
				if took < want || took > want+row.late {
					t.Errorf("took %s, want %s and at most %s more", took, want, row.late)
				}
				if warned := strings.Contains(log.String(), "registering all the same"); warned != row.givesUp {
					t.Errorf("the log says %q", log.String())
				}
				if kubelet.asked > row.asked {
					t.Errorf("asked %d times, want %d at most", kubelet.asked, row.asked)
				}
			})
		})
	}
}

// telling is a kubelet that answers, after something has happened, whether it
// shows devices.
type telling struct {
	holdingOn
	happens func()
	serving bool
}

func (k *telling) Serving(context.Context, string) (bool, error) {
	if k.happens != nil {
		k.happens()
	}
	return k.serving, k.err
}

func TestIsIgnored(t *testing.T) {
	list := func(healthy bool) *generation {
		return &generation{list: List{Entries: []Entry{{Device: sharing.Device{ID: "a", Healthy: false}}, {Device: sharing.Device{ID: "b", Healthy: healthy}}}}}
	}
	for _, row := range []struct {
		name    string
		healthy bool
		kubelet telling
		changed bool // the list, while the kubelet is asked
		want    bool
	}{
		{name: "shows nothing", healthy: true, want: true},
		{name: "shows devices", healthy: true, kubelet: telling{serving: true}},
		{name: "has nothing to show"},
		{name: "does not say", healthy: true, kubelet: telling{holdingOn: holdingOn{err: errors.New("no socket")}}},
		{name: "has another list to read", healthy: true, changed: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := &server{Options: Options{Kubelet: &row.kubelet}}
			s.current.Store(list(row.healthy))
			if row.changed {
				row.kubelet.happens = func() { s.current.Store(list(true)) }
			}
			if got := s.isIgnored(t.Context()); got != row.want {
				t.Errorf("ignored: %t", got)
			}
		})
	}
}

// TestBackoff checks that pauses double up to five seconds, and that each is
// somewhere in its upper half.
func TestBackoff(t *testing.T) {
	const ms = time.Millisecond
	different := map[time.Duration]bool{}
	b := newBackoff()
	for range 4 {
		if b.pause != 0 {
			t.Errorf("%s before the first failure", b.pause)
		}
		for _, most := range []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5000 * ms, 5000 * ms} {
			b.grow()
			if b.pause < most/2 || b.pause > most {
				t.Errorf("%s, want %s to %s", b.pause, most/2, most)
			}
			different[b.pause] = true
		}
		b.reset()
	}
	if len(different) < 9 {
		t.Errorf("no jitter: %v", different)
	}
}
