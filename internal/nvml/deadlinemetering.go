package nvml

func (d *deadlined) DeviceGetUtilizationRates(device Device) (Utilization, error) {
	return askDevice(d, "DeviceGetUtilizationRates", device, d.lib.DeviceGetUtilizationRates)
}

func (d *deadlined) DeviceGetProcessUtilization(device Device, lastSeen uint64) ([]ProcessSample, error) {
	return askDevice(d, "DeviceGetProcessUtilization", device, func(device Device) ([]ProcessSample, error) {
		return d.lib.DeviceGetProcessUtilization(device, lastSeen)
	})
}

func (d *deadlined) DeviceGetCurrentClocksEventReasons(device Device) (ClockReasons, error) {
	return askDevice(d, "DeviceGetCurrentClocksEventReasons", device, d.lib.DeviceGetCurrentClocksEventReasons)
}
