package mps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// Options are the supervisor's settings and dependencies.
type Options struct {
	// Root is the directory of all files, under the path that both this process and the daemons
	// see. Proc is the path of /proc.
	Root, Proc string
	// OwnShm gives each unit's daemon and clients their own /dev/shm, which requires the right to
	// mount. Without it daemons use this process's /dev/shm.
	OwnShm  bool
	Control Control
	// ComputeMode and SetComputeMode read and set the compute mode of a whole GPU, by UUID.
	ComputeMode    func(ctx context.Context, gpu string) (sharing.ComputeMode, error)
	SetComputeMode func(ctx context.Context, gpu string, mode sharing.ComputeMode) error
	// KeepClosed makes ComputeMode and SetComputeMode leave these GPUs closed. They are listed by
	// UUID, with the driver's index. It returns when none of them is open, or when ctx ends. It is
	// nil if the two functions open no GPU.
	KeepClosed func(ctx context.Context, released map[string]int)
	// DriverReplaced returns an error when the node's driver is no longer the one that this process
	// uses, and nil when ctx ends. After an error no daemon is started. It is nil if a replacement
	// cannot be detected.
	DriverReplaced func(ctx context.Context) error
	// Who describes a process for people, and returns "" if it has ended. If nil, the process ID is
	// shown.
	Who func(pid int) string
	// Timing has the waiting times; a zero field means its default.
	Timing Timing
	Logger *slog.Logger
}

// Timing has the supervisor's waiting times.
type Timing struct {
	// Ask is the time between two checks that a daemon still answers, Answer how long an answer may
	// take. After Misses checks without an answer the daemon is restarted.
	Ask, Answer time.Duration
	Misses      int
	// Start is how long a daemon may take to its first answer, Stop how long it may take to end.
	Start, Stop time.Duration
	// Pause is the time before a failed attempt is repeated; it doubles up to MaxPause.
	Pause, MaxPause time.Duration
	// FirstWish is how long the units of an earlier run are kept until a client asks for them.
	FirstWish time.Duration
}

func (t Timing) withDefaults() Timing {
	return Timing{
		Ask:       cmp.Or(t.Ask, 2*time.Second),
		Answer:    cmp.Or(t.Answer, 5*time.Second),
		Misses:    cmp.Or(t.Misses, 3),
		Start:     cmp.Or(t.Start, 15*time.Second),
		Stop:      cmp.Or(t.Stop, 10*time.Second),
		Pause:     cmp.Or(t.Pause, time.Second),
		MaxPause:  cmp.Or(t.MaxPause, time.Minute),
		FirstWish: cmp.Or(t.FirstWish, time.Minute),
	}
}

// supervisor has a goroutine for each unit, and one for each connection.
type supervisor struct {
	Options
	journal *journal
	wishes  chan wishLine
	ended   chan string
	// refused are the units of the last wish that get no daemon, with the reason. Only supervise
	// uses it.
	refused map[string]error

	mu sync.Mutex
	// wanted is what clients want, nil until the first wish; taken is the time of that wish.
	wanted []Unit
	taken  int64
	// states are by ID. changed is closed with every change.
	states  map[string]State
	changed chan struct{}
	// replaced is the error of DriverReplaced. daemons is the number of running daemons.
	replaced error
	daemons  int

	// shmLock guards the links to units' memory, and clients, which were listed at clientsAt.
	shmLock   sync.Mutex
	clients   map[string][]client
	clientsAt time.Time
}

// Run runs the daemons that a Client wants until ctx ends, and then stops them. Their directories
// stay for the next run, because pods have them mounted. It returns an error if it could not start,
// or if the driver was replaced and no daemon runs. No other process may serve the same root
// directory.
func Run(ctx context.Context, o Options) error {
	o.Timing = o.Timing.withDefaults()
	if o.Who == nil {
		o.Who = func(pid int) string { return fmt.Sprintf("process %d", pid) }
	}
	if err := CheckRoot(o.Root); err != nil {
		return err
	}
	journal, err := openJournal(o.Root)
	if err != nil {
		return err
	}
	s := &supervisor{
		Options: o,
		journal: journal,
		wishes:  make(chan wishLine),
		ended:   make(chan string),
		states:  map[string]State{},
		changed: make(chan struct{}),
	}
	// Report them from the start: otherwise a client may take a unit for free that is not.
	leftovers := s.leftovers()
	for _, unit := range leftovers {
		s.states[unit.ID] = State{
			ID:     unit.ID,
			Phase:  nodereport.MPSStopping,
			Reason: "left by an earlier run",
		}
	}
	if o.OwnShm {
		s.dropCommonShm()
	}
	listener, err := listen(filepath.Join(o.Root, SocketName))
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	defer group.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer func() { _ = listener.Close() }()
	group.Go(func() { s.accept(ctx, listener, &group) })
	group.Go(func() { s.keepReadyFile(ctx) })
	if o.DriverReplaced != nil {
		group.Go(func() { s.watchDriver(ctx) })
	}
	o.Logger.Info("supervising MPS daemons", "root", o.Root)
	return s.supervise(ctx, &group, leftovers)
}

// CheckRoot returns an error if the root directory's path leaves too few bytes for a control
// daemon's socket, ROOT/UUID/pipe/control. The path of a Unix socket has at most 107 bytes
// (sun_path in unix(7)), and nvidia-cuda-mps-control would end without a message.
func CheckRoot(root string) error {
	const most = 107 - len("/GPU-00000000-0000-0000-0000-000000000000/pipe/control")
	if length := len(filepath.Clean(root)); length > most {
		return fmt.Errorf("MPS root directory %s: its path has %d bytes; at most %d leave room for a daemon's socket",
			root, length, most)
	}
	return nil
}

// listen makes a socket to which only root can connect. No other process listens there; see Run.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("old socket: %w", err)
	}
	// Set the mode before the file exists, so that no other user can ever connect.
	config := net.ListenConfig{Control: func(_, _ string, socket syscall.RawConn) error {
		var failed error
		err := socket.Control(func(fd uintptr) { failed = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, failed)
	}}
	listener, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return listener, nil
}

// supervise starts and ends the units' goroutines according to the wishes of clients.
func (s *supervisor) supervise(ctx context.Context, group *sync.WaitGroup, leftovers []Unit) error {
	running := map[string]chan Unit{}
	wanted := map[string]Unit{}
	start := func(id string, unit Unit, leftover bool) {
		wishes := make(chan Unit, 1)
		running[id] = wishes
		u := &unitRun{
			supervisor: s,
			unit:       unit,
			wishes:     wishes,
			log:        s.Logger.With("unit", id),
		}
		if leftover {
			wishes <- Unit{}
		}
		group.Go(func() {
			u.run(ctx)
			select {
			case s.ended <- id:
			case <-ctx.Done():
			}
		})
	}
	take := func(units []Unit) {
		next, refused := map[string]Unit{}, map[string]error{}
		for _, u := range units {
			if err := cmp.Or(checkUnitID(u.ID), checkUnitID(u.GPU)); err != nil {
				refused[u.ID] = err
				continue
			}
			next[u.ID] = u
		}
		s.refuse(refused)
		for id, wishes := range running {
			tell(wishes, next[id])
		}
		for id, u := range next {
			if running[id] == nil {
				start(id, u, false)
			}
		}
		s.mu.Lock()
		wanted, s.wanted = next, units
		s.tellChange()
		s.mu.Unlock()
	}
	first := time.After(s.Timing.FirstWish)
	stopLeftovers := func() {
		for _, unit := range leftovers {
			if running[unit.ID] == nil {
				start(unit.ID, unit, true)
			}
		}
		leftovers, first = nil, nil
	}
	newest := int64(0)
	for {
		changed, err := s.over()
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case wish := <-s.wishes:
			if wish.At != 0 && wish.At < newest {
				break // From a replaced client, received after a wish of its successor.
			}
			newest = wish.At
			if s.KeepClosed != nil {
				s.KeepClosed(ctx, wish.Released)
			}
			if wish.Keep {
				s.setTaken(wish.At)
				break
			}
			take(wish.Units)
			s.setTaken(wish.At)
			stopLeftovers()
		case <-first:
			stopLeftovers()
		case id := <-s.ended:
			delete(running, id)
			if u, again := wanted[id]; again {
				start(id, u, false)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// refuse publishes why these units get no daemon, and clears the reasons of all others.
func (s *supervisor) refuse(units map[string]error) {
	for id := range s.refused {
		if units[id] == nil {
			s.set(id, nil)
		}
	}
	for id, err := range units {
		if s.set(id, &State{
			ID:     id,
			Phase:  nodereport.MPSFailed,
			Reason: err.Error(),
		}) {
			s.Logger.Error("no MPS daemon", "unit", id, "error", err)
		}
	}
	s.refused = units
}

// setTaken records which wish is in force.
func (s *supervisor) setTaken(at int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken = at
	s.tellChange()
}

// watchDriver records why the driver is no longer the node's. Running daemons go on: they keep the
// node's old driver loaded. They end with their clients, which a new container could not serve
// either.
func (s *supervisor) watchDriver(ctx context.Context) {
	err := s.DriverReplaced(ctx)
	if err == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replaced = err
	if s.daemons > 0 {
		s.Logger.Warn("no MPS daemon is started any more, and the program ends when none runs", "because", err,
			"daemons", s.daemons)
	}
	s.tellChange()
}

// driverReplaced returns why no daemon may be started any more, or nil if daemons may be started.
func (s *supervisor) driverReplaced() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.replaced
}

// count adds to the number of running daemons: 1 for a start, -1 for a stop.
func (s *supervisor) count(daemons int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.daemons += daemons
	s.tellChange()
}

// over returns why the supervisor has to end, nil while it goes on, and a channel that is closed
// when that may change.
func (s *supervisor) over() (changed <-chan struct{}, because error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.daemons > 0 {
		return s.changed, nil
	}
	return s.changed, s.replaced
}

// tell replaces the wish that the goroutine has not read yet. Only one goroutine sends.
func tell(wishes chan Unit, unit Unit) {
	select {
	case <-wishes:
	default:
	}
	wishes <- unit
}

// leftovers returns the units of an earlier run: those with a directory or with a compute mode to
// restore.
func (s *supervisor) leftovers() (units []Unit) {
	for gpu := range s.journal.gpus() {
		if err := checkUnitID(gpu); err != nil {
			s.Logger.Warn("a compute mode is not restored", "error", err)
			continue
		}
		units = append(units, Unit{ID: gpu, GPU: gpu})
	}
	entries, err := os.ReadDir(s.Root)
	if err != nil {
		s.Logger.Warn("what an earlier run left is not read", "error", err)
	}
	for _, e := range entries {
		is := func(u Unit) bool { return u.ID == e.Name() }
		if e.IsDir() && checkUnitID(e.Name()) == nil && !slices.ContainsFunc(units, is) {
			units = append(units, Unit{ID: e.Name()})
		}
	}
	return units
}

// set stores the unit's state and reports whether it changed. A nil state means that the unit has
// no daemon and needs none.
func (s *supervisor) set(id string, state *State) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, listed := s.states[id]; state == nil && !listed || state != nil && old == *state {
		return false
	}
	if delete(s.states, id); state != nil {
		s.states[id] = *state
	}
	s.tellChange()
	return true
}

// tellChange wakes everything that waits for a change. The caller holds the lock.
func (s *supervisor) tellChange() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// list returns the line for clients, and a channel that is closed when it changes.
func (s *supervisor) list() (line statesLine, allReady bool, changed chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line.Units = []State{}
	line.Taken = new(s.taken)
	line.UnitMemory = true
	allReady = s.wanted != nil
	for _, state := range s.states {
		line.Units = append(line.Units, state)
	}
	slices.SortFunc(line.Units, func(a, b State) int { return cmp.Compare(a.ID, b.ID) })
	for _, u := range s.wanted {
		allReady = allReady && s.states[u.ID].Phase == nodereport.MPSReady
	}
	return line, allReady, s.changed
}

// accept serves clients until the listener is closed.
func (s *supervisor) accept(ctx context.Context, listener net.Listener, group *sync.WaitGroup) {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		session, stop := context.WithCancel(ctx)
		close := context.AfterFunc(session, func() { _ = connection.Close() })
		group.Go(func() {
			defer stop()
			s.tellStates(session, connection)
		})
		group.Go(func() {
			defer func() { stop(); close() }()
			err := readLines(connection, 0, func(line wishLine) {
				select {
				case s.wishes <- line:
				case <-session.Done():
				}
			})
			if session.Err() == nil {
				s.Logger.Info("virgate run is not connected any more; the daemons stay", "because", err)
			}
		})
	}
}

// tellStates sends the states to a client until the connection ends.
func (s *supervisor) tellStates(ctx context.Context, connection net.Conn) {
	for {
		line, _, changed := s.list()
		if err := writeLine(connection, line); err != nil {
			return
		}
		select {
		case <-changed:
		case <-time.After(heartbeat):
		case <-ctx.Done():
			return
		}
	}
}

// keepReadyFile makes .ready exist while all wanted daemons serve, as NVIDIA's mps-control-daemon
// does.
func (s *supervisor) keepReadyFile(ctx context.Context) {
	path := filepath.Join(s.Root, ".ready")
	defer func() { _ = os.Remove(path) }()
	for {
		_, ready, changed := s.list()
		err := os.Remove(path)
		if ready {
			err = os.WriteFile(path, nil, 0o644) //nolint:gosec // same mode as NVIDIA's
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			s.Logger.Warn("readiness not told", "error", err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
