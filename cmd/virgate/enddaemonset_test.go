package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestEndDaemonSet deletes the DaemonSet, waits for its pods, and succeeds whatever it finds.
func TestEndDaemonSet(t *testing.T) {
	t.Parallel()
	const (
		daemonSets = "/apis/apps/v1/namespaces/gpu/daemonsets/virgate"
		ofHelm     = `{"metadata": {"uid": "u", "annotations": {"meta.helm.sh/release-name": "virgate"}}}`
		none       = `{"items": []}`
		two        = `{"items": [` +
			`{"metadata": {"name": "b", "ownerReferences": [{"kind": "DaemonSet", "name": "virgate"}]}, "spec": {"nodeName": "n2"}},` +
			`{"metadata": {"name": "a", "ownerReferences": [{"kind": "DaemonSet", "name": "virgate"}]}, "spec": {"nodeName": "n1"}},` +
			`{"metadata": {"name": "c", "ownerReferences": [{"kind": "DaemonSet", "name": "virgate"}]}, "spec": {}},` +
			`{"metadata": {"name": "d", "ownerReferences": [{"kind": "DaemonSet", "name": "other"}]}, "spec": {"nodeName": "n3"}},` +
			`{"metadata": {"name": "e", "ownerReferences": [{"kind": "Job", "name": "virgate"}]}, "spec": {"nodeName": "n3"}}]}`
		get, remove, list = "GET " + daemonSets, "DELETE " + daemonSets, "GET /api/v1/namespaces/gpu/pods"
	)
	for _, test := range []struct {
		name, wait string
		set        string
		status     int      // of all answers but 404 without a set
		pods       []string // one list after another
		asked      []string
		said       string
	}{
		{
			name:  "its pods end",
			wait:  "1h",
			set:   ofHelm,
			pods:  []string{two, two, none},
			asked: []string{get, remove, list, get, list, get, list},
			said:  "its pods have ended\n",
		},
		{
			name:  "gone already",
			wait:  "1h",
			pods:  []string{none},
			asked: []string{get, list},
			said:  "its pods have ended\n",
		},
		{
			name:  "two pods stay",
			wait:  "1ms",
			set:   ofHelm,
			pods:  []string{two},
			asked: []string{get, remove, list},
			said: "after 1ms its pods have not ended on n1, n2; " +
				"where the condition GPUSharingReady stays as it is, virgate uninstall takes it away\n",
		},
		{
			name:  "applied without Helm",
			wait:  "1h",
			set:   `{"metadata": {"uid": "u"}}`,
			asked: []string{get},
			said:  "it stays, as Helm did not install it\n",
		},
		{
			name:   "no right",
			wait:   "1ms",
			set:    ofHelm,
			status: 403,
			asked:  []string{get},
			said:   "its pods may not have ended: delete DaemonSet gpu/virgate: ",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var asked []string
			set, pods := test.set, test.pods
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				request := r.Method + " " + r.URL.Path
				asked = append(asked, request)
				body, _ := io.ReadAll(r.Body)
				w.Header().Set("Content-Type", "application/json")
				switch {
				case test.status != 0:
					w.WriteHeader(test.status)
				case request == list:
					_, _ = io.WriteString(w, pods[0])
					pods = pods[1:]
				case set == "":
					w.WriteHeader(http.StatusNotFound)
				case request == get:
					_, _ = io.WriteString(w, set)
				case request == remove && strings.Contains(string(body), `"preconditions":{"uid":"u"}`):
					set = ""
					_, _ = io.WriteString(w, "{}")
				default:
					t.Errorf("%s %s", request, body)
				}
			}))
			defer server.Close()
			code, stdout := endVirgate(t, "--wait="+test.wait, "--kubeconfig="+kubeconfigOf(t, server.URL))
			if code != 0 || !strings.HasPrefix(stdout, "DaemonSet gpu/virgate: "+test.said) {
				t.Errorf("exit code %d, said:\n%s", code, stdout)
			}
			if diff := cmp.Diff(test.asked, asked); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

// TestEndDaemonSetWithoutAnAPI succeeds even if the API server does not answer.
func TestEndDaemonSetWithoutAnAPI(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	server.Close()
	for _, kubeconfig := range []string{kubeconfigOf(t, server.URL), filepath.Join(t.TempDir(), "none")} {
		code, stdout := endVirgate(t, "--wait=1ms", "--kubeconfig="+kubeconfig)
		if code != 0 || !strings.Contains(stdout, "its pods may not have ended: ") {
			t.Errorf("exit code %d, said:\n%s", code, stdout)
		}
	}
	if code, stdout := endVirgate(t, "--daemonset=virgate"); code != 2 {
		t.Errorf("exit code %d for a wrong name, said:\n%s", code, stdout)
	}
}

func endVirgate(t *testing.T, args ...string) (code int, stdout string) {
	t.Helper()
	var out, errors strings.Builder
	args = slices.Concat([]string{"virgate", "end-daemonset", "--daemonset=gpu/virgate"}, args)
	code = run(t.Context(), args, func(string) (string, bool) { return "", false }, &out, &errors)
	return code, fmt.Sprint(out.String(), errors.String())
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
