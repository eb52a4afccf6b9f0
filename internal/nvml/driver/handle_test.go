package driver

import "testing"

func TestTable(t *testing.T) {
	type handle struct{ pointer *int }
	var things table[handle, uint64]
	a, b := handle{new(int)}, handle{new(int)}
	first := things.number(a)
	if first == 0 || things.number(a) != first || things.number(b) == first {
		t.Error("a handle has no number of its own")
	}
	if got, known := things.handle(first); got != a || !known {
		t.Errorf("number %d is %v, %t", first, got, known)
	}
	things.reset()
	if _, known := things.handle(first); known {
		t.Error("a number survives a reset")
	}
	if again := things.number(a); again == first {
		t.Error("a number is used twice")
	}
	again := things.number(a)
	things.forget(again)
	if _, known := things.handle(again); known || things.number(a) == again {
		t.Error("a forgotten handle keeps its number")
	}
	kept := things.number(b)
	for range handleLimit {
		things.number(handle{new(int)})
	}
	if _, known := things.handle(kept); known || len(things.handles) > handleLimit || len(things.numbers) != len(things.handles) {
		t.Errorf("%d handles, %d numbers, want %d at most, without the oldest", len(things.handles), len(things.numbers), handleLimit)
	}
}
