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
	// died are the UUIDs of boards with a handle that answered GPU_IS_LOST; renewed
	// says that a new handle works.
	died    []string
	renewed bool
}

// look takes a reading of the slot: by the board's handle where it has one, a
// probe if that is enough, and else by a new handle. former are the handles that
// boards had in an enumeration before, by UUID.
func (s *slot) look(lib Library, whole bool, former map[string]Device) outcome {
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
			o.died = append(o.died, s.known.fixed.UUID)
		}
	}
	found, r, err := find(lib, s.index)
	if err != nil {
		o.err = err
		return o
	}
	o.board, o.reading, o.err, o.renewed = found, r, nil, true
	if handle, had := former[r.gpu.UUID]; had && handle != r.device && answersLost(lib, handle) {
		o.died = append(o.died, r.gpu.UUID)
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

// answersLost says that the handle answers GPU_IS_LOST. It asks what a probe asks
// first: what the driver knows by heart it may tell of a board that is lost.
func answersLost(lib Library, device Device) bool {
	if _, err := lib.DeviceGetMemoryInfo(device); err == nil || errors.Is(err, GPUIsLost) {
		return err != nil
	}
	_, err := lib.DeviceGetTemperature(device)
	return errors.Is(err, GPUIsLost)
}

func (s *slot) String() string { return fmt.Sprintf("a call for GPU %d", s.index) }
