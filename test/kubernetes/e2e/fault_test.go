package e2e

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// testFault lets a GPU fail while pods hold its shares, and mends it.
func testFault(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2")
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	before, plugin := c.vitals(t, c.hold(t, "holder", 2)), c.plugin(t)
	sim := func(command ...string) {
		t.Helper()
		c.exec(t, plugin, append([]string{"/usr/bin/virgate", "sim"}, command...)...)
	}
	for _, fault := range []struct {
		name   string
		inject []string
		says   string // What the event says of it.
		metric string
		labels []string
	}{
		{"XID", []string{"xid", "--gpu", "0", "79"}, "XID 79", "virgate_xid_events_total", []string{`action="fatal"`, `xid="79"`}},
		{"heat", []string{"temperature", "--gpu", "0", "95"}, "95", "virgate_health_transitions_total", []string{`cause="temperature"`, `to="unhealthy"`}},
	} {
		began := time.Now()
		sim(fault.inject...)
		c.awaitAllocatable(t, map[string]int64{shared: 4})
		c.report.note("fault ("+fault.name+") to allocatable", time.Since(began).Round(10*time.Millisecond).String())
		message := c.awaitEvent(t, began, "GPUUnhealthy", "GPU 0", fault.says)
		c.awaitCondition(t, v1.ConditionTrue, "Serving", "8 devices, 4 healthy")
		c.awaitSeries(t, plugin, fault.metric, "1", fault.labels...)
		c.awaitSeries(t, plugin, "virgate_unit_health_state", "1", `state="unhealthy"`)
		c.awaitSeries(t, plugin, "virgate_listed_devices", "4", `resource="nvidia.com/gpu"`, `state="unhealthy"`)

		// What starts now goes to the other GPU.
		for name, started := range c.vitals(t, c.hold(t, strings.ToLower(fault.name), 1)) {
			if strings.Contains(message, started.GPU) {
				t.Errorf("pod %s was given the GPU of which an event had said: %s", name, message)
			}
		}

		began = time.Now()
		sim("heal", "--gpu", "0")
		c.awaitAllocatable(t, all)
		c.report.note("heal ("+fault.name+") to allocatable", time.Since(began).Round(10*time.Millisecond).String())
		c.awaitEvent(t, began, "GPURecovered", "GPU 0", fault.says)
		c.awaitCondition(t, v1.ConditionTrue, "Serving", "8 devices, 8 healthy")
		c.awaitSeries(t, plugin, "virgate_listed_devices", "0", `resource="nvidia.com/gpu"`, `state="unhealthy"`)
		c.undisturbed(t, before)
	}
}
