package nvml

import (
	"errors"
	"fmt"
)

// slot is a place in the driver's enumeration, with the board that was found
// there. While it is busy, the goroutine that looks at the board has both.
type slot struct {
	index int
	// known is nil where no board could be identified.
	known *board
	busy  bool
}

// outcome is what came of a look at a slot.
type outcome struct {
	*slot
	// board is the one to keep for the next look: what its handle answers later
	// tells a reset from a hiccup, so one that cannot be replaced is kept.
	board   *board
	reading reading
	err     error
	// died is the UUID of the board whose handle answered GPU_IS_LOST, "" for
	// none; renewed says that a new handle works.
	died    string
	renewed bool
}

// look takes a reading of the slot: by the board's handle where it has one, a
// probe if that is enough, and else by a new handle.
func (s *slot) look(lib Library, whole bool) outcome {
	o := outcome{slot: s, board: s.known}
	if s.known != nil {
		if !whole {
			if o.reading, o.err = s.known.probe(lib); o.err == nil {
				return o
			}
		}
		if o.reading, o.err = s.known.read(lib); o.err == nil {
			return o
		}
		if errors.Is(o.err, GPUIsLost) {
			o.died = s.known.fixed.UUID
		}
	}
	found, r, err := find(lib, s.index)
	if err != nil {
		o.err = err
		return o
	}
	o.board, o.reading, o.err, o.renewed = found, r, nil, true
	return o
}

// find looks up the board at the index and reads it.
func find(lib Library, index int) (*board, reading, error) {
	device, err := lib.DeviceGetHandleByIndex(index)
	if err != nil {
		return nil, reading{}, err
	}
	found, err := identify(lib, device, index)
	if err != nil {
		return nil, reading{}, err
	}
	r, err := found.read(lib)
	return found, r, err
}

func (s *slot) String() string { return fmt.Sprintf("a call for GPU %d", s.index) }
