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

// clusterAPI is an API server with one node and two pods. Status pages cannot be read.
func clusterAPI(t *testing.T) (kubeconfig string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Has("watch") { // Nothing changes.
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		answer := map[string]string{
			"/api/v1/nodes": `{"kind":"NodeList","apiVersion":"v1","items":[{"metadata":{"name":"n1","labels":{"nvidia.com/device-plugin.config":"b","nvidia.com/device-plugin.config.state":"switching","nvidia.com/gpu.count":"2","nvidia.com/gpu.product":"T4"},
				"annotations":{"virgate.github.io/profile":"a","virgate.github.io/generation":"0123"}},
				"status":{"capacity":{"nvidia.com/gpu":"8","cpu":"4"},"allocatable":{"nvidia.com/gpu":"6"}}}]}`,
			"/api/v1/pods": `{"kind":"PodList","apiVersion":"v1","items":[
				{"metadata":{"namespace":"x","name":"p"},"spec":{"nodeName":"n1","containers":[{"name":"c","resources":{"requests":{"nvidia.com/gpu":"1"}}}]},
				 "status":{"containerStatuses":[{"name":"c","allocatedResourcesStatus":[{"name":"nvidia.com/gpu","resources":[{"resourceID":"GPU-1::0","health":"Healthy"}]}]}]}},
				{"metadata":{"namespace":"y","name":"q\u001b[31m"},"spec":{"nodeName":"n1","containers":[{"name":"c","resources":{"requests":{"nvidia.com/gpu":"1"}}}]},
				 "status":{"containerStatuses":[{"name":"c","allocatedResourcesStatus":[{"name":"nvidia.com/gpu","resources":[{"resourceID":"GPU-1::1","health":"Unhealthy"}]}]}]}}]}`,
		}[r.URL.Path]
		if answer == "" {
			http.NotFound(w, r)
			return
		}
		if strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList") {
			answer = strings.Replace(answer, `"kind":"NodeList","apiVersion":"v1"`, `"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1"`, 1)
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(server.Close)
	return kubeconfigOf(t, server.URL)
}

// kubeconfigOf is a kubeconfig for that server.
func kubeconfigOf(t *testing.T, url string) (kubeconfig string) {
	t.Helper()
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '" + url + "'}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

func TestCluster(t *testing.T) {
	kubeconfig := clusterAPI(t)
	const nodes = "" +
		"NODE  WANTED  APPLIED  STATE      GPUS  RESOURCE        ALLOCATABLE  HELD  FREE  UNHEALTHY  LAYOUT  NOTE\n" +
		"n1    b       a        switching  2     nvidia.com/gpu  6            2     4     2          -       status not read: no pod of Virgate is ready there in the namespace virgate\n"
	for _, test := range []struct{ name, words, want string }{
		{"all", "", nodes},
		{"nodes", "nodes", nodes},
		{"one node", "nodes n1", nodes},
		{"flags first", "-o table gpus -o name", "GPU-1\n"},
		{"as it was called", "cluster", nodes},
		{"tenants as they were called", "cluster -o name tenants", "namespace/x\nnamespace/y\n"},
		{"gpus", "gpus", "" +
			"NODE  GPU    MODEL  RESOURCE        SHARING  HELD  USE  MEMORY  HEALTH     HOLDERS\n" +
			"n1    GPU-1  T4     nvidia.com/gpu  shared   2     -    -       Unhealthy  x/p y/q\ufffd[31m\n"},
		{"tenants", "tenants", "" +
			"NAMESPACE  PODS  WAITING  GPUS  RESOURCES         SHARES WITH\n" +
			"x          1     0        1     nvidia.com/gpu=1  y (1)\n" +
			"y          1     0        1     nvidia.com/gpu=1  x (1)\n"},
		{"names", "-o name", "node/n1\n"},
		{"names of namespaces", "tenants -o name", "namespace/x\nnamespace/y\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out, errors strings.Builder
			args := append([]string{"/home/me/bin/kubectl-virgate"}, strings.Fields(test.words)...)
			if code := run(t.Context(), append(args, "--kubeconfig", kubeconfig), os.LookupEnv, &out, &errors); code != 0 {
				t.Fatalf("exit code %d: %s", code, errors.String())
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for output, want := range map[string]string{"json": `"free": 4`, "yaml": "\n    free: 4\n"} {
		var out, errors strings.Builder
		code := run(t.Context(), []string{"kubectl-virgate", "nodes", "-v", "-o", output, "--kubeconfig", kubeconfig}, os.LookupEnv, &out, &errors)
		if code != 0 || !strings.Contains(out.String(), want) || !strings.Contains(errors.String(), "2 requests for lists and rights, 0 for status pages") {
			t.Errorf("%s: %d\n%s%s", output, code, out.String(), errors.String())
		}
	}
}

func TestClusterRefuses(t *testing.T) {
	for words, want := range map[string]string{
		"-o xml": `--output "xml" is none of`, "--status-timeout -1s": "--status-timeout must not be less than 0", "--all-timeout 0s": "--all-timeout must be more than 0",
		"--domain a/b": "--domain: expected a domain", "--serve 8080": "--serve: expected an address such as 127.0.0.1:8080", "--serve :8080": "--serve: the page is for this machine alone", "--serve 10.0.0.1:8080": "--serve: the page is for this machine alone", "n1": `no command "n1"`, "--kubeconfig /none": "find the API server: ",
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"kubectl-virgate"}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if code == 0 || !strings.Contains(errors.String(), want) || out.String() != "" {
			t.Errorf("%s: exit code %d, %q, want %q", words, code, errors.String(), want)
		}
	}
}

// TestClusterWithoutNodes says why the table is empty.
func TestClusterWithoutNodes(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		kind := map[string]string{"/api/v1/nodes": "NodeList", "/api/v1/pods": "PodList"}[r.URL.Path]
		_, _ = w.Write([]byte(`{"kind":"` + kind + `","apiVersion":"v1","items":[]}`))
	}))
	t.Cleanup(server.Close)
	for words, want := range map[string]string{
		"nodes": "note: no node has a resource of nvidia.com or a report of Virgate\n", "gpus -l pool=x": "note: no node with GPUs has the labels pool=x\n",
	} {
		var out, errors strings.Builder
		args := append([]string{"kubectl-virgate"}, strings.Fields(words)...)
		if code := run(t.Context(), append(args, "--kubeconfig", kubeconfigOf(t, server.URL)), os.LookupEnv, &out, &errors); code != 0 || errors.String() != want {
			t.Errorf("%s: exit code %d, %q, want %q", words, code, errors.String(), want)
		}
	}
}

// TestClusterRules shows why each node has its profile, and the progress of each rule.
func TestClusterRules(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		node := func(name, profile, by, state string) string {
			return `{"metadata":{"name":"` + name + `","labels":{"nvidia.com/device-plugin.config.state":"` + state + `"},"annotations":{"virgate.github.io/profile":"` + profile +
				`","virgate.github.io/wanted":"` + profile + `","virgate.github.io/wanted-by":"` + by + `","virgate.github.io/rules":"0123"}}}`
		}
		switch r.URL.Path {
		case "/api/v1/nodes":
			_, _ = w.Write([]byte(`{"kind":"NodeList","apiVersion":"v1","items":[` + node("n1", "four", "rule 2 of ConfigMap gpu/p", "applied") + "," + node("n2", "two", "default: no rule of ConfigMap gpu/p matches", "pending") + `]}`))
		case "/api/v1/pods":
			_, _ = w.Write([]byte(`{"kind":"PodList","apiVersion":"v1","items":[]}`))
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	const want = "" +
		"NODE  WANTED  BY       APPLIED  STATE    GPUS  RESOURCE  ALLOCATABLE  HELD  FREE  UNHEALTHY  LAYOUT  NOTE\n" +
		"n1    four    rule 2   four     applied  ?     -         -            -     -     -          -       \n" +
		"n2    two     default  two      pending  ?     -         -            -     -     -          -       \n" +
		"\n" +
		"CHOSEN BY                                    PROFILE  NODES  APPLIED  REJECTED  DELAYED  LIST  WHY REJECTED\n" +
		"rule 2 of ConfigMap gpu/p                    four     1      1        0         0        0123  -\n" +
		"default: no rule of ConfigMap gpu/p matches  two      1      0        0         0        0123  -\n"
	var out, errors strings.Builder
	if code := run(t.Context(), []string{"kubectl-virgate", "nodes", "--status-timeout=0", "--kubeconfig", kubeconfigOf(t, server.URL)}, os.LookupEnv, &out, &errors); code != 0 {
		t.Fatalf("exit code %d: %s", code, errors.String())
	}
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestComplete checks the program through which kubectl completes its plugin's words.
func TestComplete(t *testing.T) {
	kubeconfig := clusterAPI(t)
	for line, want := range map[string]string{
		"no":                                     "nodes\tshows nodes with profile, state, resources and MIG layouts\n:4\n",
		"gpus -o y":                              "yaml\n:4\n",
		"nodes --kubeconfig " + kubeconfig + " ": "n1\n:4\n",
		"nodes --kubeconfig /none ":              ":4\n",
		"rollout start --mig":                    "--mig-config\tPROFILE is a MIG layout: set nvidia.com/mig.config\n:4\n",
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"/usr/bin/kubectl_complete-virgate"}, strings.Split(line, " ")...), os.LookupEnv, &out, &errors)
		if code != 0 || out.String() != want || errors.String() != "" {
			t.Errorf("%q: exit code %d, %q, want %q; %s", line, code, out.String(), want, errors.String())
		}
	}
}
