package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// What the kernel says of a process: proc(5), proc_pid_status(5) and
// proc_pid_schedstat.

// memory is what a process has resident, in bytes.
type memory struct {
	// all is what the process's limit counts, own the part that no file backs:
	// the rest are pages of the binary, which the kernel can drop and which
	// processes of one binary share.
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

func kibibytes(status, field string) (uint64, error) {
	text := strings.TrimSuffix(value(status, field), " kB")
	amount, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s of a process: %w", field, err)
	}
	return amount << 10, nil
}

// value is the field's in the manner of /proc/PID/status, "" for none.
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
	// cpu is its time on a processor, by the scheduler's own clock and not by
	// ticks.
	cpu time.Duration
	// wakes is how often a thread of it has waited for something.
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

// ownWork is this process's time on a processor so far, which is the simulated
// kubelet's and that of looking at it.
func ownWork() (time.Duration, error) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0, fmt.Errorf("read this process's own time: %w", err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()), nil
}
