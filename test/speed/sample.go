package main

import (
	"slices"
	"time"
)

// sample is how long something took each time, in no order.
type sample []time.Duration

// median is the middle one, of an even number the lower of the two; 0 for none.
// It stays where it is when a busy machine makes a few of them slow.
func (s sample) median() time.Duration { return s.quantile(0.5) }

// quantile is the smallest one that the fraction q of all does not exceed.
func (s sample) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[int(q*float64(len(sorted)-1))]
}

// timed adds how long a call took.
func (s *sample) timed(call func() error) error {
	began := time.Now()
	if err := call(); err != nil {
		return err
	}
	*s = append(*s, time.Since(began))
	return nil
}

// over is the ratio of the medians; 0 when other has none.
func (s sample) over(other sample) float64 {
	if other.median() == 0 {
		return 0
	}
	return float64(s.median()) / float64(other.median())
}

// milliseconds and microseconds are for figures.
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
