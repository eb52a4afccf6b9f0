package plugin

import (
	"context"
	"errors"
	"log/slog"
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
}

func (h *holdingOn) Serving(context.Context, string) (bool, error) {
	h.asked++
	return time.Now().Before(h.until), h.err
}

func (*holdingOn) Held(context.Context) ([]sharing.Allocation, error)   { return nil, nil }
func (*holdingOn) Applied(context.Context) (map[string][]string, error) { return nil, nil }

// TestBarrier counts the time, on a clock that nobody waits for, from the moment
// in which the kubelet has let go: as long as it has no device to grant.
func TestBarrier(t *testing.T) {
	for _, row := range []struct {
		name     string
		holds    time.Duration
		err      error
		late     time.Duration // at most
		asked    int           // at most
		givesUp  bool
		untilEnd time.Duration // zero for no end
	}{
		{name: "let go already", asked: 1},
		{name: "lets go at once", holds: time.Millisecond, late: 4 * time.Millisecond, asked: 2},
		{name: "lets go soon", holds: 12 * time.Millisecond, late: 5 * time.Millisecond, asked: 3},
		{name: "takes a second", holds: time.Second, late: 50 * time.Millisecond, asked: 26},
		{name: "never", holds: time.Hour, givesUp: true, asked: 210},
		{name: "does not say", holds: time.Hour, err: errors.New("no socket"), asked: 1},
		{name: "the program ends", holds: time.Hour, untilEnd: time.Millisecond, asked: 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				kubelet := &holdingOn{until: began.Add(row.holds), err: row.err}
				ctx := t.Context()
				if row.untilEnd > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, row.untilEnd)
					defer cancel()
				}
				(&server{kubelet: kubelet, log: slog.New(slog.DiscardHandler)}).awaitBarrier(ctx)
				took, want := time.Since(began), row.holds
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
				if kubelet.asked > row.asked {
					t.Errorf("asked %d times, want %d at most", kubelet.asked, row.asked)
				}
			})
		})
	}
}
