package configs

import (
	"errors"
	"fmt"
)

// Check says which settings of next a process that runs with p cannot follow;
// nil when there is none. The error names each setting with both values.
func (p Process) Check(next Process) error {
	var errs []error
	for _, setting := range []struct {
		path       string
		have, want any
	}{
		{pathFailOnInitError, p.FailOnInitError, next.FailOnInitError},
		{pathDriverRoot, p.DriverRoot, next.DriverRoot},
		{pathDevRoot, p.DevRoot, next.DevRoot},
		{pathContainerDriverRoot, p.ContainerDriverRoot, next.ContainerDriverRoot},
		{pathCDIHook, p.CDIHookPath, next.CDIHookPath},
		{pathCDIFeatures, p.CDIFeatures, next.CDIFeatures},
		{pathDiscovery, p.DeviceDiscoveryStrategy, next.DeviceDiscoveryStrategy},
	} {
		if setting.have != setting.want {
			errs = append(errs, fmt.Errorf("%s: cannot change while the program runs (is %v, wanted %v): restart it", setting.path, setting.have, setting.want))
		}
	}
	return errors.Join(errs...)
}
