package sharing

import (
	"strconv"
	"strings"
)

// replicaMark stands between the unit and the replica in a device ID. NVIDIA's
// device plugin writes the same IDs (internal/rm/devices.go), so a pod that
// holds one keeps it when Virgate takes the plugin's place.
const replicaMark = "::"

// NewDeviceID returns the device ID of the unit's replica, counted from 0:
//
//	id = unit "::" replica
//
// The device of an exclusive unit has the unit's own ID. The replica must not
// be negative.
func NewDeviceID(unit string, replica int) string {
	return unit + replicaMark + strconv.Itoa(replica)
}

// ParseDeviceID splits a device ID. What is not the ID of a replica is that of
// a unit, so there is no error: shared is then false, unit is id and replica
// is 0. The replica is a decimal number as NewDeviceID writes it, without sign
// and without leading zeros.
func ParseDeviceID(id string) (unit string, replica int, shared bool) {
	at := strings.LastIndex(id, replicaMark)
	if at <= 0 {
		return id, 0, false
	}
	replica, ok := parseIndex(id[at+len(replicaMark):])
	if !ok {
		return id, 0, false
	}
	return id[:at], replica, true
}
