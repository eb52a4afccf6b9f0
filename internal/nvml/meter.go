package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// Meter reads how the boards are used. It has handles of its own, and opens the
// library for as long as a reading takes: whoever else has it open can still
// close it, and open another version after that.
//
// One goroutine uses it.
type Meter struct {
	lib    Library
	count  *query[int]
	gauges []*gauge
}

// NewMeter returns a meter that reads through the library, which should have
// deadlines.
func NewMeter(lib Library) *Meter {
	return &Meter{lib: lib, count: newQuery[int]()}
}

// Read returns the use of each board that answers within two seconds, by UUID.
// A slower one is missing, and is waited for beside later readings. The error
// says of the missing boards and units why, joined; it is ctx's when that ended
// first.
func (m *Meter) Read(ctx context.Context) ([]sharing.BoardUse, error) {
	patient, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	m.count.begin(func() (int, error) { return opened(m.lib, m.lib.DeviceGetCount) })
	count, err := m.count.wait(patient)
	if ctx.Err() != nil {
		m.leave()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("read use: %w", err)
	}
	for len(m.gauges) < count {
		m.gauges = append(m.gauges, &gauge{index: len(m.gauges), query: newQuery[measured]()})
	}
	m.gauges = m.gauges[:count]
	for _, g := range m.gauges {
		g.begin(func() (measured, error) {
			return opened(m.lib, func() (measured, error) { return g.measure(m.lib) })
		})
	}
	boards, err := m.collect(patient)
	if ctx.Err() != nil {
		m.leave()
		return nil, ctx.Err()
	}
	return boards, err
}

// collect waits for the boards.
func (m *Meter) collect(patient context.Context) ([]sharing.BoardUse, error) {
	seen := map[string]*gauge{}
	var boards []sharing.BoardUse
	var problems []error
	for _, g := range m.gauges {
		answer, err := g.wait(patient)
		if err != nil {
			problems = append(problems, fmt.Errorf("read use of GPU %d: %w", g.index, err))
			continue
		}
		if twin := seen[answer.use.GPU]; twin != nil {
			// The boards have changed places: look both up anew.
			g.uuid, twin.uuid = "", ""
			continue
		}
		seen[answer.use.GPU] = g
		boards, problems = append(boards, answer.use), append(problems, answer.problems)
	}
	slices.SortFunc(boards, func(a, b sharing.BoardUse) int { return cmp.Compare(a.GPU, b.GPU) })
	return boards, errors.Join(problems...)
}

// leave waits a moment for what is under way, and leaves behind what the driver
// does not answer.
func (m *Meter) leave() {
	moment, cancel := context.WithTimeout(context.Background(), abandonAfter)
	defer cancel()
	_, _ = m.count.wait(moment)
	for _, g := range m.gauges {
		_, _ = g.wait(moment)
	}
}

// opened asks something while the library is open.
func opened[T any](lib Library, ask func() (T, error)) (T, error) {
	if err := lib.Init(); err != nil {
		var nothing T
		return nothing, err
	}
	value, err := ask()
	return value, errors.Join(err, lib.Shutdown())
}
