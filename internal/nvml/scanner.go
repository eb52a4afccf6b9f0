package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// scanner looks at the boards through the library, at all of them at once, and
// keeps their handles from pass to pass: looking one up takes up to ten seconds
// on a busy node. A board that answers slowly misses the pass and is waited for
// beside the next ones. One goroutine uses the scanner.
type scanner struct {
	lib      Library
	activity *activity
	topology topology
	slots    []*slot
	// dead has the UUIDs of boards with a handle that answered GPU_IS_LOST and
	// that have not been read since; handles are those by which boards were read
	// the last time, also before an enumeration. Both are the only trace of a
	// reset that no look has seen yet.
	dead    map[string]bool
	handles map[string]Device
	// outcomes are of looks that are over; late ones come between passes. away is
	// how many are still to come.
	outcomes chan outcome
	away     int
	looking  sync.WaitGroup
	began    bool
}

// How long a pass waits for boards. The first one waits for all, since a board
// that is not in it seems not to be in the node; a driver call that hangs fails
// before that.
const (
	firstPatience = 35 * time.Second
	patience      = 2 * time.Second
)

// pass is a look at boards.
type pass struct {
	// driver is the driver's version, "" when it does not tell.
	driver   string
	readings []reading
	// unreadable has what is wrong with each board that was known and could not
	// be read, by UUID. pending are those that have not answered yet.
	unreadable map[string]finding
	pending    map[string]bool
	// full says that the boards were counted and no other is there; obscure that
	// one may be all the same, since a slot could not be read for another reason
	// than a lost board.
	full, obscure bool
	// problems say what could not be read, joined; nil when all could.
	problems error
	// err says that nothing could be read; the rest is then empty.
	err error
}

// errMoved says that two indices name one board: one of them with a handle from
// before the boards changed places.
var errMoved = errors.New("the driver lists one GPU twice")

// newScanner makes a scanner that knows no board. It keeps dead, which another
// one may have begun.
func newScanner(lib Library, doing *activity, dead map[string]bool) *scanner {
	return &scanner{
		lib: lib, activity: doing, topology: topology{lib: lib, activity: doing},
		dead: dead, handles: map[string]Device{}, outcomes: make(chan outcome),
	}
}

// scan reads every board. Only what concerns all of them is in err: that the
// driver does not answer, or that ctx has ended.
func (s *scanner) scan(ctx context.Context) pass {
	p := s.list(ctx)
	if errors.Is(p.err, errMoved) {
		s.slots = nil
		p = s.list(ctx)
	}
	return p
}

// probe looks how the known boards fare. It does not count the boards, so it
// never says that there is no other.
func (s *scanner) probe(ctx context.Context) pass {
	p := s.look(ctx, false)
	if errors.Is(p.err, errMoved) {
		return s.scan(ctx)
	}
	p.full = false
	return p
}

// list reads every board that the driver lists.
func (s *scanner) list(ctx context.Context) pass {
	end := s.activity.begin("DeviceGetCount")
	count, err := s.lib.DeviceGetCount()
	end()
	if err != nil {
		return pass{err: fmt.Errorf("list the GPUs: %w", err)}
	}
	if count != len(s.slots) {
		s.enumerate(count)
	}
	return s.look(ctx, true)
}

// enumerate begins anew. Looks that are under way are of no interest any more.
func (s *scanner) enumerate(count int) {
	s.slots = make([]*slot, count)
	for index := range s.slots {
		s.slots[index] = &slot{index: index}
	}
}

// look looks at all boards that are not being looked at.
func (s *scanner) look(ctx context.Context, whole bool) pass {
	waiting := s.begin(ctx, whole)
	limit := patience
	if !s.began {
		limit = firstPatience
	}
	enough := time.NewTimer(limit)
	defer enough.Stop()
	var over []outcome
	for late := false; len(waiting) > 0 && !late; {
		select {
		case o := <-s.outcomes:
			delete(waiting, o.slot)
			if s.took(o) {
				over = append(over, o)
			}
		case <-enough.C:
			late = true
		case <-ctx.Done():
			return pass{err: ctx.Err()}
		}
	}
	s.began = true
	return s.merge(over)
}

// begin begins to look at each slot that is not being looked at, and returns those
// slots.
func (s *scanner) begin(ctx context.Context, whole bool) map[*slot]bool {
	begun, handles := map[*slot]bool{}, maps.Clone(s.handles)
	for _, place := range s.slots {
		if place.busy {
			continue
		}
		place.busy, begun[place] = true, true
		s.start(ctx, place.String(), func() outcome { return place.look(s.lib, whole, handles) })
	}
	return begun
}

// start looks in a goroutine of its own.
func (s *scanner) start(ctx context.Context, what string, look func() outcome) {
	s.away++
	end := s.activity.begin(what)
	s.looking.Go(func() {
		o := look()
		end()
		send(ctx, s.outcomes, o)
	})
}

// late is the pass of one outcome that came between passes.
func (s *scanner) late(o outcome) pass {
	if !s.took(o) {
		return pass{}
	}
	p := s.merge([]outcome{o})
	p.full = false
	return p
}

// took notes that the look is over, and says that its slot is one of the
// enumeration as it is.
func (s *scanner) took(o outcome) bool {
	s.away--
	o.busy = false
	for uuid, handle := range s.handles {
		if slices.Contains(o.died, handle) {
			s.dead[uuid] = true
		}
	}
	return slices.Contains(s.slots, o.slot)
}
