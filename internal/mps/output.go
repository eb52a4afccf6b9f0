package mps

import (
	"bytes"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"sync"
)

// Process is a program that is, or waits to be, a client of an MPS server.
type Process struct{ PID, User int }

// Queue is a daemon's current server, and the clients that wait for the next one. A server serves
// the programs of one user and stays until its last client has gone (NVIDIA's MPS documentation,
// "Provisioning Sequence").
type Queue struct {
	// Server is the process ID of the server, 0 for none; User is the user whose clients it serves.
	Server, User int
	// Waiting are clients of other users.
	Waiting []Process
}

// Output parses what a control daemon prints, which is a log line for each of its clients and
// servers. No command of nvidia-cuda-mps-control lists the waiting clients. All methods may be
// called from any goroutine.
type Output struct {
	log *slog.Logger

	mu sync.Mutex
	// rest is the beginning of an unfinished line; last is the last complete one.
	rest []byte
	last string
	// server is the one that serves; starting is one that does not serve yet.
	server, starting Process
	queue            []Process
}

// NewOutput returns the output of a daemon that has printed nothing. All lines go to the log.
func NewOutput(log *slog.Logger) *Output { return &Output{log: log} }

const (
	// longestLine is how much of a line is parsed.
	longestLine = 4096
	// longestQueue is more than the clients that any server can have (sharing.MaxMPSClients).
	longestQueue = 256
)

// Messages of daemons of R580 and R595. A time, a name and a process ID come before them.
var (
	clientWaits   = regexp.MustCompile(`\bNEW CLIENT (\d+) from user (\d+): Server is not ready`)
	serverStarted = regexp.MustCompile(`\bStarting new server (\d+) for user (\d+)`)
	serverReady   = regexp.MustCompile(`\bNEW SERVER (\d+): Ready`)
	serverEnded   = regexp.MustCompile(`\bServer (\d+) exited\b`)
)

func (o *Output) Write(data []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rest = append(o.rest, data...)
	for {
		line, rest, whole := bytes.Cut(o.rest, []byte("\n"))
		if !whole && len(line) <= longestLine {
			return len(data), nil
		}
		o.rest = slices.Clone(rest)
		line = bytes.TrimSpace(line[:min(len(line), longestLine)])
		if len(line) > 0 {
			o.read(string(line))
		}
	}
}

// read parses a line. The caller holds the lock.
func (o *Output) read(line string) {
	o.log.Debug("MPS daemon says", "line", line)
	o.last = line
	if client, is := processIn(clientWaits, line); is && len(o.queue) < longestQueue &&
		!slices.Contains(o.queue, client) {
		o.queue = append(o.queue, client)
	}
	if server, is := processIn(serverStarted, line); is { // A daemon has one server at a time.
		o.starting, o.server = server, Process{}
	}
	if server, is := processIn(serverReady, line); is && server.PID == o.starting.PID {
		o.server = o.starting
		o.queue = slices.DeleteFunc(o.queue, func(c Process) bool { return c.User == o.server.User })
	}
	if server, is := processIn(serverEnded, line); is && server.PID == o.server.PID {
		o.server = Process{}
	}
}

// processIn returns the process that the line names, and its user if the pattern has one.
func processIn(pattern *regexp.Regexp, line string) (process Process, is bool) {
	found := pattern.FindStringSubmatch(line)
	if found == nil {
		return Process{}, false
	}
	process.PID, _ = strconv.Atoi(found[1])
	if len(found) > 2 {
		process.User, _ = strconv.Atoi(found[2])
	}
	return process, true
}

// Last returns the last line, "" for none.
func (o *Output) Last() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last
}

// Queue returns what is known of the daemon's clients.
func (o *Output) Queue() Queue {
	o.mu.Lock()
	defer o.mu.Unlock()
	return Queue{
		Server:  o.server.PID,
		User:    o.server.User,
		Waiting: slices.Clone(o.queue),
	}
}
