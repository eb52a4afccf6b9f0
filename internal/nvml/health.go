package nvml

import (
	"fmt"
	"strconv"
	"strings"
)

// faultLost is the fault of a board that no longer answers, or that the driver
// no longer lists.
const faultLost = "lost"

// The core temperature, in degrees Celsius, above which a board is faulty and
// down to which it must cool before it is healthy again. Two figures, so that a
// board near the limit does not come and go with every reading.
const (
	temperatureLimit = 90
	temperatureSafe  = 85
)

// eventFault is what an event says against the unit that it names; "" for an
// event that says nothing against the hardware.
func eventFault(e Event) string {
	switch {
	case e.Type&EventXIDCritical != 0:
		if applicationXID(e.Data) {
			return ""
		}
		return "XID " + strconv.FormatUint(e.Data, 10)
	case e.Type&EventDoubleBitECC != 0:
		return "double-bit ECC error"
	}
	return ""
}

// applicationXID says that the XID is the work of a program and not of the
// board. The list is the one that NVIDIA's device plugin and DRA driver ship;
// NVIDIA's XID catalogue explains the codes.
func applicationXID(code uint64) bool {
	switch code {
	case 13, // graphics engine exception
		31,  // GPU memory page fault
		43,  // GPU stopped processing
		45,  // preemptive cleanup, after errors before
		68,  // video processor exception
		109: // context switch time-out
		return true
	}
	return false
}

// temperatureFault is a board's temperature fault after a reading, given the
// one before it ("" for none). The text keeps the figure that caused the fault:
// a fault that changes its words with every degree would look like news.
func temperatureFault(celsius int, before string) string {
	switch {
	case before == "" && celsius > temperatureLimit:
		return fmt.Sprintf("temperature %d °C above %d °C", celsius, temperatureLimit)
	case before != "" && celsius <= temperatureSafe:
		return ""
	}
	return before
}

// joinFaults makes one fault of several; "" when all are.
func joinFaults(faults ...string) string {
	var present []string
	for _, fault := range faults {
		if fault != "" {
			present = append(present, fault)
		}
	}
	return strings.Join(present, ", ")
}
