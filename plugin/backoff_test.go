package plugin

import (
	"testing"
	"time"
)

// TestBackoff holds that waits double up to five seconds, and that each is
// somewhere in its upper half.
func TestBackoff(t *testing.T) {
	b := backoff{}
	if got := b.wait(); got != 0 {
		t.Errorf("%s before the first failure", got)
	}
	const ms = time.Millisecond
	different := map[time.Duration]bool{}
	for _, most := range []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5000 * ms, 5000 * ms} {
		first := b.next()
		for _, got := range []time.Duration{first, b.wait(), b.wait(), b.wait()} {
			if got < most/2 || got > most {
				t.Errorf("%s, want %s to %s", got, most/2, most)
			}
			different[got] = true
		}
	}
	if len(different) < 9 {
		t.Errorf("no jitter: %v", different)
	}
	if b.reset(); b.wait() != 0 {
		t.Error("it waits after a success")
	}
}
