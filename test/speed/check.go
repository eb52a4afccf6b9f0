package main

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// attempts is how often a limit may fail to hold before it counts.
const attempts = 4

// check makes the measurements that have a budget, and once more those whose
// limits do not hold. The error says which did not hold in the end.
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
