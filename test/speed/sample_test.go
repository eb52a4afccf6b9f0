package main

import (
	"testing"
	"time"
)

func TestSample(t *testing.T) {
	few := sample{30, 10, 1000, 20}
	for _, test := range []struct {
		name      string
		got, want time.Duration
	}{
		{"median of none", sample(nil).median(), 0},
		{"median of one", sample{7}.median(), 7},
		{"median of four is the lower", few.median(), 20},
		{"least", few.quantile(0), 10},
		{"most", few.quantile(1), 1000},
		{"order stays", few[0], 30},
	} {
		if test.got != test.want {
			t.Errorf("%s: %d, want %d", test.name, test.got, test.want)
		}
	}
	if got := few.over(sample{10}); got != 2 {
		t.Errorf("ratio %g, want 2", got)
	}
	if got := few.over(nil); got != 0 {
		t.Errorf("ratio to nothing %g, want 0", got)
	}
	if got := (counts{5, 1, 900}).median(); got != 5 {
		t.Errorf("median of counts %g, want 5", got)
	}
}
