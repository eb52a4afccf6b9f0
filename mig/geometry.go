package mig

// Geometry is how a kind of board can be cut. GeometryOf knows the boards that
// NVIDIA has published; for a board in a node the driver is the authority, and
// a Geometry is filled from its answers.
type Geometry struct {
	// Slices is the number of compute slices.
	Slices int
	// Slots is the number of memory slots, which placements are counted in.
	Slots int
	// Shapes are the GPU instances that the board can be cut into, by Compare.
	Shapes []Shape
}

// Shape is one kind of GPU instance of a board.
type Shape struct {
	// Profile is the shape's name; its Compute equals its Slices.
	Profile Profile
	// Enum is NVML's number for the shape, the same on every board (nvml.h,
	// NVML_GPU_INSTANCE_PROFILE_*).
	Enum int
	// ID is the profile ID that nvidia-smi mig -lgip prints, which NVML also
	// reports for a live GPU instance. It differs between kinds of board.
	ID int
	// Size is the number of memory slots that an instance takes.
	Size int
	// Starts are the slots that an instance may start at, ascending.
	Starts []int
	// Max is how many instances fit on an empty board.
	Max int
}

// Shape is the shape of that profile's GPU instance; false when the board has
// none.
func (g Geometry) Shape(p Profile) (Shape, bool) {
	instance := p.Instance()
	for _, shape := range g.Shapes {
		if shape.Profile == instance {
			return shape, true
		}
	}
	return Shape{}, false
}
