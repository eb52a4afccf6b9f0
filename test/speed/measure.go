package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// sample is how long something took each time, in no particular order.
type sample []time.Duration

// median returns the middle value, of an even number the lower of the two; 0 for none. It stays the
// same when a busy machine makes a few values slow.
func (s sample) median() time.Duration { return s.quantile(0.5) }

// quantile returns the smallest value that the fraction q of all does not exceed.
func (s sample) quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[int(q*float64(len(sorted)-1))]
}

// timed adds the duration of a call.
func (s *sample) timed(call func() error) error {
	began := time.Now()
	if err := call(); err != nil {
		return err
	}
	*s = append(*s, time.Since(began))
	return nil
}

// over returns the ratio of the medians; 0 if other has none.
func (s sample) over(other sample) float64 {
	if other.median() == 0 {
		return 0
	}
	return float64(s.median()) / float64(other.median())
}

// milliseconds and microseconds convert durations for figures.
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// figure is one result.
type figure struct {
	// name is the name in the budget: "calls/8000/allocate-ratio".
	name  string
	value float64
	// unit is for people: "ms", "×" for a ratio, "" for a count.
	unit string
}

// prefixed puts the measurement's name before those of its figures.
func prefixed(measurement string, figures []figure) []figure {
	for i := range figures {
		figures[i].name = measurement + "/" + figures[i].name
	}
	return figures
}

// sizes are how many devices the node offers in turn.
var sizes = [...]int{80, 800, 8000}

// megabytes returns millions of bytes.
func megabytes(bytes uint64) float64 { return float64(bytes) / 1e6 }

// number formats a value for people, with as many digits as are meaningful.
func number(value float64) string {
	if value >= 100 {
		return strconv.FormatFloat(value, 'f', 0, 64)
	}
	return strconv.FormatFloat(value, 'f', 2, 64)
}

// counts are numbers of objects, counted several times.
type counts []float64

// median is like sample.median: other things that the program does meanwhile make a few of the
// numbers larger.
func (c counts) median() float64 {
	if len(c) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(c))[(len(c)-1)/2]
}

// counted adds the number of objects that the process makes during the work, including those for
// reporting the number.
func (c *counts) counted(p *process, work func() error) error {
	const made = "go_memstats_mallocs_total"
	before, err := p.series(made)
	if err != nil {
		return err
	}
	if err := work(); err != nil {
		return err
	}
	after, err := p.series(made)
	if err != nil {
		return err
	}
	*c = append(*c, after-before)
	return nil
}

// size measures the file of the program.
func size(_ context.Context, b bench) ([]figure, error) {
	info, err := os.Stat(b.binary)
	if err != nil {
		return nil, fmt.Errorf("measure the program: %w", err)
	}
	return []figure{{"size/binary", megabytes(uint64(info.Size())), "MB"}}, nil
}

// The figures below are the kernel's, for a process: proc(5), proc_pid_status(5) and
// proc_pid_schedstat.

// memory is the resident memory of a process, in bytes.
type memory struct {
	// all is what the process's limit counts. own is the part that no file backs; the rest are
	// pages of the binary, which the kernel can drop and which processes of one binary share.
	all, own uint64
}

func (p *process) memory() (memory, error) {
	status, err := p.status("status")
	if err != nil {
		return memory{}, err
	}
	all, err := kibibytes(status, "VmRSS")
	if err != nil {
		return memory{}, err
	}
	own, err := kibibytes(status, "RssAnon")
	return memory{all: all, own: own}, err
}

// peak returns the highest resident memory that the process has had, in bytes.
func (p *process) peak() (uint64, error) {
	status, err := p.status("status")
	if err != nil {
		return 0, err
	}
	return kibibytes(status, "VmHWM")
}

func kibibytes(status, field string) (uint64, error) {
	text := strings.TrimSuffix(value(status, field), " kB")
	amount, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s of a process: %w", field, err)
	}
	return amount << 10, nil
}

// value returns the field's value in text like /proc/PID/status, "" for none.
func value(status, field string) string {
	for line := range strings.Lines(status) {
		if name, text, ok := strings.Cut(line, ":"); ok && name == field {
			return strings.TrimSpace(text)
		}
	}
	return ""
}

func (p *process) status(name string) (string, error) {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.command.Process.Pid), name))
	if err != nil {
		return "", fmt.Errorf("read what the kernel says of a process: %w", err)
	}
	return string(data), nil
}

// work is what a process has done since its start.
type work struct {
	// cpu is its time on a processor, by the scheduler's own clock and not by ticks.
	cpu time.Duration
	// wakes is how often one of its threads has waited for something.
	wakes uint64
}

func (p *process) work() (work, error) {
	tasks, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(p.command.Process.Pid), "task", "*"))
	if err != nil {
		return work{}, fmt.Errorf("read what the kernel says of a process: %w", err)
	}
	var done work
	for _, task := range tasks {
		name := filepath.Join("task", filepath.Base(task))
		times, err := p.status(filepath.Join(name, "schedstat"))
		if err != nil {
			return work{}, err
		}
		running, _, _ := strings.Cut(times, " ")
		nanoseconds, err := strconv.ParseInt(running, 10, 64)
		if err != nil {
			return work{}, fmt.Errorf("read a thread's time: %w", err)
		}
		done.cpu += time.Duration(nanoseconds)
		status, err := p.status(filepath.Join(name, "status"))
		if err != nil {
			return work{}, err
		}
		wakes, err := strconv.ParseUint(value(status, "voluntary_ctxt_switches"), 10, 64)
		if err != nil {
			return work{}, fmt.Errorf("read a thread's waits: %w", err)
		}
		done.wakes += wakes
	}
	return done, nil
}

// ownWork returns this process's time on a processor so far, which covers the simulated kubelet and
// the measuring.
func ownWork() (time.Duration, error) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0, fmt.Errorf("read this process's own time: %w", err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), nil
}

// footprint returns the program's resident memory now.
func footprint(p *process) ([]figure, error) {
	goroutines, err := p.series("go_goroutines")
	if err != nil {
		return nil, err
	}
	resident, err := p.memory()
	if err != nil {
		return nil, err
	}
	return []figure{
		{"goroutines", goroutines, ""},
		{"own", megabytes(resident.own), "MB"},
		{"resident", megabytes(resident.all), "MB"},
	}, nil
}
