package api

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/nodestatus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	clusterview "github.com/virgate/virgate/internal/cluster"
)

// setLabels sets labels of the Node; nil removes one.
func (s *server) setLabels(name string, labels map[string]any) {
	s.t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	s.must(err)
	_, err = s.admin.CoreV1().Nodes().Patch(s.t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	s.must(err)
}

// testRules has two nodes of different pools and models get their profiles by rules, as new nodes do, and
// relabels the nodes and edits, breaks and reverts the rules.
func testRules(t *testing.T, s *server) {
	const gpu = "nvidia.com/gpu"
	profiles := func(rules string) map[string]string {
		return map[string]string{"two": document("2"), "four": document("4"), "ten": document("10"), configs.RulesName: rules}
	}
	const first = "rules:\n- nodeSelector: {pool: a}\n  profile: four\n- nodeSelector: {nvidia.com/gpu.product: Tesla-T4}\n  profile: ten\n"
	s.setProfiles(profiles(first))
	nodes := []string{"rule-a", "rule-b"}
	for _, name := range nodes {
		s.setNode(name, "")
	}
	s.setLabels("rule-a", map[string]any{"pool": "a"})
	byDefault := func(o *daemon.Options) { o.Profile.Default = "two" }
	programs := map[string]*program{"rule-a": s.run(t, "rule-a", "a100-40x2", byDefault), "rule-b": s.run(t, "rule-b", "t4x2", byDefault)}
	says := func(name, wanted, by, state string) bool {
		node := s.node(name)
		return node.Annotations[nodestatus.WantedAnnotation] == wanted && node.Annotations[nodestatus.WantedByAnnotation] == by && node.Labels[nodestatus.StateLabel] == state
	}
	awaits := func(what string, name, wanted, by string, devices int) {
		t.Helper()
		s.await(what, func() bool { return says(name, wanted, by, "applied") && programs[name].offers(gpu, devices) })
	}
	const source = "ConfigMap gpu/profiles"
	awaits("the first rule", "rule-a", "four", "rule 1 of "+source, 8)
	awaits("the rule by GPUs", "rule-b", "ten", "rule 2 of "+source, 20)
	s.await("condition and Event", func() bool {
		node := s.node("rule-a")
		condition := ""
		for _, c := range node.Status.Conditions {
			if c.Type == nodestatus.ConditionType && c.Status == corev1.ConditionTrue {
				condition = c.Message
			}
		}
		return strings.HasPrefix(condition, "four by rule 1 of "+source+": ") && strings.Contains(strings.Join(s.told("rule-a", nodestatus.ReasonProfileApplied), "\n"), "profile four by rule 1 of "+source+" is in force")
	})

	// Relabelled: the label comes late, goes and comes back.
	s.setLabels("rule-a", map[string]any{"pool": nil})
	awaits("the default", "rule-a", "two", "default: no rule of "+source+" matches", 4)
	s.setLabels("rule-a", map[string]any{"pool": "a"})
	awaits("the rule again", "rule-a", "four", "rule 1 of "+source, 8)
	s.setNode("rule-a", "ten")
	awaits("the node's own label", "rule-a", "ten", "label "+label, 20)
	s.setNode("rule-a", "")
	awaits("the rule without it", "rule-a", "four", "rule 1 of "+source, 8)

	// An edit that changes one node's profile: the other node writes that it has the list, and no Event.
	told := len(s.told("rule-a", ""))
	list := s.node("rule-a").Annotations[nodestatus.RulesAnnotation]
	edited := strings.Replace(first, "profile: ten", "profile: two", 1)
	s.setProfiles(profiles(edited))
	awaits("the edit", "rule-b", "two", "rule 2 of "+source, 4)
	s.await("the list of the other node", func() bool {
		now := s.node("rule-a").Annotations[nodestatus.RulesAnnotation]
		return now != list && now == s.node("rule-b").Annotations[nodestatus.RulesAnnotation]
	})
	if now := s.told("rule-a", ""); len(now) != told {
		t.Errorf("events about an edit that changes nothing: %q", now)
	}

	// A broken list changes nothing, and each node reports it once, with file, line and rule.
	s.setProfiles(profiles(strings.Replace(edited, "profile: four", "profile: fuor", 1)))
	for _, name := range nodes {
		s.await("the refusal by "+name, func() bool {
			return s.node(name).Labels[nodestatus.StateLabel] == "rejected" && len(s.told(name, nodestatus.ReasonProfileRejected)) == 1
		})
		want := source + `[virgate-rules]:3: rules[0].profile: rule 1: no profile has this name, there is four, ten, two (got "fuor")`
		if got := s.told(name, nodestatus.ReasonProfileRejected)[0]; !strings.Contains(got, want) {
			t.Errorf("%s: %q does not say %s", name, got, want)
		}
	}
	s.setLabels("rule-a", map[string]any{"pool": nil})
	client, err := clusterview.NewClient(s.config(adminToken))
	s.must(err)
	view := func() []string {
		snapshot, err := client.Read(t.Context(), clusterview.Options{Domain: "nvidia.com", Namespace: "virgate"})
		s.must(err)
		var lines []string
		for _, r := range clusterview.NewView(snapshot).Rules {
			lines = append(lines, fmt.Sprintf("%s %s: %d nodes, %d applied, %d rejected", r.By, r.Profile, r.Nodes, r.Applied, r.Rejected))
		}
		return lines
	}
	s.await("all nodes to say it", func() bool {
		return cmp.Equal(view(), []string{"refused rules of " + source + " : 2 nodes, 0 applied, 2 rejected"})
	})
	if !programs["rule-a"].offers(gpu, 8) || !programs["rule-b"].offers(gpu, 4) {
		t.Error("a broken list changed something")
	}

	// Reverted.
	s.setLabels("rule-a", map[string]any{"pool": "a"})
	s.setProfiles(profiles(first))
	awaits("the revert", "rule-a", "four", "rule 1 of "+source, 8)
	awaits("the revert", "rule-b", "ten", "rule 2 of "+source, 20)
	s.await("the counts", func() bool {
		return cmp.Equal(view(), []string{"rule 1 of " + source + " four: 1 nodes, 1 applied, 0 rejected", "rule 2 of " + source + " ten: 1 nodes, 1 applied, 0 rejected"})
	})

	// With a spread, a node takes an edit later, but a label at once.
	s.setProfiles(profiles("spread: 24h\n" + first))
	s.setLabels("rule-a", map[string]any{"pool": nil})
	awaits("the default by the old list", "rule-a", "two", "default: no rule of "+source+" matches", 4)
	if now := s.node("rule-a").Annotations[nodestatus.RulesAnnotation]; now != s.node("rule-b").Annotations[nodestatus.RulesAnnotation] {
		t.Error("a list with a spread was taken at once")
	}
	s.setProfiles(profiles("spread: 0s\n" + edited))
	awaits("an edit at once", "rule-b", "two", "rule 2 of "+source, 4)
	for _, p := range programs {
		if violations := p.kubelet.Violations(); len(violations) > 0 {
			t.Error(violations)
		}
	}
}
