package plugin

import (
	"testing"
	"time"

	"github.com/virgate/virgate/sharing"
)

// TestNextSwitchesToMPS switches between time-slicing and MPS, with the same name and as many replicas, while a
// pod has a device of A: the unit does not change until the pod is gone.
func TestNextSwitchesToMPS(t *testing.T) {
	slices, shares := planOf(nil, "gpu=2:A,B"), planOf(nil, "gpu=2m:A,B")
	more := planOf(nil, "gpu=3m:A,B")
	for _, test := range []struct {
		name     string
		from, to sharing.Plan
		held     string
		want     int
	}{
		{"to MPS", slices, shares, "A::1", 2},
		{"from MPS", shares, slices, "A::1of2", 0},
		{"other shares", shares, more, "A::1of2", 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.step(test.from)
			w.held.add("gpu", test.held)
			w.pass(test.to, time.Minute)
			free := map[string]int{} // Healthy devices by unit, as the kubelet may hand them out.
			count := func() {
				clear(free)
				for _, e := range w.lists["gpu"].Entries {
					if e.Healthy && !w.held.has("gpu", e.ID) {
						free[e.Unit]++
						if got := e.Mode.Shares; got != test.want {
							t.Errorf("%s is offered", e.ID)
						}
					}
				}
			}
			if count(); free["A"] != 0 || free["B"] != len(test.to.Resources[0].Devices)/2 {
				t.Errorf("while a pod has %s: %v, %s", test.held, free, w.show("gpu"))
			}
			w.held = DeviceIDs{}
			w.pass(test.to, time.Minute)
			if count(); free["A"] != len(test.to.Resources[0].Devices)/2 {
				t.Errorf("later: %v, %s", free, w.show("gpu"))
			}
		})
	}
}

// TestNextLeavesHalfWhileDaemonsStart switches units whose new mode cannot be granted yet: half of them keep the
// old mode until the first can.
func TestNextLeavesHalfWhileDaemonsStart(t *testing.T) {
	w := newWorld(t)
	w.step(planOf(nil, "gpu=2:A,B,C,D"))
	shares := planOf(nil, "gpu=2m:A,B,C,D")
	waiting := shares.MarkModeUnavailable(map[string]string{"A": "no daemon", "B": "no daemon", "C": "no daemon", "D": "no daemon"})
	free := func() (byTime, byMPS int) {
		for _, e := range w.lists["gpu"].Entries {
			switch {
			case !e.Healthy:
			case e.Mode.Shares > 0:
				byMPS++
			default:
				byTime++
			}
		}
		return byTime, byMPS
	}
	w.pass(waiting, 5*time.Minute)
	if byTime, byMPS := free(); byTime != 4 || byMPS != 0 {
		t.Errorf("without daemons: %s", w.show("gpu"))
	}
	w.pass(shares.MarkModeUnavailable(map[string]string{"B": "no daemon", "C": "no daemon", "D": "no daemon"}), 5*time.Minute)
	if byTime, byMPS := free(); byTime != 0 || byMPS != 2 {
		t.Errorf("with one daemon: %s", w.show("gpu"))
	}
	w.pass(shares, 5*time.Minute)
	if byTime, byMPS := free(); byTime != 0 || byMPS != 8 {
		t.Errorf("with all daemons: %s", w.show("gpu"))
	}
}
