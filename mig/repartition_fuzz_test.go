package mig_test

import (
	"testing"

	"github.com/virgate/virgate/mig"
)

// FuzzRepartition cuts a board at random, whole GPU instances and shares, marks
// some in use and asks for something at random, possible or not.
func FuzzRepartition(f *testing.F) {
	f.Add(uint16(a100), []byte{0, 1, 2, 3}, []byte{0, 0, 2, 3}, uint8(5))
	f.Add(uint16(a30), []byte{9, 9, 1}, []byte{17, 33}, uint8(0))
	f.Add(uint16(rtxPro6000), []byte{3, 70, 8}, []byte{5, 5}, uint8(3))
	f.Fuzz(func(t *testing.T, id uint16, have, want []byte, busy uint8) {
		g, ok := mig.GeometryOf(id)
		if !ok || len(have) > 16 || len(want) > 16 {
			return
		}
		pick := func(b byte) mig.Profile {
			p := g.Shapes[int(b)%len(g.Shapes)].Profile
			p.Compute = max(1, p.Slices-int(b)/len(g.Shapes)%p.Slices)
			return p
		}
		b := &boardModel{geometry: g, mode: true}
		for n, choice := range have {
			p := pick(choice)
			shape, _ := g.Shape(p)
			at := mig.Placement{Start: shape.Starts[n%len(shape.Starts)], Size: shape.Size}
			// What a driver would refuse is not on the board.
			if b.at(at) < 0 {
				_ = b.make(mig.Step{Action: mig.CreateInstance, Profile: p.Instance(), Placement: at, GI: -1})
			}
			_ = b.make(mig.Step{Action: mig.CreateCompute, Profile: p, Placement: at, GI: -1})
		}
		b.setBusy(uint(busy))
		wanted := mig.Layout{MIG: true}
		for _, choice := range want {
			wanted.Partitions = append(wanted.Partitions, mig.Count{Profile: pick(choice), Count: 1})
		}
		if _, err := g.Place(wanted, nil); err != nil {
			if change, err := mig.Repartition(g, true, b.instances, wanted); err == nil {
				t.Fatalf("%v is impossible, and becomes %+v", wanted, change)
			}
			return
		}
		checkLeast(t, b, wanted)
	})
}
