package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// testPrometheus scrapes the pod and lets the chart's rules judge it.
func testPrometheus(t *testing.T, c *cluster) {
	program, err := exec.LookPath("prometheus")
	if err != nil {
		if os.Getenv("PROMETHEUS") == "required" {
			t.Fatal(err)
		}
		t.Skip("prometheus is not installed")
	}
	settings := []string{"node=sim:dgx-a100", "config.map.good=version: v1", "config.map.wrong=sharing: 3", "config.default=good", "metrics.rules.enabled=true"}
	c.writeRules(t, settings)
	c.install(t, settings[:len(settings)-1]...) // There is no operator for the rules.
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 8})
	c.write(t, "prometheus.yaml", `global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [`+c.path("rules.yaml")+`]
scrape_configs:
- job_name: virgate
  honor_labels: true
  static_configs: # Debian's Prometheus cannot ask Kubernetes for pods.
  - {targets: ["`+c.plugin(t).Status.PodIP+`:9400"], labels: {node: `+hostName+`}}
`)
	c.component(t, "prometheus", func() *exec.Cmd {
		return exec.Command(program, "--config.file="+c.path("prometheus.yaml"), "--storage.tsdb.path="+c.path("prometheus"), "--web.listen-address=127.0.0.1:9090")
	})
	c.await(t, time.Minute, "a scrape", func() error { return found(t, "up{node='"+hostName+"'} == 1") })
	if found(t, "ALERTS{alertname='VirgateProfileRejected'}") == nil {
		t.Fatal("the alert fires while all is well")
	}
	c.label(t, "wrong")
	defer c.label(t, "")
	c.await(t, time.Minute, "the alert", func() error {
		return found(t, "ALERTS{alertname='VirgateProfileRejected', alertstate='firing', node='"+hostName+"'}")
	})
}

// writeRules has the chart's rules fire without delay.
func (c *cluster) writeRules(t *testing.T, settings []string) {
	t.Helper()
	arguments := []string{"template", "virgate", chart, "--namespace", namespace, "--kube-version", "1.36", "--show-only", "templates/prometheusrule.yaml"}
	for _, setting := range settings {
		arguments = append(arguments, "--set", setting)
	}
	var rule struct{ Spec any }
	if err := yaml.Unmarshal([]byte(c.helm(t, arguments...)), &rule); err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(rule.Spec)
	if err != nil {
		t.Fatal(err)
	}
	c.write(t, "rules.yaml", regexp.MustCompile(`(?m)^(\s+)for: .*$`).ReplaceAllString(string(text), "${1}for: 1s"))
}

// found has no complaint if the query's answer has a series.
func found(t *testing.T, query string) error {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:9090/api/v1/query", nil)
	if err != nil {
		return err
	}
	values := request.URL.Query()
	values.Set("query", query)
	request.URL.RawQuery = values.Encode()
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	var content struct{ Data struct{ Result []any } }
	if err := json.NewDecoder(answer.Body).Decode(&content); err != nil {
		return err
	}
	if len(content.Data.Result) == 0 {
		return fmt.Errorf("%s: nothing", query)
	}
	return nil
}
