package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// budgetText has limits for counts and sizes, which hold on every machine; ratiosText has limits
// for ratios of times, which a busy machine exceeds now and then.
var (
	//go:embed budget.txt
	budgetText string
	//go:embed ratios.txt
	ratiosText string
)

// limit is the highest allowed value of a figure.
type limit struct {
	figure string
	most   float64
}

// parseBudget reads one limit a line: a figure's name and a number. Text after # is for people. It
// is an error if a figure is named twice, or if no figure could exceed the number.
func parseBudget(text string) ([]limit, error) {
	var limits []limit
	named := map[string]bool{}
	at := 0
	for line := range strings.Lines(text) {
		at++
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("budget line %d: expected a figure and a number (got %q)", at, strings.TrimSpace(line))
		}
		most, err := strconv.ParseFloat(fields[1], 64)
		if err != nil || !(most > 0 && most < 1e9) {
			return nil, fmt.Errorf("budget line %d: expected a number from 0 to 1e9 (got %q)", at, fields[1])
		}
		if named[fields[0]] {
			return nil, fmt.Errorf("budget line %d: %s is named twice", at, fields[0])
		}
		named[fields[0]] = true
		limits = append(limits, limit{fields[0], most})
	}
	return limits, nil
}

// of returns the limits of the measurement's figures.
func of(measurement string, limits []limit) []limit {
	var own []limit
	for _, l := range limits {
		if strings.HasPrefix(l.figure, measurement+"/") {
			own = append(own, l)
		}
	}
	return own
}

// tally has the smallest value of each figure so far. A busy machine makes figures larger and never
// smaller, so the smallest of several is nearest to the program's own.
type tally map[string]float64

func (t tally) add(figures []figure) {
	for _, f := range figures {
		if least, known := t[f.name]; !known || f.value < least {
			t[f.name] = f.value
		}
	}
}

// judge returns an error for each limit that does not hold; nil if all do.
func (t tally) judge(limits []limit) error {
	var errs []error
	for _, l := range limits {
		found, known := t[l.figure]
		switch {
		case !known:
			errs = append(errs, fmt.Errorf("%s: nothing measures it", l.figure))
		case !(found <= l.most):
			errs = append(errs, fmt.Errorf("%s is %s, more than %s", l.figure, number(found), number(l.most)))
		}
	}
	return errors.Join(errs...)
}

// attempts is how often a limit may fail to hold before that is an error.
const attempts = 4

// check makes the measurements that have a budget, and repeats those whose limits do not hold. The
// error lists the limits that did not hold in the end.
func check(ctx context.Context, b bench, measurements []measurement, limits []limit, out io.Writer) error {
	var errs []error
	held := 0
	for _, m := range measurements {
		own := of(m.name, limits)
		if len(own) == 0 {
			continue
		}
		least := tally{}
		var broken error
		for attempt := range attempts {
			figures, err := m.find(ctx, b)
			if err != nil {
				return fmt.Errorf("measure %s: %w", m.name, err)
			}
			least.add(figures)
			if broken = least.judge(own); broken == nil {
				break
			}
			fmt.Fprintf(out, "attempt %d of %d:\n%v\n", attempt+1, attempts, broken)
		}
		errs = append(errs, broken)
		held += len(own)
		for _, l := range own {
			fmt.Fprintf(out, "%-31s %8s of %s\n", l.figure, number(least[l.figure]), number(l.most))
		}
	}
	if held != len(limits) {
		errs = append(errs, fmt.Errorf("%d of %d limits are of no measurement", len(limits)-held, len(limits)))
	}
	return errors.Join(errs...)
}
