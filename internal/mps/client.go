package mps

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/wake"
)

// Unit and State are the items of the two messages on the socket.
type (
	Unit  = nodereport.MPSUnit
	State = nodereport.MPSState
)

// Both sides send lines of JSON. The client sends all units that it wants daemons for, whenever
// they change. The server sends the states of all units that have a daemon or should have one,
// whenever they change and at every heartbeat.
type (
	wishLine struct {
		Units []Unit `json:"units"`
		// At is when the client sent the wish, by monotonic; 0 from an older client.
		At int64 `json:"at"`
		// Released are the GPUs that the server must not open, by UUID, with the driver's index, or
		// -1 while it is unknown. None of them is in Units.
		Released map[string]int `json:"released,omitempty"`
		// Keep is true if the server should keep the units of the last wish, which the client does
		// not know.
		Keep bool `json:"keep,omitempty"`
	}
	statesLine struct {
		Units []State `json:"units"`
		// Taken is the At of the last wish in force: 0 for none, nil from an older server.
		Taken *int64 `json:"taken,omitempty"`
		// UnitMemory is true if each unit has its own /dev/shm. Older servers do not make one.
		UnitMemory bool `json:"unitMemory,omitempty"`
	}
)

const (
	heartbeat = 2 * time.Second
	// silence is how long a connection may stay without a line before it is closed.
	silence = 5 * heartbeat
	// redial is the time between two attempts to connect.
	redial = time.Second
	// maxLine is the longest line, with room for thousands of units.
	maxLine = 1 << 20
)

// SocketName is the name of the socket in the root directory.
const SocketName = "virgate.sock"

// Client tells the supervisor which daemons to run. Run does the work; the other methods may be
// called from any goroutine at any time.
type Client struct {
	socket string
	log    *slog.Logger

	mu        sync.Mutex
	wish      *wishLine
	released  map[string]int
	states    []State
	taken     *int64
	connected bool
	// changed is closed when any field above changes, wished when wish changes.
	changed, wished chan struct{}
}

// NewClient returns a client for the supervisor that listens at the socket.
func NewClient(socket string, log *slog.Logger) *Client {
	return &Client{
		socket:  socket,
		log:     log,
		changed: make(chan struct{}),
		wished:  make(chan struct{}),
	}
}

// Want sets the complete list of units that need a daemon. It never blocks. Until the first call
// the supervisor keeps the list of an earlier client.
func (c *Client) Want(units []Unit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wish != nil && !c.wish.Keep && slices.Equal(c.wish.Units, units) {
		return
	}
	c.send(wishLine{Units: slices.Clone(units)})
}

// send sends the wish. The caller holds the lock.
func (c *Client) send(wish wishLine) {
	wish.At, wish.Released = monotonic(), c.released
	c.wish = &wish
	close(c.wished)
	c.wished = make(chan struct{})
}

// KeepClosed sets which GPUs the supervisor must not open, by UUID, with the driver's index, or -1
// while it is unknown. It reports whether the supervisor has acknowledged that; it is also true
// without a connection. It never blocks.
func (c *Client) KeepClosed(released map[string]int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := !maps.Equal(c.released, released)
	c.released = maps.Clone(released)
	switch {
	case c.wish != nil && changed:
		c.send(wishLine{Units: c.wish.Units, Keep: c.wish.Keep})
	case c.wish == nil && len(released) > 0 && c.connected && c.taken != nil:
		c.send(wishLine{Keep: true})
	}
	return !c.connected || len(released) == 0 || c.taken == nil || *c.taken >= c.wish.At
}

// States returns the units that have a daemon or should have one, sorted by ID. Without a
// connection they are not known and the list is empty.
func (c *Client) States() (states []State, connected bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.states), c.connected
}

// Watch calls changed after each change of States until ctx ends.
func (c *Client) Watch(ctx context.Context, changed func()) error {
	for {
		c.mu.Lock()
		next := c.changed
		c.mu.Unlock()
		changed() // Also at the start: an earlier change may have been missed.
		select {
		case <-next:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *Client) set(line statesLine, connected bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.connected == connected && slices.Equal(c.states, line.Units) && reflect.DeepEqual(c.taken, line.Taken) {
		return
	}
	c.states = line.Units
	c.taken = line.Taken
	c.connected = connected
	close(c.changed)
	c.changed = make(chan struct{})
}

// Run stays connected to the supervisor until ctx ends.
func (c *Client) Run(ctx context.Context) error {
	told := "" // A node without MPS has no supervisor: log that only once.
	for {
		err := c.session(ctx, func() { told = "" })
		c.set(statesLine{}, false)
		if ctx.Err() != nil {
			return nil
		}
		if err.Error() != told {
			c.log.Info("not connected to virgate mps", "socket", c.socket, "because", err)
			told = err.Error()
		}
		if !wake.Sleep(ctx, redial) {
			return nil
		}
	}
}

// session talks to the supervisor until the connection fails or ctx ends.
func (c *Client) session(ctx context.Context, connected func()) error {
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	defer context.AfterFunc(ctx, func() { _ = connection.Close() })()
	connected()
	sending, stop := context.WithCancel(ctx)
	sent := make(chan struct{})
	defer func() {
		stop()
		_ = connection.Close()
		<-sent
	}()
	go func() {
		defer close(sent)
		c.sendWishes(sending, connection)
	}()
	return readLines(connection, silence, func(line statesLine) {
		if !line.UnitMemory {
			for i := range line.Units {
				line.Units[i].Phase, line.Units[i].Reason = nodereport.MPSStarting, olderServer
			}
		}
		c.set(line, true)
	})
}

// olderServer is the reason why no share is offered: a container with one would not start.
const olderServer = "virgate mps is older than virgate run, and has no /dev/shm for each GPU yet"

// sendWishes sends each wish. It closes the connection if that fails.
func (c *Client) sendWishes(ctx context.Context, connection net.Conn) {
	var sent *wishLine
	for {
		c.mu.Lock()
		wish, next := c.wish, c.wished
		c.mu.Unlock()
		if wish != sent {
			if err := writeLine(connection, wish); err != nil {
				_ = connection.Close()
				return
			}
			sent = wish
		}
		select {
		case <-next:
		case <-ctx.Done():
			return
		}
	}
}

func writeLine(connection net.Conn, value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err := connection.SetWriteDeadline(time.Now().Add(silence)); err != nil {
		return err
	}
	_, err = connection.Write(append(line, '\n'))
	return err
}

// readLines passes each line to handle until an error occurs, or until no line comes for longer
// than patience; 0 disables that limit.
func readLines[T any](connection net.Conn, patience time.Duration, handle func(T)) error {
	lines := bufio.NewScanner(connection)
	lines.Buffer(nil, maxLine)
	for {
		if patience > 0 {
			if err := connection.SetReadDeadline(time.Now().Add(patience)); err != nil {
				return err
			}
		}
		if !lines.Scan() {
			if err := lines.Err(); err != nil {
				return err
			}
			return errors.New("the connection was closed")
		}
		var line T
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		handle(line)
	}
}
