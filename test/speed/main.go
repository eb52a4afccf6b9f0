// Command speed measures the program as a whole, between a simulated kubelet in its own process and
// virgate in another. It prints the results as a table for docs/internals/performance.md. With
// -check it checks the limits in budget.txt or ratios.txt instead. Things that are compared are
// measured alternately, in one run, and judged by medians.
//
//	go run ./test/speed [-check counts|ratios] [-only NAME] [-binary FILE] [-scale N]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "speed:", err)
		stop()
		os.Exit(1)
	}
}

// bench is what all measurements share.
type bench struct {
	// binary is the program, stripped.
	binary string
	// scale multiplies the rounds of every measurement.
	scale int
	// counts restricts the measurements to counts and sizes, which vary little.
	counts bool
}

// rounds returns how often to measure something with that usual number of rounds.
func (b bench) rounds(usual int) int {
	if b.counts {
		return max(usual/5, 3) * b.scale
	}
	return usual * b.scale
}

// measurement finds figures. Their names begin with its name.
type measurement struct {
	name string
	find func(context.Context, bench) ([]figure, error)
}

func measurements() []measurement {
	return []measurement{
		{"start", startup},
		{"peak", peak},
		{"calls", calls},
		{"change", changes},
		{"succession", succession},
		{"rest", rest},
		{"size", size},
	}
}

func run(ctx context.Context, arguments []string, out io.Writer) error {
	flags := flag.NewFlagSet("speed", flag.ContinueOnError)
	checks := flags.String("check", "", "hold limits and print nothing else: counts (budget.txt) or ratios (ratios.txt)")
	only := flags.String("only", "", "the measurement to make: start, peak, calls, change, succession, rest or size; all of them without")
	binary := flags.String("binary", "bin/virgate", "the program, as make build makes it")
	scale := flags.Int("scale", 1, "how many times the usual number of rounds")
	switch err := flags.Parse(arguments); {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	}
	if *only != "" && !slices.ContainsFunc(measurements(), func(m measurement) bool { return m.name == *only }) {
		return fmt.Errorf("-only: there is no measurement %q", *only)
	}
	b := bench{binary: *binary, scale: *scale}
	if *checks != "" {
		text, known := map[string]string{"counts": budgetText, "ratios": ratiosText}[*checks]
		if !known {
			return fmt.Errorf("-check: expected counts or ratios (got %q)", *checks)
		}
		limits, err := parseBudget(text)
		if err != nil {
			return err
		}
		b.counts = *checks == "counts"
		return check(ctx, b, measurements(), limits, out)
	}
	for _, m := range measurements() {
		if *only != "" && *only != m.name {
			continue
		}
		figures, err := m.find(ctx, b)
		if err != nil {
			return fmt.Errorf("measure %s: %w", m.name, err)
		}
		for _, f := range figures {
			fmt.Fprintf(out, "%-31s %10s %s\n", f.name, number(f.value), f.unit)
		}
	}
	return nil
}
