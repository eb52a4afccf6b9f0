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

// rolloutAPI is an API server whose two nodes are part of a rollout that has stopped.
func rolloutAPI(t *testing.T) (kubeconfig string) {
	t.Helper()
	const record = `"virgate.github.io/rollout":"{\"id\":\"r1\",\"label\":\"nvidia.com/device-plugin.config\",\"to\":\"new\",\"by\":\"alice\",\"started\":\"2026-01-02T03:04:05Z\",\"max\":1,\"timeout\":60,\"domain\":\"nvidia.com\",`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path != "/api/v1/nodes" || r.Method != http.MethodGet {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(`{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[
			{"metadata":{"name":"n1","resourceVersion":"5","annotations":{` + record + `\"from\":\"old\",\"wave\":0,\"place\":\"failed\",\"set\":true,\"reason\":\"the node refuses the profile\",\"since\":\"2026-01-02T03:04:06Z\"}",
				"virgate.github.io/rollout-head":"{\"rollout\":\"r1\",\"phase\":\"stopped\",\"reason\":\"n1: the node refuses the profile\"}"}}},
			{"metadata":{"name":"n2","resourceVersion":"6","annotations":{` + record + `\"wave\":1,\"place\":\"waiting\"}"}}},
			{"metadata":{"name":"n3","resourceVersion":"7"}}]}`))
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
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"virgate", "rollout", "--kubeconfig", kubeconfig}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if diff := cmp.Diff(want, out.String()); diff != "" || code != 0 {
			t.Errorf("%s: %d %s (-want +got):\n%s", words, code, errors.String(), diff)
		}
	}
	for output, want := range map[string]string{"json": `"from": "old"`, "yaml": "  - from: old\n"} {
		var out, errors strings.Builder
		code := run(t.Context(), []string{"virgate", "rollout", "--kubeconfig", kubeconfig, "status", "-o", output}, os.LookupEnv, &out, &errors)
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
		"resume r2":                           "no node knows of a rollout r2",
		"undo a b":                            "takes the name of one rollout",
		"forget":                              "needs the name of one rollout",
		"status r2":                           "no node knows of a rollout r2",
		"status -o xml":                       `--output "xml" is none of`,
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"virgate", "rollout", "--kubeconfig", kubeconfig}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if code == 0 || !strings.Contains(errors.String(), want) {
			t.Errorf("%s: exit code %d, %q, want %q", words, code, errors.String(), want)
		}
	}
}
