package nvml

import (
	"testing"

	"github.com/virgate/virgate/sharing"
)

// TestWindowTakesNoSampleTwice holds that for drivers that tell more than they
// were asked.
func TestWindowTakesNoSampleTwice(t *testing.T) {
	w := window{seen: 100, begun: true}
	work := w.enter([]ProcessSample{{PID: 1, Time: 100, SM: 90}, {PID: 1, Time: 200, SM: 10}}, nil, sharing.Figure{})
	if got := work(1); got != sharing.KnownFigure(0.1) || w.seen != 200 {
		t.Errorf("SM %+v up to %d, want that of the second sample", got, w.seen)
	}
}

// TestWindowTakesNoNonsense holds for drivers that hand out samples which they
// have not set.
func TestWindowTakesNoNonsense(t *testing.T) {
	w := window{seen: 100, begun: true}
	work := w.enter([]ProcessSample{
		{PID: 1, Time: 200, SM: 10}, {PID: 1, Time: 1 << 63, SM: 1 << 31}, {PID: 1, Time: 300, SM: -1}, {PID: 2, Time: 210, SM: 100},
	}, nil, sharing.Figure{})
	if one, two := work(1), work(2); one != sharing.KnownFigure(0.1) || two != sharing.KnownFigure(1) || w.seen != 210 {
		t.Errorf("SM %+v and %+v up to %d", one, two, w.seen)
	}
}
