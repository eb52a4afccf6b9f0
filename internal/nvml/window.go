package nvml

import (
	"errors"

	"github.com/virgate/virgate/sharing"
)

// window follows the samples of a board's processes from reading to reading.
type window struct {
	// seen is the time of the latest sample, in the driver's microseconds.
	seen uint64
	// begun says that there was a reading before, so that what is new is of the
	// time since then.
	begun bool
}

// enter takes in what the driver says since the last reading, and returns how
// busy each process was meanwhile, as a ratio: the mean of its samples.
//
// A process without a sample did nothing (nvml.h). That there is no sample at
// all is the answer of an idle board, but also of one whose driver has not
// sampled since, so then only a board that says itself that it is idle is
// believed. What is not known, such as all of the first reading, whose samples
// are of any age, is unknown.
func (w *window) enter(samples []ProcessSample, err error, busy sharing.Figure) func(pid int) sharing.Figure {
	begun := w.begun
	if err == nil || errors.Is(err, NotFound) {
		w.begun = true
	}
	type mean struct{ sum, count int }
	means := map[int]mean{}
	before := w.seen
	for _, s := range samples {
		// Some drivers leave samples unset, or full of nonsense.
		if s.Time <= before || s.SM < 0 || s.SM > 100 {
			continue
		}
		w.seen = max(w.seen, s.Time)
		m := means[s.PID]
		means[s.PID] = mean{m.sum + s.SM, m.count + 1}
	}
	idle := len(means) == 0 && errors.Is(err, NotFound) && busy.Known && busy.Value == 0
	known := begun && (len(means) > 0 || idle)
	return func(pid int) sharing.Figure {
		m := means[pid]
		switch {
		case !known:
			return sharing.Figure{}
		case m.count == 0:
			return sharing.KnownFigure(0)
		}
		return sharing.KnownFigure(float64(m.sum) / float64(m.count) / 100)
	}
}
