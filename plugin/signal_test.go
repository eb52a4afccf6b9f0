package plugin

import "testing"

func TestSignal(t *testing.T) {
	s := make(signal, 1)
	s.give()
	s.give()
	select {
	case <-s:
	default:
		t.Error("nothing received")
	}
	select {
	case <-s:
		t.Error("received twice")
	default:
	}
	signal(nil).give()
}
