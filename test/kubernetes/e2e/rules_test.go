package e2e

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// testRules has the chart's rules choose the node's profile by the labels of one pool and then of another,
// and edits, breaks and reverts the rules. No pod notices.
func testRules(t *testing.T, c *cluster) {
	t.Cleanup(func() { c.setLabels(t, "", map[string]any{"pool": nil}) })
	c.install(t, "node=sim:t4x4", "config.default=exclusive",
		"config.rules[0].nodeSelector.pool=a", "config.rules[0].profile=time-slicing-4",
		"config.rules[1].nodeSelector.pool=b", "config.rules[1].profile=time-slicing-10")
	const configMap, key = "virgate-profiles", "virgate-rules"
	source := "ConfigMap " + namespace + "/" + configMap
	c.awaitAllocatable(t, map[string]int64{shared: 4})
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "exclusive by default: no rule of "+source+" matches: ")

	// The label is set late, and then changes to another pool.
	began := time.Now()
	c.setLabels(t, "", map[string]any{"pool": "a"})
	c.awaitAllocatable(t, map[string]int64{shared: 16})
	c.report.note("label to allocatable by a rule", took(began))
	c.awaitEvent(t, began, "ProfileApplied", "profile time-slicing-4 by rule 1 of "+source+" is in force")
	holders := c.hold(t, "ruled", 2)
	before, plugin := c.podStates(t, holders), c.plugin(t)
	c.setLabels(t, "", map[string]any{"pool": "b"})
	c.awaitAllocatable(t, map[string]int64{shared: 40})
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "time-slicing-10 by rule 2 of "+source+": ")
	c.awaitSeries(t, plugin, "virgate_config_choice_info", "1", `by="rule"`, `rule="2"`)

	// The rules are edited, broken and restored.
	rules := "rules:\n- nodeSelector: {pool: a}\n  profile: time-slicing-4\n- nodeSelector: {pool: b}\n  profile: time-slicing-10\n"
	edited := strings.Replace(rules, "time-slicing-10", "time-slicing-4", 1)
	c.editProfile(t, configMap, key, edited)
	c.awaitAllocatable(t, map[string]int64{shared: 16})
	c.awaitProfile(t, "time-slicing-4", "applied")
	began = time.Now()
	c.editProfile(t, configMap, key, strings.Replace(rules, "time-slicing-10", "nowhere", 1))
	words := []string{source + "[" + key + "]:5: rules[1].profile: rule 2: no profile has this name", `"nowhere"`}
	c.awaitEvent(t, began, "ProfileRejected", words...)
	c.awaitCondition(t, v1.ConditionTrue, "ProfileRejected", append(words, "time-slicing-4 by rule 2 of "+source)...)
	c.setLabels(t, "", map[string]any{"pool": "a"})
	c.awaitProfile(t, "time-slicing-4", "rejected")
	c.awaitServed(t, map[string]int64{shared: 16})
	c.setLabels(t, "", map[string]any{"pool": "b"})
	c.editProfile(t, configMap, key, rules)
	c.awaitAllocatable(t, map[string]int64{shared: 40})
	c.awaitProfile(t, "time-slicing-10", "applied")
	c.undisturbed(t, before)
	if now := c.plugin(t); now.UID != plugin.UID {
		t.Error("Virgate was restarted")
	}
}
