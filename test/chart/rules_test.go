package chart

import (
	"os"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
)

// TestRulesAreChecked checks which errors in config.rules are found before anything is installed.
func TestRulesAreChecked(t *testing.T) {
	const list = "config: {rules: "
	for _, test := range []struct{ name, values, want string }{
		{"one of the chart's profiles", list + "[{nodeSelector: {pool: a}, profile: time-slicing-4}]}", ""},
		{"every node", list + "[{nodeSelector: {}, profile: time-slicing-4}]}", ""},
		{"no rules", "config: {rules: null}", ""},
		{"one of config.map", "config: {map: {a: ''}, rules: [{nodeSelector: {pool: a}, profile: a}]}", ""},
		{"none of the chart's", list + "[{nodeSelector: {pool: a}, profile: a}]}", `config.rules[0].profile: rule 1: the chart has no profile "a": there are exclusive, time-slicing-10,`},
		{"an example", list + "[{nodeSelector: {pool: a}, profile: mig-mixed}]}", `the chart has no profile "mig-mixed": there are exclusive, time-slicing-10, time-slicing-10-renamed, time-slicing-4, time-slicing-4-renamed; set config.examples: true`},
		{"an example that needs a right", "config: {examples: true, rules: [{nodeSelector: {pool: a}, profile: mps}]}", "config.rules: the profile mps has sharing.mps, which needs mps.enabled: true"},
		{"none of config.map", "config: {map: {a: '', b: 'mig-configs: {}'}, rules: [{nodeSelector: {pool: a}, profile: a}, {nodeSelector: {pool: b}, profile: b}]}", `config.rules[1].profile: rule 2: config.map has no profile "b"`},
		{"a layout that nobody makes", list + "[{nodeSelector: {pool: a}, profile: exclusive, mig: all-balanced}]}", "config.rules[0].mig: rule 1: the profile exclusive does not have mig.manage: true"},
		{"a label of the profile's", list + "[{nodeSelector: {nvidia.com/gpu.count: '8'}, profile: exclusive}]}", "config.rules[0]: rule 1: rules must not use the label nvidia.com/gpu.count"},
		{"another", list + "[{matchExpressions: [{key: nvidia.com/mig-1g.5gb.product, operator: Exists}], profile: exclusive}]}", "rules must not use the label nvidia.com/mig-1g.5gb.product"},
		{"a label of the GPU Operator's", list + "[{nodeSelector: {nvidia.com/gpu.deploy.dcgm: 'true'}, profile: exclusive}]}", "rules must not use the label nvidia.com/gpu.deploy.dcgm, which changes while a MIG layout is changed"},
		{"a label of the GPUs", list + "[{nodeSelector: {nvidia.com/gpu.product: T4}, profile: exclusive}]}", ""},
		{"a ConfigMap of one's own", "config: {name: own, rules: [{nodeSelector: {pool: a}, profile: a}]}", "config.rules: the ConfigMap own of config.name has its own, under the key virgate-rules"},
		{"no profiles", "config: {default: '', rules: [{nodeSelector: {pool: a}, profile: a}]}", "config.rules: there are no profiles"},
		{"rules among the profiles", "config: {map: {a: '', virgate-rules: 'rules: []'}}", "config.map.virgate-rules: rules are no profile: set config.rules"},
		{"a spread of nothing", "config: {rulesSpread: 5m}", "config.rulesSpread: there are no config.rules"},
		{"two at once", list + "[{nodeSelector: {nvidia.com/gpu.count: '8'}, profile: x}]}", "must not use the label"},
		{"an operator", list + "[{matchExpressions: [{key: pool, operator: Is}], profile: exclusive}]}", "operator"},
		{"no selector", list + "[{profile: exclusive}]}", "nodeSelector"},
		{"no profile", list + "[{nodeSelector: {}}]}", "profile"},
		{"a boolean", list + "[{nodeSelector: {spot: true}, profile: exclusive}]}", "spot"},
		{"an unknown key", list + "[{nodeSelector: {}, prefile: exclusive, profile: exclusive}]}", "prefile"},
		{"a spread", "config: {rulesSpread: soon, rules: [{nodeSelector: {}, profile: exclusive}]}", "rulesSpread"},
	} {
		values, err := chartutil.ReadValues([]byte(test.values))
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = render(t, values)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", test.name, err, test.want)
		}
	}
}

// TestRulesDocument writes the document of config.rules, which package configs reads in its own tests.
func TestRulesDocument(t *testing.T) {
	const golden = "testdata/virgate-rules.golden"
	manifest := manifestOf(t, `config:
  rules:
  - nodeSelector: {karpenter.sh/nodepool: inference, spot: "true"}
    profile: time-slicing-4
  - matchExpressions:
    - {key: nvidia.com/gpu.memory, operator: Gt, values: ["40000"]}
    - {key: spot, operator: DoesNotExist}
    profile: time-slicing-10
  rulesSpread: 10m
`)
	got := configMap(t, decode(t, manifest))["virgate-rules"]
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(golden); err != nil || string(want) != got {
		t.Errorf("%v; got %s\nwant %s", err, got, want)
	}
	if _, there := configMap(t, decode(t, manifestOf(t, "{}")))["virgate-rules"]; there {
		t.Error("there are rules without any")
	}
}
