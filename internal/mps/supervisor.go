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

// Options are what the supervisor needs.
type Options struct {
	// Root is the directory of all files, as this process and the daemons see it, Proc is /proc.
	Root, Proc string
	// OwnShm gives the daemons of each unit and their clients a /dev/shm of their own, which takes the right to mount.
	// Without it daemons have what this process has.
	OwnShm  bool
	Control Control
	// ComputeMode and SetComputeMode are those of whole GPUs, by UUID.
	ComputeMode    func(ctx context.Context, gpu string) (sharing.ComputeMode, error)
	SetComputeMode func(ctx context.Context, gpu string, mode sharing.ComputeMode) error
	// KeepClosed has the other two not open these GPUs, by UUID, with the driver's index, and returns when they do not
	// have any open, or ctx ends; nil where they open none.
	KeepClosed func(ctx context.Context, released map[string]int)
	// DriverReplaced returns an error when the node has another driver than this process, and nil when ctx ends; nil
	// where nobody can tell. Then no daemon is started any more.
	DriverReplaced func(ctx context.Context) error
	// Who describes a process for people, and returns "" for one that has ended; nil for its ID alone.
	Who func(pid int) string
	// Timing's zero fields have defaults.
	Timing Timing
	Logger *slog.Logger
}

// Timing is how long the supervisor waits.
type Timing struct {
	// Ask is the time between two questions whether a daemon still answers, Answer how long it
	// may take to. After Misses questions without an answer it is restarted.
	Ask, Answer time.Duration
	Misses      int
	// Start is how long a daemon may take until it first answers, Stop until it has ended.
	Start, Stop time.Duration
	// Pause is the time until a failure is tried again; it doubles up to MaxPause.
	Pause, MaxPause time.Duration
	// FirstWish is how long what an earlier run left is kept for a client to ask for it.
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
	// refused are the units of the last wish that get no daemon, and why. supervise has them.
	refused map[string]error

	mu sync.Mutex
	// wanted is what clients want, nil until the first says it, and taken when that was.
	wanted []Unit
	taken  int64
	// states are by ID; changed is closed with every change.
	states  map[string]State
	changed chan struct{}
	// replaced is DriverReplaced's error, daemons how many run.
	replaced error
	daemons  int

	// shmLock guards the links to units' memory, and the clients that were found at clientsAt.
	shmLock   sync.Mutex
	clients   map[string][]client
	clientsAt time.Time
}

// Run serves the daemons that a Client wants until ctx ends, and then stops them. Their
// directories stay for the next run: pods have them mounted. An error says that it could
// not start, or that the driver was replaced and no daemon runs. Nobody else may serve the
// same root directory.
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
	// They are told of from the first: a client may take a unit that is not for one that is free.
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

// CheckRoot refuses a root directory whose path leaves too few bytes for a control daemon's
// socket, ROOT/UUID/pipe/control: a Unix socket's path has at most 107 (sun_path in unix(7)),
// and nvidia-cuda-mps-control would end without a word.
func CheckRoot(root string) error {
	const most = 107 - len("/GPU-00000000-0000-0000-0000-000000000000/pipe/control")
	if length := len(filepath.Clean(root)); length > most {
		return fmt.Errorf("MPS root directory %s: its path has %d bytes; at most %d leave room for a daemon's socket",
			root, length, most)
	}
	return nil
}

// listen listens where only root can connect. Nobody else listens there; see Run.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("old socket: %w", err)
	}
	// The mode is set before the file exists: nobody else can ever connect.
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

// supervise starts and ends the units' goroutines as clients wish.
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
				break // Of a client that has been replaced, and was heard later than its successor.
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

// refuse says of the units why they get no daemon, and of no others.
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

// setTaken says which wish is in force.
func (s *supervisor) setTaken(at int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken = at
	s.tellChange()
}

// watchDriver keeps why the driver is not the node's any more. Daemons that run go on: they keep the node's old driver
// loaded, and end with the clients that a new container could not serve either.
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

// driverReplaced is why no daemon may be started any more; nil while they may.
func (s *supervisor) driverReplaced() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.replaced
}

// count counts a daemon that was started, 1, or stopped, -1.
func (s *supervisor) count(daemons int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.daemons += daemons
	s.tellChange()
}

// over returns why the supervisor ends, nil while it goes on, and a channel that is closed when that may change.
func (s *supervisor) over() (changed <-chan struct{}, because error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.daemons > 0 {
		return s.changed, nil
	}
	return s.changed, s.replaced
}

// tell replaces what the goroutine has not yet looked at. There is one sender.
func tell(wishes chan Unit, unit Unit) {
	select {
	case <-wishes:
	default:
	}
	wishes <- unit
}

// leftovers are the units of an earlier run: with a directory, or a compute mode to restore.
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

// set sets how the unit is, nil for one that has no daemon and should have none, and says
// whether that is new.
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

// tellChange is called with the lock.
func (s *supervisor) tellChange() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// list is what clients are told, and a channel that is closed when that changes.
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

// tellStates sends the states until the connection ends.
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

// keepReadyFile keeps .ready, as NVIDIA's mps-control-daemon has it.
func (s *supervisor) keepReadyFile(ctx context.Context) {
	path := filepath.Join(s.Root, ".ready")
	defer func() { _ = os.Remove(path) }()
	for {
		_, ready, changed := s.list()
		err := os.Remove(path)
		if ready {
			err = os.WriteFile(path, nil, 0o644) //nolint:gosec // as NVIDIA's
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
