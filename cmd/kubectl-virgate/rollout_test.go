package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// rolloutAPI is an API server with a stopped rollout of two nodes in namespace virgate. n3's annotation about
// that rollout is forged.
func rolloutAPI(t *testing.T) (kubeconfig string) {
	t.Helper()
	const configMap = `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"virgate-rollout-r1","namespace":"virgate","resourceVersion":"6"},"data":{
		"rollout":"{\"id\":\"r1\",\"label\":\"nvidia.com/device-plugin.config\",\"to\":\"new\",\"by\":\"alice\",\"started\":\"2026-01-02T03:04:05Z\",\"max\":1,\"timeout\":60,\"domain\":\"nvidia.com\"}",
		"state":"{\"phase\":\"stopped\",\"reason\":\"n1: the node refuses the profile\"}",
		"nodes":"[{\"from\":\"old\",\"nodes\":[\"n1\"]},{\"nodes\":[\"n2\",\"n4\"]}]"}}`
	answers := map[string]string{
		"/api/v1/namespaces/virgate/configmaps":                    `{"kind":"ConfigMapList","apiVersion":"v1","items":[` + configMap + `]}`,
		"/api/v1/namespaces/virgate/configmaps/virgate-rollout-r1": configMap,
		"/api/v1/namespaces/other/configmaps":                      `{"kind":"ConfigMapList","apiVersion":"v1","items":[]}`,
		"/api/v1/namespaces/torn/configmaps":                       `{"kind":"ConfigMapList","apiVersion":"v1","items":[` + strings.Replace(configMap, `\"max\":1`, `\"max\":0`, 1) + `]}`,
		"/api/v1/nodes": `{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[
			{"metadata":{"name":"n1","resourceVersion":"5","annotations":{"virgate.github.io/rollout":"{\"rollout\":\"r1\",\"to\":\"evil\",\"from\":\"evil\",\"wave\":7,\"place\":\"failed\",\"set\":true,\"reason\":\"the node refuses\\nthe profile\",\"since\":\"2026-01-02T03:04:06Z\"}"}}},
			{"metadata":{"name":"n2","resourceVersion":"6"}},
			{"metadata":{"name":"n3","resourceVersion":"7","annotations":{"virgate.github.io/rollout":"{\"rollout\":\"r1\",\"place\":\"failed\"}"}}}]}`,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, found := answers[r.URL.Path]
		if !found || r.Method != http.MethodGet {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '" + server.URL + "'}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

func TestRolloutStatus(t *testing.T) {
	kubeconfig := rolloutAPI(t)
	const all = "" +
		"ROLLOUT  TO   PHASE    NODES  WAITING  PENDING  DONE  FAILED  SKIPPED  UNDONE  DRIVER  HEARD\n" +
		"r1       new  stopped  2      1        0        0     1       0        0       -       -\n" +
		"r1 is stopped: n1: the node refuses the profile\n"
	for words, want := range map[string]string{
		"status": all,
		"status r1": all +
			"NODE  WAVE  PLACE    SINCE                 HAD  NOTE\n" +
			"n1    1     failed   2026-01-02T03:04:06Z  old  the node refuses the profile\n" +
			"n2    2     waiting  -                     -    \n",
		"status --virgate-namespace other": "there is no rollout in the namespace other\n",
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"kubectl-virgate", "rollout", "--kubeconfig", kubeconfig}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if diff := cmp.Diff(want, out.String()); diff != "" || code != 0 {
			t.Errorf("%s: %d %s (-want +got):\n%s", words, code, errors.String(), diff)
		}
	}
	for output, want := range map[string]string{"json": `"from": "old"`, "yaml": "  - from: old\n"} {
		var out, errors strings.Builder
		code := run(t.Context(), []string{"kubectl-virgate", "rollout", "--kubeconfig", kubeconfig, "status", "-o", output}, os.LookupEnv, &out, &errors)
		if code != 0 || !strings.Contains(out.String(), want) {
			t.Errorf("%s: %d\n%s%s", output, code, out.String(), errors.String())
		}
	}
}

func TestRolloutRefuses(t *testing.T) {
	kubeconfig := rolloutAPI(t)
	for words, want := range map[string]string{
		"start":                               "needs one profile",
		"start p":                             "needs --selector",
		"start p -l a --max-unavailable 0":    `--max-unavailable: expected a number of nodes from 1, or a part of them from 1% to 100%, got "0"`,
		"start p -l a --max-unavailable 101%": `got "101%"`,
		"start p -l a --timeout 1ms":          "--timeout must be 1s at least",
		"start p -l a --pause-after -1":       "--pause-after must not be less than 0",
		"start p -l a --domain a/b":           "--domain: expected a domain",
		"start p -l a=(":                      "selector: ",
		"start p! -l a":                       `"p!" cannot be a label's value`,
		"start p -l a":                        "no node has the labels a",
		"start p -l !a":                       "node n1 belongs to rollout r1 to new, which alice began at 2026-01-02T03:04:05Z and which has not ended",
		"resume --pause-after -1":             "--pause-after must not be less than 0",
		"pause":                               "rollout r1 does not run: it is stopped",
		"resume r2":                           "there is no rollout r2 in the namespace virgate",
		"resume a/b":                          "a/b",
		"--virgate-namespace a/b status":      `--virgate-namespace: "a/b" cannot be a namespace`,
		"--virgate-namespace other status r1": "there is no rollout r1 in the namespace other",
		"status r1 --virgate-namespace other": "there is no rollout r1 in the namespace other",
		"--virgate-namespace other resume":    "there is no such rollout: see kubectl virgate rollout status",
		"--virgate-namespace torn status":     "ConfigMap virgate/virgate-rollout-r1 is not as kubectl virgate rollout writes it: max and timeout must be 1 at least, got 0 and 60",
		"start p -l a -o json":                "--output is for --dry-run",
		"undo a b":                            "takes the name of one rollout",
		"forget":                              "needs the name of one rollout",
		"status r2":                           "there is no rollout r2 in the namespace virgate",
		"status -o xml":                       `--output "xml" is none of`,
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"kubectl-virgate", "rollout", "--kubeconfig", kubeconfig}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if code == 0 || !strings.Contains(errors.String(), want) {
			t.Errorf("%s: exit code %d, %q, want %q", words, code, errors.String(), want)
		}
	}
}
