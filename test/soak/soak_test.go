package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Without SEED and OPERATIONS the soak is short enough for every run of all tests. `make soak` sets both.
const (
	// This schedule has nearly every kind of operation.
	shortSeed       = 80
	shortOperations = 150
	// longest is the most time that one operation takes on average on a busy machine.
	longest = 4 * time.Second
)

func TestSoak(t *testing.T) {
	if testing.Short() {
		t.Skip("long: make test-race plays a short soak, make soak a long one")
	}
	seed, operations := number(t, "SEED", shortSeed), number(t, "OPERATIONS", shortOperations)
	path := filepath.Join(os.TempDir(), fmt.Sprintf("virgate-soak-%d.log", seed))
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	log := slog.New(slog.NewTextHandler(file, &slog.HandlerOptions{Level: slog.LevelDebug}))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute+time.Duration(operations)*longest)
	defer cancel()

	began := time.Now()
	w := newWorld(t, ctx, log)
	w.patience = time.Duration(number(t, "PATIENCE", 300)) * time.Second
	all := schedule(uint64(seed), operations)
	for i, o := range all {
		log.Info("operation", "number", i, "operation", o.String())
		err := w.play(o)
		if err == nil {
			if wrong := w.wrong(); len(wrong) > 0 {
				err = errors.New(strings.Join(wrong, "\n"))
			}
		}
		if err != nil {
			last := all[max(0, i-25) : i+1]
			_, status, unread := w.program.page(w.ctx, "/api/v1/status")
			fmt.Fprintf(file, "the node: %+v\nthe program: %s %v\n", w.site.node.GPUs(), status, unread)
			_ = pprof.Lookup("goroutine").WriteTo(file, 2)
			t.Fatalf("operation %d of %d: %s\n%v\n\nlog: %s\nto play it again: make soak SEED=%d OPERATIONS=%d\nthe last operations:\n%s",
				i, len(all), o.kind, err, path, seed, operations, lines(last))
		}
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	w.report(t, seed, len(all), elapsed(began))
	if !t.Failed() {
		_ = os.Remove(path)
	}
}

// number returns the number in the environment variable, or otherwise.
func number(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q is no number from 1 on", name, text)
	}
	return n
}

func lines(operations []operation) string {
	var b strings.Builder
	for _, o := range operations {
		fmt.Fprintf(&b, "  %s\n", o)
	}
	return b.String()
}

func (w *world) report(out interface{ Output() io.Writer }, seed, operations int, took time.Duration) {
	writer := out.Output()
	counted := w.observer.tally()
	fmt.Fprintf(writer, "seed %d: %d operations in %s\n", seed, operations, took.Round(time.Second))
	fmt.Fprintf(writer, "lists %d, streams %d, devices removed %d, grants %d\n", counted.lists, counted.streams, counted.removed, counted.grants)
	fmt.Fprintf(writer, "stops %d, slowest %s; slowest rest %s; slowest registration after a lost stream %s\n",
		w.figures.stops, w.figures.slowestStop.Round(time.Millisecond), w.figures.slowestRest.Round(time.Millisecond), w.figures.reconnected.Round(time.Millisecond))
	answers := w.pods.tally()
	for _, answer := range slices.Sorted(maps.Keys(answers)) {
		fmt.Fprintf(writer, "%6d %s\n", answers[answer], answer)
	}
	for _, kind := range slices.Sorted(maps.Keys(w.figures.kinds)) {
		fmt.Fprintf(writer, "%6d %s\n", w.figures.kinds[kind], kind)
	}
}

// TestScheduleFollowsFromTheSeed checks what makes a failure replayable.
func TestScheduleFollowsFromTheSeed(t *testing.T) {
	again := func(seed uint64) string { return lines(schedule(seed, 2000)) }
	if diff := cmp.Diff(again(7), again(7)); diff != "" {
		t.Errorf("one seed, two schedules:\n%s", diff)
	}
	if again(7) == again(8) {
		t.Error("two seeds, one schedule")
	}
}
