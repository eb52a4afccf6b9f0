package driver

import "sync"

// handleLimit is the maximum size of a table. The driver has far fewer handles at a time, but no
// document says whether it makes new handles for the same object.
const handleLimit = 1 << 16

// table numbers the driver's handles. It never uses a number twice. The zero value is empty.
type table[Handle comparable, Number ~uint64] struct {
	mu      sync.Mutex
	numbers map[Handle]Number
	handles map[Number]Handle
	// last is the number given last, and oldest is the smallest that may still be known.
	last, oldest Number
}

// number returns the handle's number, which stays the same until reset.
func (t *table[Handle, Number]) number(handle Handle) Number {
	t.mu.Lock()
	defer t.mu.Unlock()
	if number, known := t.numbers[handle]; known {
		return number
	}
	if t.numbers == nil {
		t.numbers, t.handles = map[Handle]Number{}, map[Number]Handle{}
	}
	t.last++
	t.numbers[handle], t.handles[t.last] = t.last, handle
	for ; len(t.handles) > handleLimit; t.oldest++ {
		delete(t.numbers, t.handles[t.oldest])
		delete(t.handles, t.oldest)
	}
	return t.last
}

// handle returns the handle with that number; false if there is none, for example after reset.
func (t *table[Handle, Number]) handle(number Number) (Handle, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	handle, known := t.handles[number]
	return handle, known
}

func (t *table[Handle, Number]) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.numbers)
	clear(t.handles)
	t.oldest = t.last + 1
}

// forget removes a handle that the driver has freed.
func (t *table[Handle, Number]) forget(number Number) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.numbers, t.handles[number])
	delete(t.handles, number)
}
