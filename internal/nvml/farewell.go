package nvml

import "context"

// farewell waits for every look to be over, and then asks every handle for the
// last time, also those of boards that no slot has: what they tell of a reset is
// gone when the driver is closed. It is in dead after that. When ctx ends, nobody
// will want to know.
func (s *scanner) farewell(ctx context.Context) {
	s.settle(ctx)
	if ctx.Err() != nil {
		return
	}
	for uuid, handle := range s.handles {
		s.start(ctx, "a call for "+uuid, func() outcome { return inquire(s.lib, handle) })
	}
	s.settle(ctx)
}

// settle waits for every look to be over.
func (s *scanner) settle(ctx context.Context) {
	for s.away > 0 {
		select {
		case o := <-s.outcomes:
			s.took(o)
		case <-ctx.Done():
			return
		}
	}
}

// inquire asks the handle alone, for no slot.
func inquire(lib Library, handle Device) outcome {
	o := outcome{slot: &slot{}}
	if answersLost(lib, handle) {
		o.died = []Device{handle}
	}
	return o
}
