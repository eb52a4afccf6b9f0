package plugin

import (
	"slices"
	"sync/atomic"
	"time"
)

const boundCount = 11

// bounds are the upper ends of a latency's buckets. A call takes some
// microseconds; the kubelet's pod handling waits for it, so what takes longer
// than a second is to be seen.
func bounds() [boundCount]time.Duration {
	const us, ms = time.Microsecond, time.Millisecond
	return [...]time.Duration{100 * us, 250 * us, 500 * us, ms, 2500 * us, 5 * ms, 10 * ms, 25 * ms, 100 * ms, 500 * ms, 2500 * ms}
}

// latency counts how long calls take. Whoever observes waits for nobody and
// allocates nothing.
type latency struct {
	// buckets are by bound, each call in one; the last is beyond all bounds.
	buckets [boundCount + 1]atomic.Uint64
	sum     atomic.Int64
}

func (l *latency) observe(took time.Duration) {
	ends := bounds()
	bucket, _ := slices.BinarySearch(ends[:], took)
	l.buckets[bucket].Add(1)
	l.sum.Add(int64(took))
}

// Latency is how long calls took.
type Latency struct {
	// Buckets has the number of calls that took at most so long, for each bound.
	// Calls beyond the last bound are in Count alone.
	Buckets map[time.Duration]uint64
	Count   uint64
	Sum     time.Duration
}

// read sums up. A call that ends meanwhile may be in Sum and not in Count.
func (l *latency) read() Latency {
	read := Latency{Buckets: make(map[time.Duration]uint64, boundCount), Sum: time.Duration(l.sum.Load())}
	for i, bound := range bounds() {
		read.Count += l.buckets[i].Load()
		read.Buckets[bound] = read.Count
	}
	read.Count += l.buckets[boundCount].Load()
	return read
}
