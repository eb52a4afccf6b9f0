package nvml

// Metering is the part of NVML that says how busy a device is. Every method is
// NotSupported on a board with MIG enabled and on a MIG device, but the clocks,
// which belong to the board (nvml.h).
type Metering interface {
	// DeviceGetUtilizationRates is how busy the board was in the driver's last
	// sample period, of between a sixth of a second and a second.
	DeviceGetUtilizationRates(Device) (Utilization, error)
	// DeviceGetProcessUtilization returns the samples taken after lastSeen, the
	// latest Time of an earlier call, or all that the driver has kept for 0. There
	// is none of a process that did nothing in the sample period. NotFound says
	// that there is none at all, and is no failure.
	DeviceGetProcessUtilization(d Device, lastSeen uint64) ([]ProcessSample, error)
	// DeviceGetCurrentClocksEventReasons says why the clocks are not higher.
	DeviceGetCurrentClocksEventReasons(Device) (ClockReasons, error)
}

// Utilization is in percent of the sample period.
type Utilization struct {
	// GPU is the time in which at least one kernel ran, Memory the time in which
	// the board's memory was read or written.
	GPU, Memory int
}

// ProcessSample is what a process did in one sample period.
type ProcessSample struct {
	PID int
	// Time is the driver's clock, in microseconds.
	Time uint64
	// SM is the use of the multiprocessors, Memory that of the bandwidth, both in
	// percent.
	SM, Memory int
}

// ClockReasons is a set of NVML's reasons for lower clocks.
type ClockReasons uint64

// The reasons that take speed from a busy board (nvml.h,
// nvmlClocksEventReasons).
const (
	SoftwarePowerCap        ClockReasons = 0x04
	HardwareSlowdown        ClockReasons = 0x08
	SoftwareThermalSlowdown ClockReasons = 0x20
	HardwareThermalSlowdown ClockReasons = 0x40
	HardwarePowerBrake      ClockReasons = 0x80
)
