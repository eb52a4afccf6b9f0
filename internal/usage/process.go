package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strconv"
	"strings"
)

// ticks counts a hundredth of a second, the unit of times in /proc on all
// machines that have GPUs (USER_HZ, proc_pid_stat(5)).
type ticks uint64

// always is later than the start of any process.
const always ticks = math.MaxUint64

var errReused = errors.New("the process ID is another process's now")

// readCgroup is the cgroup file of the process, which must have been there at
// the time. The driver may still name a process that has ended, and its ID may
// be another's by now: so the start is read before and after.
func readCgroup(proc fs.FS, pid int, at ticks) (string, error) {
	before, err := readStart(proc, pid)
	if err != nil {
		return "", err
	}
	file, err := fs.ReadFile(proc, fmt.Sprintf("%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("read process %d: %w", pid, err)
	}
	after, err := readStart(proc, pid)
	if err != nil {
		return "", err
	}
	if before != after || after > at {
		return "", fmt.Errorf("process %d: %w", pid, errReused)
	}
	return string(file), nil
}

func readStart(proc fs.FS, pid int) (ticks, error) {
	file, err := fs.ReadFile(proc, fmt.Sprintf("%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("read process %d: %w", pid, err)
	}
	start, err := parseStart(string(file))
	if err != nil {
		return 0, fmt.Errorf("read process %d: %w", pid, err)
	}
	return start, nil
}

// parseStart is when a process started, since the machine did: field 22 of its
// stat file. Field 2 is the program's name in parentheses, which may have blanks
// and parentheses itself.
func parseStart(stat string) (ticks, error) {
	name := strings.LastIndex(stat, ")")
	const afterName = 22 - 3
	if fields := strings.Fields(stat[name+1:]); name >= 0 && len(fields) > afterName {
		if start, err := strconv.ParseUint(fields[afterName], 10, 64); err == nil {
			return ticks(start), nil
		}
	}
	return 0, errors.New("no start time in its stat file")
}

// uptime is how long the machine has been up; always when it does not tell.
func uptime(proc fs.FS) ticks {
	file, err := fs.ReadFile(proc, "uptime")
	if err != nil {
		return always
	}
	seconds, _, _ := strings.Cut(string(file), " ")
	up, err := strconv.ParseFloat(seconds, 64)
	if err != nil || !(up >= 0 && up < math.MaxUint32) {
		return always
	}
	return ticks(math.Round(up * 100))
}
