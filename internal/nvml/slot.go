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
	// died are the handles that answered GPU_IS_LOST; renewed says that a new one
	// works.
	died    []Device
	renewed bool
}

// look takes a reading of the slot: by the board's handle where it has one, a
// probe if that is enough, and else by a new handle. handles are those by which
// boards were read the last time, by UUID, which may be another slot's.
func (s *slot) look(lib Library, whole bool, handles map[string]Device) outcome {
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
		if _, stuck := errors.AsType[*AbandonedError](o.err); stuck {
			return o // What the handle answers in the end may be that it is dead.
		}
		if errors.Is(o.err, GPUIsLost) {
			o.died = append(o.died, s.known.device)
		}
	}
	found, r, err := find(lib, s.index)
	if err != nil {
		o.err = err
		return o
	}
	o.board, o.reading, o.err, o.renewed = found, r, nil, true
	if handle, had := handles[r.gpu.UUID]; had && handle != r.device && answersLost(lib, handle) {
		o.died = append(o.died, handle)
	}
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

// answersLost says that the handle answers a probe with GPU_IS_LOST. What the
// driver knows by heart it may tell of a board that is lost.
func answersLost(lib Library, device Device) bool {
	r := reading{device: device}
	return errors.Is(r.examine(lib), GPUIsLost)
}

func (s *slot) String() string { return fmt.Sprintf("a call for GPU %d", s.index) }
