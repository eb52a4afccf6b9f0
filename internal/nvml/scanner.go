package nvml

import (
	"context"
	"errors"
	"fmt"
)

// scanner reads the boards through the library, and keeps their handles from
// pass to pass: looking one up takes up to ten seconds on a busy node. One
// goroutine uses it.
type scanner struct {
	lib Library
	// boards are by enumeration index; nil where none could be identified.
	boards []*board
	// dead has the UUIDs of boards with a handle that answered GPU_IS_LOST and
	// that have not been read since.
	dead map[string]bool
	// doing is told what is about to be asked of the driver.
	doing func(what string)
}

// pass is one look at all boards.
type pass struct {
	readings []reading
	// unreadable has the fault of each board that was known and could not be
	// read, by UUID.
	unreadable map[string]string
	// problems say what could not be read, joined; nil when all could.
	problems error
	// err says that nothing could be read; the rest is then empty.
	err error
}

// errMoved says that two indices name one board: one of them with a handle from
// before the boards changed places.
var errMoved = errors.New("the driver lists one GPU twice")

func newScanner(lib Library, doing func(string)) *scanner {
	return &scanner{lib: lib, dead: map[string]bool{}, doing: doing}
}

// pass reads every board. Only what concerns all of them is in err: that the
// driver does not answer, or that ctx has ended.
func (s *scanner) pass(ctx context.Context) pass {
	s.doing("DeviceGetCount")
	count, err := s.lib.DeviceGetCount()
	if err != nil {
		return pass{err: fmt.Errorf("list the GPUs: %w", err)}
	}
	if count != len(s.boards) {
		s.boards = make([]*board, count)
	}
	p := s.readAll(ctx)
	if errors.Is(p.err, errMoved) {
		s.boards = make([]*board, count)
		p = s.readAll(ctx)
	}
	return p
}

func (s *scanner) readAll(ctx context.Context) pass {
	p := pass{unreadable: map[string]string{}}
	seen := map[string]bool{}
	var problems []error
	for index := range s.boards {
		if err := ctx.Err(); err != nil {
			return pass{err: err}
		}
		known := s.boards[index]
		r, err := s.read(index)
		switch {
		case err == nil && seen[r.gpu.UUID]:
			return pass{err: errMoved}
		case err != nil:
			problems = append(problems, fmt.Errorf("read GPU %d: %w", index, err))
			if known != nil {
				p.unreadable[known.fixed.UUID] = unreadableFault(err)
			}
			continue
		case r.problems != nil:
			problems = append(problems, fmt.Errorf("read GPU %d: %w", index, r.problems))
		}
		seen[r.gpu.UUID] = true
		p.readings = append(p.readings, r)
	}
	p.problems = errors.Join(problems...)
	return p
}

// read takes a reading of the board at the index, with the handle it has or,
// where that fails, with a new one. A handle that cannot be replaced is kept:
// what it answers later tells a reset from a hiccup.
func (s *scanner) read(index int) (reading, error) {
	s.doing(fmt.Sprintf("a call for GPU %d", index))
	known := s.boards[index]
	if known != nil {
		r, err := known.read(s.lib)
		if err == nil {
			return r, nil
		}
		if errors.Is(err, GPUIsLost) {
			s.dead[known.fixed.UUID] = true
		}
	}
	device, err := s.lib.DeviceGetHandleByIndex(index)
	if err != nil {
		return reading{}, err
	}
	found, err := identify(s.lib, device, index)
	if err != nil {
		return reading{}, err
	}
	r, err := found.read(s.lib)
	if err != nil {
		return r, err
	}
	s.boards[index] = found
	r.reset = s.dead[found.fixed.UUID]
	delete(s.dead, found.fixed.UUID)
	return r, nil
}

func unreadableFault(err error) string {
	if errors.Is(err, GPUIsLost) {
		return faultLost
	}
	return "cannot be read: " + cause(err)
}
