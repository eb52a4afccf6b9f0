package prometheus

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// A labelSet has values for labels.
type labelSet map[string]string

// shapes are the ways in which units are offered and held. GPU-a is shared, GPU-b has MIG partitions, GPU-c
// is allocated by a claim, and GPU-d is on another node.
var (
	shapesOfUnits = []labelSet{
		{"gpu_uuid": "GPU-a", "unit_uuid": "GPU-a", "resource": "nvidia.com/gpu", "mig_profile": "", "gi": "", "ci": ""},
		{"gpu_uuid": "GPU-a", "unit_uuid": "GPU-a", "resource": "nvidia.com/gpu.shared", "mig_profile": "", "gi": "", "ci": ""}, // It changes its name.
		{"gpu_uuid": "GPU-b", "unit_uuid": "MIG-b1", "resource": "nvidia.com/mig-1g.10gb", "mig_profile": "1g.10gb", "gi": "7", "ci": "0"},
		{"gpu_uuid": "GPU-b", "unit_uuid": "MIG-b2", "resource": "nvidia.com/mig-1g.10gb", "mig_profile": "1g.10gb", "gi": "8", "ci": "0"},
		{"gpu_uuid": "GPU-b", "unit_uuid": "MIG-b3", "resource": "nvidia.com/mig-1c.2g.20gb", "mig_profile": "1c.2g.20gb", "gi": "3", "ci": "0"},
		{"gpu_uuid": "GPU-b", "unit_uuid": "MIG-b4", "resource": "nvidia.com/mig-1c.2g.20gb", "mig_profile": "1c.2g.20gb", "gi": "3", "ci": "1"},
		{"gpu_uuid": "GPU-c", "unit_uuid": "GPU-c", "resource": "gpu.virgate.github.io", "mig_profile": "", "gi": "", "ci": ""},
	}
	shapesOfHolders = []labelSet{
		{"namespace": "team-a", "pod": "trainer", "container": "main"}, {"namespace": "team-a", "pod": "trainer", "container": "side"},
		{"namespace": "team-b", "pod": "notebook", "container": "main"}, {"namespace": "", "pod": "uid:1234", "container": "main"},
	}
	// shapesOfTargets are two programs on one node, as in an upgrade, and one on another.
	shapesOfTargets = []labelSet{
		{"node": "n1", "instance": "10.0.0.1:9400", "job": "virgate/virgate"}, {"node": "n1", "instance": "10.0.0.7:9400", "job": "virgate/virgate"},
		{"node": "n2", "instance": "10.0.0.2:9400", "job": "virgate/virgate"},
	}
	// shapesOfLabels are values of labels that depend on no other label.
	shapesOfLabels = map[string][]string{
		"device": {"d::0", "d::1"}, "le": {"0.1", "+Inf"}, "result": {"ok", "error", "refused"}, "call": {"prepare", "unprepare"}, "kind": {"other", "unmatched", "uncorrected"},
		"state": {"free", "allocated", "unhealthy", "healthy", "suspect", "applied", "pending", "blocked", "failed", "starting", "used"}, "mig": {"false"}, "index": {"0"}, "source": {"pod_resources", "checkpoint"},
	}
)

// shapeSeries returns series of the metric with every combination of the shapes for its labels.
func shapeSeries(metric string, labels []string) (series []string) {
	sets := []labelSet{{}}
	combine := func(shapes []labelSet) {
		var kept []labelSet // Without the labels that the metric lacks.
		for _, shape := range shapes {
			shape = maps.Clone(shape)
			maps.DeleteFunc(shape, func(label, _ string) bool { return !slices.Contains(labels, label) })
			if len(shape) > 0 && !slices.ContainsFunc(kept, func(other labelSet) bool { return maps.Equal(other, shape) }) {
				kept = append(kept, shape)
			}
		}
		if len(kept) == 0 {
			return
		}
		var all []labelSet
		for _, set := range sets {
			for _, shape := range kept {
				both := maps.Clone(set)
				maps.Copy(both, shape)
				all = append(all, both)
			}
		}
		sets = all
	}
	combine(shapesOfUnits)
	combine(shapesOfHolders)
	for _, label := range labels {
		if _, known := sets[0][label]; known || slices.Contains([]string{"node", "instance", "job"}, label) {
			continue
		}
		values := shapesOfLabels[label]
		if values == nil {
			values = []string{"x", "y"}
		}
		var shapes []labelSet
		for _, value := range values {
			shapes = append(shapes, labelSet{label: value})
		}
		combine(shapes)
	}
	for _, target := range shapesOfTargets {
		for _, set := range sets {
			var pairs []string
			for label, value := range target {
				pairs = append(pairs, fmt.Sprintf("%s=%q", label, value))
			}
			for label, value := range set {
				if target["node"] == "n2" && (label == "gpu_uuid" || label == "unit_uuid") {
					value += "-n2"
				}
				pairs = append(pairs, fmt.Sprintf("%s=%q", label, value))
			}
			slices.Sort(pairs)
			series = append(series, fmt.Sprintf("%s{%s}", metric, strings.Join(pairs, ",")))
		}
	}
	return series
}

// dcgmSeries returns dcgm-exporter's series for the same GPUs: GPU-a by two exporters and once more for
// each pod (--kubernetes-virtual-gpus), GPU-b for each GPU instance. The value is the GPU's, or the
// instance's ID divided by 10.
func dcgmSeries(metric string) map[string]string {
	board := metric == "DCGM_FI_DEV_POWER_USAGE"
	series := map[string]string{}
	add := func(value, labels string) { series[metric+"{"+labels+"}"] = value + "+0x90" }
	for _, exporter := range []string{"10.0.0.1:9401", "10.0.0.1:9402"} {
		same := fmt.Sprintf(`instance=%q,job="dcgm",Hostname="n1"`, exporter)
		add("200", same+`,UUID="GPU-a",gpu="0"`)
		add("200", same+`,UUID="GPU-a",gpu="0",vgpu="0",namespace="team-a",pod="trainer",container="main"`)
		add("200", same+`,UUID="GPU-a",gpu="0",vgpu="1",namespace="team-b",pod="notebook",container="main"`)
		for _, gi := range []string{"3", "7", "8"} {
			value := "0." + gi
			if board {
				value = "300"
			}
			add(value, same+fmt.Sprintf(`,UUID="GPU-b",gpu="1",GPU_I_ID=%q,GPU_I_PROFILE="x"`, gi))
		}
	}
	return series
}

// expectation is an expected result in a promtool test.
type expectation struct {
	Expression string           `json:"expr"`
	At         string           `json:"eval_time"`
	Samples    []map[string]any `json:"exp_samples"`
}

// playShapes evaluates expressions over series of all shapes, and returns the differences.
func playShapes(t *testing.T, wanted []expectation) string {
	t.Helper()
	type input struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	played := []input{{`kube_node_info{node="n1"}`, "1x90"}, {`ALERTS{alertname="VirgateDown",alertstate="firing"}`, "1x90"}}
	known := documentedMetrics(t)
	for _, target := range shapesOfTargets {
		played = append(played, input{fmt.Sprintf("up{instance=%q,job=%q,node=%q}", target["instance"], target["job"], target["node"]), "1x90"})
	}
	for _, metric := range slices.Sorted(maps.Keys(known)) {
		for _, series := range shapeSeries(metric, known[metric]) {
			values := "1x90"
			if regexp.MustCompile(`_(total|bucket|count|sum)$`).MatchString(metric) {
				values = "0+30x90"
			}
			played = append(played, input{series, values})
		}
	}
	for metric := range ofOthers() {
		if strings.HasPrefix(metric, "DCGM") {
			for series, values := range dcgmSeries(metric) {
				played = append(played, input{series, values})
			}
		}
	}
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	data, err := yaml.Marshal(map[string]any{
		"rule_files": []string{rules}, "evaluation_interval": "1m",
		"tests": []any{map[string]any{"interval": "1m", "input_series": played, "promql_expr_test": wanted}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "shapes.test.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if output, err := exec.Command(tool(t, "promtool"), "test", "rules", path).CombinedOutput(); err != nil {
		return fmt.Sprintf("%v\n%s", err, output)
	}
	return ""
}

// TestQueriesTakeAllShapes evaluates every query, of rules, dashboards and documents, over shares,
// partitions, claims, two programs on a node, and dcgm-exporter's instances and virtual GPUs. A query that
// joins series must not fail if there are several, and must find something.
func TestQueriesTakeAllShapes(t *testing.T) {
	tool(t, "promtool")
	var wanted []expectation
	compares := regexp.MustCompile(`[=<>]=|[<>]|unless|absent`)
	for _, q := range queries(t) {
		expression := "group(" + strings.ReplaceAll(q.text, `"demo"`, `"n1"`) + "\n)" // It may end with a comment. The document's node.
		if compares.MatchString(regexp.MustCompile(`\{[^}]*\}`).ReplaceAllString(q.text, "")) {
			expression += " or vector(1)" // The values decide whether it finds something.
		}
		wanted = append(wanted, expectation{expression, "80m", []map[string]any{{"labels": "{}", "value": 1}}})
	}
	if problems := playShapes(t, wanted); problems != "" {
		t.Error(problems)
	}
}

// TestDCGMQueries checks the results of the queries with dcgm-exporter: each container once for each unit
// that it holds, with the value of its GPU or of its GPU instance.
func TestDCGMQueries(t *testing.T) {
	tool(t, "promtool")
	values := map[string]map[string]float64{
		"DCGM_FI_DEV_POWER_USAGE":       {"GPU-a": 200, "MIG-b1": 300, "MIG-b2": 300, "MIG-b3": 300, "MIG-b4": 300},
		"DCGM_FI_PROF_GR_ENGINE_ACTIVE": {"MIG-b1": 0.7, "MIG-b2": 0.8, "MIG-b3": 0.3, "MIG-b4": 0.3},
	}
	found := 0
	var wanted []expectation
	for _, q := range documentQueries(t) {
		for metric, units := range values {
			if !strings.Contains(q.text, metric) {
				continue
			}
			found++
			e := expectation{Expression: "sum by (namespace, pod, container, unit_uuid) (" + q.text + ")", At: "80m"}
			for unit, value := range units {
				for _, holder := range shapesOfHolders {
					labels := fmt.Sprintf("{namespace=%q, pod=%q, container=%q, unit_uuid=%q}", holder["namespace"], holder["pod"], holder["container"], unit)
					labels = strings.Replace(labels, `namespace="", `, "", 1) // Prometheus has no empty labels.
					e.Samples = append(e.Samples, map[string]any{"labels": labels, "value": value})
				}
			}
			wanted = append(wanted, e)
		}
	}
	if found != len(values) {
		t.Fatalf("%d queries with metrics of dcgm-exporter, want %d", found, len(values))
	}
	if problems := playShapes(t, wanted); problems != "" {
		t.Error(problems)
	}
}

// TestContainersAreShownByUnit checks that a query which keeps the container keeps the unit too: if a
// container holds two partitions of a GPU, the maximum would hide one. SM use is absent with MIG enabled,
// and virgate_allocation_info is always 1.
func TestContainersAreShownByUnit(t *testing.T) {
	known := documentedMetrics(t)
	for _, q := range queries(t) {
		e := scan(q.text)
		for _, s := range e.selectors {
			if !slices.Contains(known[s.metric], "unit_uuid") || slices.Contains([]string{"virgate_allocation_info", "virgate_container_sm_utilization_ratio"}, s.metric) {
				continue
			}
			for _, g := range e.groupings {
				if g.keyword == "by" && slices.Contains(g.labels, "container") && !slices.Contains(g.labels, "unit_uuid") {
					t.Errorf("%s: by %v has the container of %s without its unit", q.place, g.labels, s.metric)
				}
			}
		}
	}
}
