package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	refused := errors.New("refused")
	for _, test := range []struct {
		name string
		// found are the figure's values, one for each time it is measured.
		found   []float64
		failure error
		limits  []limit
		times   int
		problem string
	}{
		{"holds at once", []float64{1}, nil, []limit{{"m/a", 2}}, 1, ""},
		{"holds at last", []float64{5, 4, 3, 2}, nil, []limit{{"m/a", 2}}, 4, ""},
		{"never holds", []float64{5, 4, 3, 6}, nil, []limit{{"m/a", 2}}, 4, "m/a is 3.00, more than 2.00"},
		{"of no measurement", []float64{1}, nil, []limit{{"m/a", 2}, {"n/a", 2}}, 1, "1 of 2 limits"},
		{"without limits", nil, nil, nil, 0, ""},
		{"cannot be measured", nil, refused, []limit{{"m/a", 2}}, 1, "measure m: refused"},
	} {
		t.Run(test.name, func(t *testing.T) {
			times := 0
			fake := []measurement{{"m", func(context.Context, bench) ([]figure, error) {
				times++
				if test.failure != nil {
					return nil, test.failure
				}
				return []figure{{"m/a", test.found[times-1], ""}}, nil
			}}}
			err := check(t.Context(), bench{}, fake, test.limits, io.Discard)
			if (err == nil) != (test.problem == "") || err != nil && !strings.Contains(err.Error(), test.problem) {
				t.Errorf("error %v, want %q", err, test.problem)
			}
			if times != test.times {
				t.Errorf("measured %d times, want %d", times, test.times)
			}
		})
	}
}
