package nvml

import (
	"errors"
	"slices"

	"github.com/virgate/virgate/mig"
)

// geometry is what the board can be cut into, as its driver says: the driver
// knows profiles and boards that this program does not. Some drivers list no
// profiles while MIG mode is off, and old ones do not name them: then, and for
// the numbers of instances, of which some drivers report too few (mig-parted,
// cmd/nvidia-mig-parted/… discovery), the published geometry of the board is
// asked too.
func (b *cutBoard) geometry(pci uint32) (mig.Geometry, error) {
	published, known := mig.GeometryOf(uint16(pci >> 16))
	b.profiles = map[int]cutProfile{}
	var g mig.Geometry
	for enum := range profileEnumerationBound {
		info, err := b.lib.DeviceGetGpuInstanceProfileInfo(b.device, enum)
		if errors.Is(err, InvalidArgument) {
			break
		}
		if unsupported(err) {
			continue
		}
		if err != nil {
			return g, err
		}
		shape, err := b.shape(enum, info, published)
		if err != nil {
			return g, err
		}
		b.profiles[info.ID] = cutProfile{info, shape.Profile}
		if len(shape.Starts) > 0 && !shape.Profile.IsZero() {
			g.Shapes = append(g.Shapes, shape)
		}
	}
	if len(g.Shapes) == 0 && known {
		for _, shape := range published.Shapes {
			b.profiles[shape.ID] = cutProfile{GPUInstanceProfile{ID: shape.ID, Slices: shape.Profile.Slices}, shape.Profile}
		}
		return published, nil
	}
	for _, shape := range g.Shapes {
		g.Slices = max(g.Slices, shape.Profile.Slices)
		for _, start := range shape.Starts {
			g.Slots = max(g.Slots, start+shape.Size)
		}
	}
	slices.SortFunc(g.Shapes, func(a, b mig.Shape) int { return mig.Compare(a.Profile, b.Profile) })
	return g, nil
}

// shape is one profile of the driver with its placements.
func (b *cutBoard) shape(enum int, info GPUInstanceProfile, published mig.Geometry) (mig.Shape, error) {
	shape := mig.Shape{Enum: enum, ID: info.ID, Max: info.Instances}
	if profile, err := info.named(); err == nil {
		shape.Profile = profile.Instance()
	}
	for _, s := range published.Shapes {
		if s.Enum != enum {
			continue
		}
		if shape.Profile.IsZero() {
			shape.Profile = s.Profile
		}
		if shape.Profile == s.Profile {
			shape.Max = max(shape.Max, s.Max)
		}
	}
	placements, err := b.lib.DeviceGetGpuInstancePossiblePlacements(b.device, info.ID)
	if unsupported(err) || errors.Is(err, InvalidArgument) {
		return shape, nil
	}
	if err != nil {
		return shape, err
	}
	for _, p := range placements {
		shape.Size = p.Size
		shape.Starts = append(shape.Starts, p.Start)
	}
	slices.Sort(shape.Starts)
	return shape, nil
}
