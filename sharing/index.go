package sharing

// Index answers questions about one list of devices. It never changes once it
// is made, so any number of goroutines may ask at once.
type Index struct {
	policy   Policy
	devices  []Device
	position map[string]int
	// buckets are the devices by unit, units in the order in which the list
	// first names them.
	buckets []bucket
	// bucketOf is the bucket of each device.
	bucketOf []int
	// boardSick is the number of unhealthy devices of each board, boards in the
	// order of their first unit.
	boardSick []int
	// near is the nearness of the boards that have a seat, seats the bucket of
	// each; both nil when nothing follows from links.
	near  *nearness
	seats []int
}

// bucket is what the list says of one unit.
type bucket struct {
	// members are positions in the list, ascending.
	members []int
	// sick is the number of members that are unhealthy.
	sick int
	// board is the unit's board.
	board int
	// seat is the unit's number in near; noSeat where a choice by links makes
	// no sense.
	seat int
}

// noSeat is the seat of what is no whole board, or is shared.
const noSeat = -1

// NewIndex makes the index of a list of devices as a kubelet has it, to be
// asked by the rules of a policy. The list may hold more than a plan does, such
// as unhealthy devices that are about to go; of an ID that it repeats only the
// first counts. An unknown policy is Distributed.
//
// The units, in any order, say what is known of the hardware behind the list. A
// unit that is not among them counts as a board of its own without links.
func NewIndex(devices []Device, units []Unit, policy Policy) *Index {
	x := &Index{
		policy:   policy,
		devices:  make([]Device, 0, len(devices)),
		position: make(map[string]int, len(devices)),
		bucketOf: make([]int, 0, len(devices)),
	}
	known := make(map[string]*Unit, len(units))
	for i := range units {
		known[units[i].ID] = &units[i]
	}
	bucketOfUnit := make(map[string]int)
	boardOfGPU := make(map[string]int)
	for _, device := range devices {
		if _, repeated := x.position[device.ID]; repeated {
			continue
		}
		b, met := bucketOfUnit[device.Unit]
		if !met {
			b = len(x.buckets)
			bucketOfUnit[device.Unit] = b
			x.buckets = append(x.buckets, bucket{board: x.boardOf(device.Unit, known, boardOfGPU), seat: noSeat})
		}
		at := len(x.devices)
		x.devices = append(x.devices, device)
		x.position[device.ID] = at
		x.bucketOf = append(x.bucketOf, b)
		x.buckets[b].members = append(x.buckets[b].members, at)
		if !device.Healthy {
			x.buckets[b].sick++
			x.boardSick[x.buckets[b].board]++
		}
	}
	x.seat(known)
	return x
}

// boardOf returns the board of a unit, a new one where the list has not named
// one of its units yet.
func (x *Index) boardOf(unit string, known map[string]*Unit, boardOfGPU map[string]int) int {
	gpu := unit
	if u := known[unit]; u != nil && u.GPU != "" {
		gpu = u.GPU
	}
	b, met := boardOfGPU[gpu]
	if !met {
		b = len(x.boardSick)
		boardOfGPU[gpu] = b
		x.boardSick = append(x.boardSick, 0)
	}
	return b
}

// seat gives a seat to each board that a container can have whole and alone.
func (x *Index) seat(known map[string]*Unit) {
	var seated []*Unit
	var seats []int
	for b, bucket := range x.buckets {
		first := x.devices[bucket.members[0]]
		unit := known[first.Unit]
		if unit != nil && !unit.Partition() && len(bucket.members) == 1 && first.ID == first.Unit {
			seated, seats = append(seated, unit), append(seats, b)
		}
	}
	if x.near = newNearness(seated); x.near == nil {
		return
	}
	x.seats = seats
	for seat, b := range seats {
		x.buckets[b].seat = seat
	}
}

// Device returns the device with this ID and whether the list has it.
func (x *Index) Device(id string) (Device, bool) {
	at, known := x.position[id]
	if !known {
		return Device{}, false
	}
	return x.devices[at], true
}
