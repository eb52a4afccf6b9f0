package configs

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/test/repeat"
)

// parsedRules are rules that may name any profile.
func parsedRules(t *testing.T, text string) Rules {
	t.Helper()
	file, err := ParseFile("rules.yaml", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	if file.Kind != KindRules {
		t.Fatalf("the kind is %q", file.Kind)
	}
	return file.Rules
}

func TestRulesMatch(t *testing.T) {
	rules := parsedRules(t, `version: v1
spread: 5m
rules:
- nodeSelector: {pool: a}
  matchExpressions: [{key: zone, operator: NotIn, values: [x]}]
  profile: first
- matchExpressions:
  - {key: nvidia.com/gpu.memory, operator: Gt, values: ["40000"]}
  - {key: spot, operator: DoesNotExist}
  profile: second
  mig: all-balanced
- matchExpressions: [{key: pool, operator: Exists}]
  profile: third
`)
	if rules.Spread != 5*time.Minute {
		t.Errorf("spread %s", rules.Spread)
	}
	large, small := map[string]string{"nvidia.com/gpu.memory": "81920"}, map[string]string{"nvidia.com/gpu.memory": "16384"}
	for _, test := range []struct {
		name            string
		node, inventory map[string]string
		want            int
		unknown         string
	}{
		{"the first", map[string]string{"pool": "a"}, large, 1, ""},
		{"the first before the GPUs are known", map[string]string{"pool": "a"}, nil, 1, ""},
		{"the second", map[string]string{"pool": "a", "zone": "x"}, large, 2, ""},
		{"the third", map[string]string{"pool": "a", "zone": "x"}, small, 3, ""},
		{"what needs the GPUs", map[string]string{"pool": "a", "zone": "x"}, nil, 0, "nvidia.com/gpu.memory"},
		{"what does not need them", map[string]string{"pool": "b", "spot": "true"}, nil, 3, ""},
		{"none", map[string]string{"spot": "true"}, large, 0, ""},
		{"no labels", nil, small, 0, ""},
		{"the Node's own word for its GPUs does not count", map[string]string{"nvidia.com/gpu.memory": "81920"}, small, 0, ""},
		{"nor where the GPUs have none", map[string]string{"nvidia.com/gpu.memory": "81920"}, map[string]string{}, 0, ""},
	} {
		got := rules.Match(test.node, test.inventory)
		if got.Number != test.want || strings.Join(got.Unknown, " ") != test.unknown || test.want > 0 && got.Rule.Profile != []string{"first", "second", "third"}[test.want-1] {
			t.Errorf("%s: rule %d, unknown %v", test.name, got.Number, got.Unknown)
		}
	}
	if got := rules.Match(nil, large); got.Rule.Layout != "all-balanced" {
		t.Errorf("the layout is %q", got.Rule.Layout)
	}
	if all := parsedRules(t, "rules: [{nodeSelector: {}, profile: a}]"); all.Match(nil, nil).Number != 1 {
		t.Error("an empty nodeSelector does not match every node")
	}
}

// randomRules are a few rules in Kubernetes' words, with few labels and values so that they overlap.
func randomRules(random *rand.Rand) []corev1.PodSpec {
	keys, values := []string{"a", "b", "nvidia.com/gpu.memory"}, []string{"x", "y", "5", "6", "8"}
	pick := func() []string {
		some := slices.Clone(values)
		random.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		return some[:1+random.IntN(3)]
	}
	var rules []corev1.PodSpec
	for range 1 + random.IntN(5) {
		rule := corev1.PodSpec{}
		var term corev1.NodeSelectorTerm
		for range random.IntN(3) {
			key := keys[random.IntN(len(keys))]
			if random.IntN(3) == 0 {
				if rule.NodeSelector == nil {
					rule.NodeSelector = map[string]string{}
				}
				rule.NodeSelector[key] = pick()[0]
				continue
			}
			operators := []corev1.NodeSelectorOperator{corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn, corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist, corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt}
			e := corev1.NodeSelectorRequirement{Key: key, Operator: operators[random.IntN(len(operators))]}
			switch e.Operator {
			case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
				e.Values = pick()
			case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
				e.Values = []string{[]string{"5", "6", "8"}[random.IntN(3)]}
			}
			term.MatchExpressions = append(term.MatchExpressions, e)
		}
		if len(term.MatchExpressions) > 0 {
			rule.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}}}
		}
		rules = append(rules, rule)
	}
	return rules
}

// documentOf writes those rules like a user.
func documentOf(t *testing.T, rules []corev1.PodSpec) string {
	t.Helper()
	type rule struct {
		NodeSelector     map[string]string                `json:"nodeSelector"`
		MatchExpressions []corev1.NodeSelectorRequirement `json:"matchExpressions,omitempty"`
		Profile          string                           `json:"profile"`
	}
	list := []rule{}
	for i, r := range rules {
		entry := rule{NodeSelector: r.NodeSelector, Profile: fmt.Sprint("p", i)}
		if entry.NodeSelector == nil {
			entry.NodeSelector = map[string]string{}
		}
		if r.Affinity != nil {
			entry.MatchExpressions = r.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions
		}
		list = append(list, entry)
	}
	text, err := yaml.Marshal(map[string]any{"rules": list})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// allLabels are all sets of labels that randomRules could distinguish.
func allLabels() (sets []map[string]string) {
	values := []string{"-", "", "x", "y", "z", "4", "5", "05", "6", "7", "8", "9"}
	for _, a := range values {
		for _, b := range values {
			for _, memory := range values {
				set := map[string]string{}
				for key, value := range map[string]string{"a": a, "b": b, "nvidia.com/gpu.memory": memory} {
					if value != "-" {
						set[key] = value
					}
				}
				sets = append(sets, set)
			}
		}
	}
	return sets
}

// TestRulesAsKubernetes compares rules with the code by which Kubernetes' scheduler evaluates a pod's nodeSelector and
// nodeAffinity: Match must find the first rule whose terms, on a pod, would match the node. It also checks the rules
// that are reported as unreachable against all nodes.
func TestRulesAsKubernetes(t *testing.T) {
	sets := allLabels()
	lists, refused := repeat.Times(75, 300), 0
	for seed := range uint64(lists) {
		rules := randomRules(rand.New(rand.NewPCG(seed, 1)))
		text := documentOf(t, rules)
		matches := func(rule int, set map[string]string) bool {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: set}}
			match, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: rules[rule]}).Match(node)
			if err != nil {
				t.Fatal(err)
			}
			return match
		}
		file, err := ParseFile("rules.yaml", []byte(text), nil)
		// A rule is useful if it matches a node that no earlier useful rule matches.
		var good []int
		unreached := ""
		for i := range rules {
			some := slices.ContainsFunc(sets, func(set map[string]string) bool { return matches(i, set) })
			covered := slices.ContainsFunc(good, func(earlier int) bool {
				return !slices.ContainsFunc(sets, func(set map[string]string) bool { return matches(i, set) && !matches(earlier, set) })
			})
			if !some || covered {
				unreached += fmt.Sprintf(" rule %d", i+1)
			} else {
				good = append(good, i)
			}
		}
		if err != nil || unreached != "" {
			refused++
			said := ""
			for i := range rules {
				if err != nil && strings.Contains(err.Error(), fmt.Sprintf(": rule %d: ", i+1)) {
					said += fmt.Sprintf(" rule %d", i+1)
				}
			}
			if said != unreached {
				t.Errorf("seed %d: no node reaches%s, and it says %v of\n%s", seed, unreached, err, text)
			}
			continue
		}
		for _, set := range sets {
			inventory := maps.Clone(set)
			node := maps.Clone(set)
			node["nvidia.com/gpu.memory"] = "5" // Which does not count.
			want := 0
			for i := range rules {
				if want == 0 && matches(i, set) {
					want = i + 1
				}
			}
			got, again := file.Rules.Match(node, inventory), file.Rules.Match(node, inventory)
			if got.Number != want || again.Number != want {
				t.Fatalf("seed %d: rule %d, then %d, for %v; want %d of\n%s", seed, got.Number, again.Number, set, want, text)
			}
			// Before the GPUs are known, a rule is named only if it will be the final one.
			if early := file.Rules.Match(node, nil); early.Number != 0 && early.Number != want || early.Number == 0 && early.Unknown == nil && want != 0 {
				t.Fatalf("seed %d: rule %d before the GPUs are known, %d after, for %v of\n%s", seed, early.Number, want, set, text)
			}
		}
	}
	if refused < lists/6 || refused > lists*5/6 {
		t.Errorf("%d of %d lists have a rule that no node reaches: the test is worth little", refused, lists)
	}
}

func TestRulesInDocuments(t *testing.T) {
	documents := Documents{"a": "", "b": "", RulesName: "rules: [{nodeSelector: {pool: x}, profile: b}]", "layouts": "version: v1\nmig-configs: {mine: [{devices: all, mig-enabled: false}]}\n"}
	if diff := gocmp.Diff([]string{"a", "b"}, documents.ProfileNames()); diff != "" {
		t.Error(diff)
	}
	rules, ok, err := documents.Rules("ConfigMap gpu/profiles")
	if err != nil || !ok || len(rules.List) != 1 || rules.Generation == "" {
		t.Errorf("%+v, %v, %v", rules, ok, err)
	}
	delete(documents, "b")
	_, _, err = documents.Rules("ConfigMap gpu/profiles")
	if want := `ConfigMap gpu/profiles[virgate-rules]:1: rules[0].profile: rule 1: no profile has this name, there is a (got "b")`; err == nil || err.Error() != want {
		t.Errorf("%v; want %s", err, want)
	}
	if _, err := documents.Select("x", RulesName, nil); err == nil {
		t.Error("the rules are a profile")
	}
	delete(documents, RulesName)
	if _, ok, err := documents.Rules("x"); ok || err != nil {
		t.Errorf("%v, %v without rules", ok, err)
	}
}

// TestRefusedLabels has labels that change with the profile that a rule chose, or while it is applied.
func TestRefusedLabels(t *testing.T) {
	for name, why := range map[string]string{
		"nvidia.com/gpu.replicas":             "depends on the profile",
		"nvidia.com/mig-1g.5gb.count":         "depends on the profile",
		"nvidia.com/mig.config.state":         "says how far the profile is",
		"nvidia.com/device-plugin.config":     "names a profile itself",
		"nvidia.com/gpu.deploy.device-plugin": "changes while a MIG layout is changed or the driver is replaced",
		"nvidia.com/gpu.deploy.dcgm":          "changes while a MIG layout is changed or the driver is replaced",
	} {
		_, err := ParseFile("rules.yaml", []byte("rules: [{nodeSelector: {"+name+": x}, profile: a}]"), nil)
		if err == nil || !strings.Contains(err.Error(), "rules must not use this label: the label "+why) {
			t.Errorf("%s: %v, want that it %s", name, err, why)
		}
		if RuleLabel(name) || InventoryLabel(name) {
			t.Errorf("rules read %s", name)
		}
	}
}

// TestRulesManifest has a rule beside a manifest's profiles, which do not change.
func TestRulesManifest(t *testing.T) {
	const text = `apiVersion: v1
kind: ConfigMap
data:
  a: ""
  virgate-rules: |
    rules:
    - nodeSelector: {pool: x}
      profile: a
`
	file, err := ParseFile("m.yaml", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(file.Entries) != 2 || file.Entries[1].Kind != KindRules || file.Entries[1].Rules.List[0].Line != 7 {
		t.Errorf("%+v", file.Entries)
	}
	if notes := file.Entries[1].Config.Notes; len(notes) != 1 || !strings.Contains(notes[0].Message, "fallback single") {
		t.Errorf("notes %v", notes)
	}
	if _, err := file.Select(""); err != nil {
		t.Errorf("the only profile is not found: %v", err)
	}
	if _, err := file.Select(RulesName); err == nil || !strings.Contains(err.Error(), "a list of rules") {
		t.Error(err)
	}
}

// TestChartRules reads the chart's rendering of config.rules.
func TestChartRules(t *testing.T) {
	data, err := os.ReadFile("../test/chart/testdata/virgate-rules.golden")
	if err != nil {
		t.Fatal(err)
	}
	rules, _, err := Documents{"time-slicing-4": "", "time-slicing-10": "", RulesName: string(data)}.Rules("x")
	if err != nil || len(rules.List) != 2 || rules.Spread != 10*time.Minute {
		t.Fatalf("%+v, %v", rules, err)
	}
	if got := rules.Match(map[string]string{"karpenter.sh/nodepool": "inference", "spot": "true"}, nil); got.Rule.Profile != "time-slicing-4" {
		t.Errorf("%+v", got)
	}
}

func FuzzRules(f *testing.F) {
	f.Add("rules: [{nodeSelector: {}, profile: a}]")
	f.Add("spread: 5m\nrules:\n- matchExpressions: [{key: a, operator: Gt, values: ['9223372036854775807']}]\n  profile: a\n  mig: x")
	f.Fuzz(func(_ *testing.T, text string) {
		rules, _, err := Documents{RulesName: text, "a": ""}.Rules("x")
		if err == nil {
			rules.Match(map[string]string{"a": "1"}, nil)
		}
	})
}
