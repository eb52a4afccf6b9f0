package report

import (
	"errors"
	"fmt"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func at(seconds int) time.Time { return time.Unix(1_700_000_000+int64(seconds), 0) }

func TestQueueCounts(t *testing.T) {
	q := newQueue(defaultTiming())
	n := warning(GPUUnhealthy, "a")
	q.add(n, at(0))
	s, _, ok := q.take(at(0))
	if !ok || s.count != 1 || s.created || s.name == "" {
		t.Fatalf("took %+v", s)
	}
	q.add(n, at(1)) // While it is being written.
	q.written(s, at(1), false)
	if _, after, ok := q.take(at(2)); ok || after != 29*time.Second {
		t.Errorf("taken %t, or after %s", ok, after)
	}
	q.add(n, at(3))
	again, _, ok := q.take(at(31))
	if !ok || again.count != 3 || !again.created || again.name != s.name || !again.first.Equal(at(0)) || !again.last.Equal(at(3)) {
		t.Errorf("took %+v", again)
	}
	q.written(again, at(31), true) // The API has forgotten it.
	anew, _, ok := q.take(at(100))
	if !ok || anew.count != 2 || anew.created || anew.name == s.name {
		t.Errorf("took %+v", anew)
	}
	q.written(anew, at(100), false)
	if s, after, ok := q.take(at(10_000)); ok || after != 0 {
		t.Errorf("took %+v, or after %s", s, after)
	}
}

// TestQueueForgetsOldCounts lets so much time pass that the API has forgotten
// the event.
func TestQueueForgetsOldCounts(t *testing.T) {
	q := newQueue(defaultTiming())
	n := normal(ProfileApplied, "a")
	q.add(n, at(0))
	s, _, _ := q.take(at(0))
	q.written(s, at(0), false)
	q.add(n, at(3600))
	if s, _, ok := q.take(at(3600)); !ok || s.created || s.count != 1 {
		t.Errorf("took %+v", s)
	}
}

func TestQueueIsBounded(t *testing.T) {
	q := newQueue(defaultTiming())
	for i := range 10 * longestQueue {
		q.add(normal(ProfileApplied, "%d", i), at(i))
	}
	if len(q.series) != longestQueue || q.takeDropped() != 9*longestQueue || q.takeDropped() != 0 {
		t.Errorf("%d are kept", len(q.series))
	}
	if s, _, _ := q.take(at(0)); s.message != fmt.Sprint(9*longestQueue) {
		t.Errorf("the oldest is %s", s.message)
	}
	written := 0
	now := at(0)
	for range longestQueue {
		if s, _, ok := q.take(now); ok {
			q.written(s, now, false)
			written++
		}
	}
	if _, after, ok := q.take(now); written != 25 || ok || after != 10*time.Second {
		t.Errorf("%d written at once, the next %t or after %s", written, ok, after)
	}
	// A written one makes room before one that waits.
	q.add(normal(ProfileApplied, "more"), now)
	if q.takeDropped() != 0 || len(q.series) != longestQueue {
		t.Error("one that waits was dropped")
	}
}

func TestBackoff(t *testing.T) {
	for _, test := range []struct {
		name        string
		err         error
		failures    int
		least, most time.Duration
	}{
		{"first", errors.New("x"), 1, 500 * time.Millisecond, time.Second},
		{"third", errors.New("x"), 3, 2 * time.Second, 4 * time.Second},
		{"many", errors.New("x"), 1000, time.Minute, 2 * time.Minute},
		{"no such Node", fmt.Errorf("patch: %w", apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "n1")), 1000, 7500 * time.Millisecond, 15 * time.Second},
		{"what was asked for, and not the same on all nodes", fmt.Errorf("patch: %w", apierrors.NewTooManyRequests("slow down", 300)), 1, 300*time.Second + 500*time.Millisecond, 601 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			unlike := map[time.Duration]bool{}
			longest := time.Duration(0)
			for range 100 {
				wait := backoff(test.err, test.failures, defaultTiming())
				if wait < test.least || wait > test.most {
					t.Fatalf("%s, want %s to %s", wait, test.least, test.most)
				}
				unlike[wait], longest = true, max(longest, wait)
			}
			if longest < (test.least+test.most)/2 {
				t.Errorf("the longest of 100 is %s: not spread from %s to %s", longest, test.least, test.most)
			}
			if test.least != test.most && len(unlike) < 10 {
				t.Errorf("only %d different waits: no jitter", len(unlike))
			}
		})
	}
}

// TestQueueDropsWhatIsWritten has an older event that waits and a newer one that
// is written: the newer one makes room.
func TestQueueDropsWhatIsWritten(t *testing.T) {
	q := newQueue(defaultTiming())
	a, b := normal(ProfileApplied, "a"), normal(ProfileApplied, "b")
	for i, n := range []notice{a, b} {
		q.add(n, at(2*i))
		s, _, ok := q.take(at(2 * i))
		if !ok || s.notice != n {
			t.Fatalf("took %+v", s)
		}
		q.written(s, at(2*i), false)
		if n == a {
			q.add(a, at(1))
		}
	}
	for i := len(q.series); i <= longestQueue; i++ {
		q.add(normal(ProfileApplied, "%d", i), at(3))
	}
	if q.takeDropped() != 0 || q.series[0].notice != a || q.series[1].notice == b {
		t.Errorf("the first are %+v and %+v", q.series[0], q.series[1])
	}
}
