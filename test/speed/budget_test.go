package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseBudget(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       []limit
		problem    string
	}{
		{"nothing", "", nil, ""},
		{"lines", "# a note\n\na/b 1.10 # why\n  c 2\n", []limit{{"a/b", 1.1}, {"c", 2}}, ""},
		{"no number", "a/b", nil, `line 1: expected a figure and a number (got "a/b")`},
		{"three words", "# x\na b 3", nil, "line 2"},
		{"no such number", "a NaN", nil, "line 1"},
		{"what nothing exceeds", "a 1e300", nil, "line 1"},
		{"nothing is allowed", "a 0", nil, "line 1"},
		{"twice", "a 1\na 2", nil, "line 2: a is named twice"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseBudget(test.text)
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(limit{})); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			if (err == nil) != (test.problem == "") || err != nil && !strings.Contains(err.Error(), test.problem) {
				t.Errorf("error %v, want %q", err, test.problem)
			}
		})
	}
}

// TestBudget has every limit of the files be one of a measurement, so that none is
// passed over, and has CI judge nothing that is measured by the clock.
func TestBudget(t *testing.T) {
	for file, text := range map[string]string{"budget.txt": budgetText, "ratios.txt": ratiosText} {
		limits, err := parseBudget(text)
		if err != nil {
			t.Fatal(err)
		}
		if len(limits) == 0 {
			t.Fatalf("%s: no limits", file)
		}
		owned := 0
		for _, m := range measurements() {
			owned += len(of(m.name, limits))
		}
		if owned != len(limits) {
			t.Errorf("%s: %d of %d limits are of a measurement", file, owned, len(limits))
		}
		for _, l := range limits {
			if ratio := strings.HasSuffix(l.figure, "-ratio") || strings.HasSuffix(l.figure, "/processes"); ratio != (file == "ratios.txt") {
				t.Errorf("%s has %s", file, l.figure)
			}
		}
	}
}

func TestRounds(t *testing.T) {
	for _, test := range []struct {
		b           bench
		usual, want int
	}{
		{bench{scale: 1}, 20, 20},
		{bench{scale: 2}, 7, 14},
		{bench{scale: 1, counts: true}, 20, 4},
		{bench{scale: 2, counts: true}, 7, 6},
	} {
		if got := test.b.rounds(test.usual); got != test.want {
			t.Errorf("%+v: %d rounds of %d, want %d", test.b, got, test.usual, test.want)
		}
	}
}

func TestClassify(t *testing.T) {
	limits := []limit{{"a", 2}, {"b", 1}}
	for _, test := range []struct {
		name  string
		found [][]figure
		want  string
	}{
		{"within", [][]figure{{{"a", 2, ""}, {"b", 0.5, ""}}}, ""},
		{"beyond", [][]figure{{{"a", 2.01, ""}, {"b", 3, ""}}}, "a is 2.01, more than 2.00\nb is 3.00, more than 1.00"},
		{"within at last", [][]figure{{{"a", 9, ""}, {"b", 0.5, ""}}, {{"a", 1, ""}, {"b", 8, ""}}}, ""},
		{"not measured", [][]figure{{{"a", 1, ""}}}, "b: nothing measures it"},
	} {
		t.Run(test.name, func(t *testing.T) {
			least := tally{}
			for _, figures := range test.found {
				least.add(figures)
			}
			got := ""
			if err := least.judge(limits); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

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
