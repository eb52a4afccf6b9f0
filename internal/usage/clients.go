package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// mostFiles is how many open files are checked at most. Checking so many takes a few hundred
// milliseconds.
const mostFiles = 200_000

// Clients returns the programs other than this one that have the GPU's device node
// /dev/nvidia<minor> open, sorted by PID: "nv-hostengine (PID 812, of the pod with the UID 7e4c…)".
// The driver does not list a process that only monitors a GPU, yet such a process keeps the GPU's
// MIG mode from changing.
//
// It reads the open files of all processes on the host, so call it only if necessary. The error
// says why a program may be missing. Without the right to read the open files of other processes,
// it names the running programs that usually have GPUs open.
func Clients(proc fs.FS, minor int) ([]string, error) {
	if _, err := checkHostPIDs(proc); err != nil {
		return nil, err
	}
	return openBy(proc, fmt.Sprintf("nvidia%d", minor), mostFiles)
}

// openBy is Clients for any file of that name. It checks at most left open files.
func openBy(proc fs.FS, name string, left int) (clients []string, err error) {
	entries, err := fs.ReadDir(proc, ".")
	if err != nil {
		return nil, fmt.Errorf("list the processes: %w", err)
	}
	self, _ := fs.ReadLink(proc, "self")
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return pidOf(a) - pidOf(b) })
	var usual []string
	hidden := 0
	for _, entry := range entries {
		if pidOf(entry) == 0 || entry.Name() == self {
			continue
		}
		has, err := hasOpen(proc, entry.Name(), name, &left)
		switch {
		case left <= 0:
			return clients, errors.New("too many files are open on this machine to look at all")
		case has:
			clients = append(clients, describe(proc, entry.Name()))
		case errors.Is(err, fs.ErrPermission):
			hidden++
			if name := describe(proc, entry.Name()); strings.HasPrefix(name, "nv") || strings.HasPrefix(name, "dcgm") {
				usual = append(usual, name)
			}
		}
	}
	if hidden > 0 {
		err = fmt.Errorf("the open files of %d processes may not be read, which takes SYS_PTRACE", hidden)
	}
	if usual != nil {
		err = fmt.Errorf("%w; among them are %s", err, strings.Join(usual, ", "))
	}
	return clients, err
}

// pidOf returns 0 if the entry is not a process.
func pidOf(entry fs.DirEntry) int {
	pid, _ := strconv.Atoi(entry.Name())
	return pid
}

// fewFiles is how many names of open files are read into memory at a time.
const fewFiles = 1024

// hasOpen reports whether the process has a file of that name open, in any folder.
func hasOpen(proc fs.FS, pid, name string, left *int) (bool, error) {
	dir, err := proc.Open(pid + "/fd")
	if err != nil {
		return false, err
	}
	defer func() { _ = dir.Close() }()
	list, ok := dir.(fs.ReadDirFile)
	for ok && *left > 0 {
		files, err := list.ReadDir(min(fewFiles, *left))
		for _, file := range files {
			*left--
			link, err := fs.ReadLink(proc, pid+"/fd/"+file.Name())
			if errors.Is(err, fs.ErrPermission) {
				return false, err
			}
			if path.Base(link) == name {
				return true, nil
			}
		}
		ok = err == nil // The process may end meanwhile.
	}
	return false, nil
}

// Describe returns a description of the process; empty if it has ended.
func Describe(proc fs.FS, pid int) string {
	text := strconv.Itoa(pid)
	if _, err := fs.Stat(proc, text); err != nil {
		return ""
	}
	return describe(proc, text)
}

// describe returns a process's name, as far as the kernel keeps it, with its PID and its pod's UID.
func describe(proc fs.FS, pid string) string {
	name, _ := fs.ReadFile(proc, pid+"/comm")
	text := strings.TrimSpace(string(name)) + " (PID " + pid
	file, _ := fs.ReadFile(proc, pid+"/cgroup")
	for _, path := range paths(string(file)) {
		if pod := podPart.FindStringSubmatch(path); pod != nil {
			return text + ", of the pod with the UID " + strings.ReplaceAll(pod[1], "_", "-") + ")"
		}
	}
	return text + ")"
}
