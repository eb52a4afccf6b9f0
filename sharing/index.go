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
}

// bucket is what the list says of one unit.
type bucket struct {
	// members are positions in the list, ascending.
	members []int
	// sick is the number of members that are unhealthy.
	sick int
}

// NewIndex makes the index of a list of devices as a kubelet has it, to be
// asked by the rules of a policy. The list may hold more than a plan does, such
// as unhealthy devices that are about to go; of an ID that it repeats only the
// first counts. An unknown policy is Distributed.
func NewIndex(devices []Device, policy Policy) *Index {
	x := &Index{
		policy:   policy,
		devices:  make([]Device, 0, len(devices)),
		position: make(map[string]int, len(devices)),
		bucketOf: make([]int, 0, len(devices)),
	}
	bucketOfUnit := make(map[string]int)
	for _, device := range devices {
		if _, known := x.position[device.ID]; known {
			continue
		}
		b, known := bucketOfUnit[device.Unit]
		if !known {
			b = len(x.buckets)
			bucketOfUnit[device.Unit] = b
			x.buckets = append(x.buckets, bucket{})
		}
		at := len(x.devices)
		x.devices = append(x.devices, device)
		x.position[device.ID] = at
		x.bucketOf = append(x.bucketOf, b)
		x.buckets[b].members = append(x.buckets[b].members, at)
		if !device.Healthy {
			x.buckets[b].sick++
		}
	}
	return x
}

// Device returns the device with this ID and whether the list has it.
func (x *Index) Device(id string) (Device, bool) {
	at, known := x.position[id]
	if !known {
		return Device{}, false
	}
	return x.devices[at], true
}
