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

// TestClusterWhy checks the output for a pod that waits and for one that does not exist.
func TestClusterWhy(t *testing.T) {
	const waits = `{"metadata":{"namespace":"x","name":"p"},"spec":{"containers":[{"name":"c","resources":{"requests":{"nvidia.com/gpu":"1"}}}]},
		"status":{"conditions":[{"type":"PodScheduled","status":"False","message":"0/5 nodes\u001b[31m"}]}}`
	const holder = `{"metadata":{"namespace":"y","name":"h"},"spec":{"nodeName":"n1","containers":[{"name":"c","resources":{"requests":{"nvidia.com/gpu":"2"}}}]}}`
	const status = `"status":{"capacity":{"nvidia.com/gpu":"2"},"allocatable":{"nvidia.com/gpu":"2","pods":"9"}}`
	nodes := `{"metadata":{"name":"n1"},` + status + `}`
	for _, name := range []string{"n2", "n3", "n4", "n5"} {
		nodes += `,{"metadata":{"name":"` + name + `"},"spec":{"taints":[{"key":"t","effect":"NoSchedule"}]},` + status + `}`
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer := map[string]string{
			"/api/v1/nodes":               `{"kind":"NodeList","apiVersion":"v1","items":[` + nodes + `]}`,
			"/api/v1/pods":                `{"kind":"PodList","apiVersion":"v1","items":[` + waits + `,` + holder + `]}`,
			"/api/v1/namespaces/x/pods":   `{"kind":"PodList","apiVersion":"v1","items":[` + waits + `]}`,
			"/api/v1/namespaces/y/pods":   `{"kind":"PodList","apiVersion":"v1","items":[` + holder + `]}`,
			"/api/v1/namespaces/y/events": `{"kind":"EventList","apiVersion":"v1","items":[]}`,
			"/api/v1/namespaces/y/resourcequotas": `{"kind":"ResourceQuotaList","apiVersion":"v1","items":[{"metadata":{"namespace":"y","name":"q"},
				"status":{"hard":{"requests.nvidia.com/gpu":"2"},"used":{"requests.nvidia.com/gpu":"2"}}}]}`,
		}[r.URL.Path]
		if answer == "" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(server.Close)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	config := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '" + server.URL + "'}}]\ncontexts: [{name: c, context: {cluster: c, namespace: 'y'}}]\ncurrent-context: c\n"
	if err := os.WriteFile(kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	answer := func(first, second string) string {
		return "x/p waits for 1 nvidia.com/gpu: of 5 nodes none can give it now.\n" + first + second +
			"To help: node n1 has the most free, 0: 1 pod would have to end there, such as y/h.\n" +
			"To help: a toleration of the taint would open 4 nodes.\n" +
			"Note: the scheduler says: 0/5 nodes\ufffd[31m\n"
	}
	const held = "  1 node: 2 of 2 nvidia.com/gpu held, 0 free (n1)\n    held by y/h\n"
	for words, want := range map[string]string{
		"why x/p":             answer("  4 nodes: the taint t:NoSchedule is not tolerated (n2, n3, n4 and 1 more)\n", held),
		"why -n x p -o wide":  answer("  4 nodes: the taint t:NoSchedule is not tolerated (n2, n3, n4, n5)\n", held),
		"why h":               "y/h does not wait for a GPU: it has 2 nvidia.com/gpu of node n1, and waits there for another reason: the kubelet has not begun with its containers.\n",
		"why x/p -o name":     "pod/p\n",
		"why":                 "error 2: why takes one pod, got 0",
		"why a/b/c":           `error 2: why "a/b/c": expected POD or NAMESPACE/POD`,
		"why -n y gone":       "error 1: there is no pod y/gone; if something should have made it, the likely reason that it did not: the quota q has 2 of 2 nvidia.com/gpu used",
		"why x/p --watch":     "error 2: --watch: why looks once",
		"-l a=b why -n y any": "error 2: --selector: why looks at all nodes, as the scheduler does",
	} {
		var out, errors strings.Builder
		args := append([]string{"kubectl-virgate", "--kubeconfig", kubeconfig}, strings.Fields(words)...)
		code := run(t.Context(), args, os.LookupEnv, &out, &errors)
		if failed, wrong := strings.CutPrefix(want, "error "); wrong {
			if failed[0] != byte('0'+code) || !strings.Contains(errors.String(), failed[3:]) || out.String() != "" {
				t.Errorf("%s: exit code %d: %s", words, code, errors.String())
			}
			continue
		}
		if diff := cmp.Diff(want, out.String()); diff != "" || code != 0 {
			t.Errorf("%s: exit code %d: %s(-want +got):\n%s", words, code, errors.String(), diff)
		}
	}
	for output, want := range map[string]string{"json": `"cause": "held"`, "yaml": "\nstate: waiting\n"} {
		var out, errors strings.Builder
		code := run(t.Context(), []string{"kubectl-virgate", "--kubeconfig", kubeconfig, "why", "x/p", "-o", output, "-v"}, os.LookupEnv, &out, &errors)
		if code != 0 || !strings.Contains(out.String(), want) || !strings.HasPrefix(errors.String(), "3 requests, in ") {
			t.Errorf("%s: %d\n%s%s", output, code, out.String(), errors.String())
		}
	}
}
