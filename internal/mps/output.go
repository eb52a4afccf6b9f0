package mps

import (
	"bytes"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"sync"
)

// Process is a program that is to be, or is, a client of an MPS server.
type Process struct{ PID, User int }

// Queue is which server a daemon has, and who waits until it has another one: a server serves the
// programs of one user, and stays until its last client has gone (NVIDIA's MPS documentation,
// "Provisioning Sequence").
type Queue struct {
	// Server is the process, 0 for none, and User whose clients it serves.
	Server, User int
	// Waiting are the clients of other users.
	Waiting []Process
}

// Output takes what a control daemon says, which is a log line for each of its clients and servers.
// No command of nvidia-cuda-mps-control tells who waits. All methods may be called from any goroutine.
type Output struct {
	log *slog.Logger

	mu sync.Mutex
	// rest is the beginning of a line, and last the last whole one.
	rest []byte
	last string
	// server serves; starting is one that does not yet.
	server, starting Process
	queue            []Process
}

// NewOutput returns one of a daemon that has said nothing. The log gets all lines.
func NewOutput(log *slog.Logger) *Output { return &Output{log: log} }

const (
	// longestLine is how much of a line is read.
	longestLine = 4096
	// longestQueue is more than any server has clients (sharing.MaxMPSClients).
	longestQueue = 256
)

// What daemons of R580 and R595 say, after a time, a name and a process ID.
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

// read is called with the lock.
func (o *Output) read(line string) {
	o.log.Debug("MPS daemon says", "line", line)
	o.last = line
	if client, is := processIn(clientWaits, line); is && len(o.queue) < longestQueue &&
		!slices.Contains(o.queue, client) {
		o.queue = append(o.queue, client)
	}
	if server, is := processIn(serverStarted, line); is { // A daemon has one at a time.
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

// processIn is the process that the line names, and its user where the pattern has one.
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

// Last is the last line, "" for none.
func (o *Output) Last() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last
}

// Queue is what is known of the daemon's clients.
func (o *Output) Queue() Queue {
	o.mu.Lock()
	defer o.mu.Unlock()
	return Queue{
		Server:  o.server.PID,
		User:    o.server.User,
		Waiting: slices.Clone(o.queue),
	}
}
