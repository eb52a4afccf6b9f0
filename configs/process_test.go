package configs

import "testing"

func TestProcessCheck(t *testing.T) {
	have := Process{FailOnInitError: true, DriverRoot: "/a", DevRoot: "/a", ContainerDriverRoot: "/c", DeviceDiscoveryStrategy: "auto"}
	if err := have.Check(have); err != nil {
		t.Errorf("without a change: %v", err)
	}
	next := have
	next.FailOnInitError, next.DevRoot = false, "/b"
	const want = "flags.failOnInitError: cannot change while the program runs (is true, wanted false): restart it\n" +
		"flags.nvidiaDevRoot: cannot change while the program runs (is /a, wanted /b): restart it"
	if err := have.Check(next); err == nil || err.Error() != want {
		t.Errorf("error is %v, want %s", err, want)
	}
	for _, next := range []Process{{DriverRoot: "/x"}, {ContainerDriverRoot: "/x"}, {DeviceDiscoveryStrategy: "nvml"}, {CDIHookPath: "/x"}, {CDIFeatures: "x"}} {
		if err := (Process{}).Check(next); err == nil {
			t.Errorf("a change to %+v is accepted", next)
		}
	}
}
