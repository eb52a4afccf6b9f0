package e2e

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// testBadProfile asks for profiles that cannot be, then mends one.
func testBadProfile(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "faulty", map[string]string{"four": replicas("4"), "edited": replicas("many")})
	c.install(t, "node=sim:t4x2", "config.name=faulty", "config.default=four")
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	c.awaitProfile(t, "four", "applied")
	holders := c.hold(t, "holder", 2)
	before, plugin := c.vitals(t, holders), c.plugin(t)
	t.Cleanup(func() { c.label(t, "") })
	for _, bad := range []struct {
		label, text string
		words       []string // What the event and the condition say of it.
	}{
		{"nowhere", replicas("many"), []string{"nowhere"}},
		{"edited", replicas("many"), []string{"faulty", "edited", "sharing.timeSlicing.resources[0].replicas", `"many"`}},
		{"edited", replicas("-3"), []string{"faulty", "edited", "sharing.timeSlicing.resources[0].replicas", "-3"}},
	} {
		began := time.Now()
		c.editProfile(t, "faulty", "edited", bad.text)
		c.label(t, bad.label)
		c.awaitEvent(t, began, "ProfileRejected", append(bad.words, "stays in force")...)
		c.awaitCondition(t, v1.ConditionTrue, "ProfileRejected", bad.words...)
		c.awaitProfile(t, "four", "rejected")
		c.awaitSeries(t, plugin, "virgate_config_state", "1", `state="rejected"`)
		c.awaitSeries(t, plugin, "virgate_config_info", "1", `profile="four"`)
		c.awaitServed(t, all)
		c.awaitAllocatable(t, all)
	}
	began := time.Now()
	c.editProfile(t, "faulty", "edited", replicas("5"))
	c.awaitAllocatable(t, map[string]int64{shared: 10})
	c.report.note("bad profile mended to allocatable", time.Since(began).Round(10*time.Millisecond).String())
	c.awaitEvent(t, began, "ProfileApplied", "edited")
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "10 devices, 10 healthy")
	c.awaitProfile(t, "edited", "applied")
	c.awaitSeries(t, plugin, "virgate_config_state", "1", `state="applied"`)
	c.awaitSeries(t, plugin, "virgate_config_info", "1", `profile="edited"`)
	c.undisturbed(t, before)
}

// replicas is a profile that offers each GPU as many times as the number says.
func replicas(number string) string {
	return "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: " + number + "\n"
}
