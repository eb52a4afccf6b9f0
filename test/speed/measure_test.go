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

func TestKibibytes(t *testing.T) {
	const status = "Name:\tvirgate\nVmRSS:\t   36384 kB\nRssAnon:\t    5472 kB\n"
	for field, want := range map[string]uint64{"VmRSS": 36384 << 10, "RssAnon": 5472 << 10} {
		if got, err := kibibytes(status, field); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", field, got, err, want)
		}
	}
	if _, err := kibibytes(status, "VmHWM"); err == nil {
		t.Error("a field that is not there is read")
	}
}
