package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/rollout"
	"github.com/virgate/virgate/test/portforward"
)

// forecastAPI is an API server whose nodes have these forecasts. A nil one means an older Virgate, and the last
// node has none. Writes are refused.
func forecastAPI(t *testing.T, allowed bool, forecasts ...*nodereport.Forecast) (kubeconfig string) {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(pattern, text string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(text))
		})
	}
	var nodes, pods []string
	for i, f := range forecasts {
		name := fmt.Sprint("n", i+1)
		nodes = append(nodes, `{"metadata":{"name":"`+name+`","labels":{"nvidia.com/device-plugin.config":"old","nvidia.com/device-plugin.config.state":"applied"}},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
		if i == len(forecasts)-1 {
			continue
		}
		pods = append(pods, `{"metadata":{"namespace":"gpu","name":"virgate-`+name+`","labels":{"app.kubernetes.io/name":"virgate"}},"spec":{"nodeName":"`+name+`","containers":[{"ports":[{"name":"http","containerPort":9400}]}]},
			"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
		if f != nil && f.Node == "" {
			f.Node = name
		}
		text, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		asked := func(w http.ResponseWriter, r *http.Request) {
			if f == nil {
				http.NotFound(w, r)
				return
			}
			query := r.URL.Query()
			if r.URL.Path != "/api/v1/forecast" || query.Get("label") != "nvidia.com/device-plugin.config" || query.Get("value") != "new" {
				t.Errorf("asked %v", r.URL)
			}
			_, _ = w.Write(text)
		}
		mux.HandleFunc("GET /api/v1/namespaces/gpu/pods/virgate-"+name+"/portforward", func(w http.ResponseWriter, r *http.Request) {
			_ = portforward.Serve(w, r, func(string) (net.Conn, error) { return portforward.Pipe(http.HandlerFunc(asked)), nil })
		})
	}
	answer("GET /api/v1/namespaces/{namespace}/configmaps", `{"kind":"ConfigMapList","apiVersion":"v1","items":[]}`)
	answer("GET /api/v1/nodes", `{"kind":"NodeList","apiVersion":"v1","items":[`+strings.Join(nodes, ",")+`]}`)
	answer("GET /api/v1/namespaces/gpu/pods", `{"kind":"PodList","apiVersion":"v1","items":[`+strings.Join(pods, ",")+`]}`)
	answer("POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", fmt.Sprintf(`{"kind":"SelfSubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":%t}}`, allowed))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPatch {
			t.Errorf("%s is written", r.URL.Path)
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return kubeconfigOf(t, server.URL)
}

func TestRolloutDryRun(t *testing.T) {
	gpus := func(before, lowest, then, after int) nodereport.ForecastResource {
		return nodereport.ForecastResource{Name: "nvidia.com/gpu", Before: before, Lowest: lowest, Then: then, After: after}
	}
	shared := func(then, after int) nodereport.ForecastResource {
		return nodereport.ForecastResource{Name: "nvidia.com/gpu.shared", Then: then, After: after}
	}
	busy := []nodereport.BusyUnit{
		{Unit: "GPU-1", Index: "0", Pods: []string{"research/train-0", "research/train-1"}}, {Unit: "GPU-2", Index: "1", Pods: []string{}},
		{Unit: "MIG-3", Index: "2:0", Pods: []string{}, Reason: "in use by a process"},
	}
	fits := []*nodereport.Forecast{
		{Resources: []nodereport.ForecastResource{gpus(8, 0, 0, 0), shared(32, 32)}, Warnings: []string{"s: no unit"}},
		{Resources: []nodereport.ForecastResource{gpus(8, 0, 0, 0), shared(20, 32)}, Busy: busy, Warnings: []string{"s: no unit"}, Layouts: []nodereport.ForecastLayout{{Index: 1, Kept: 1, Destroyed: 2, Made: 3}}},
		nil,
		{Resources: []nodereport.ForecastResource{gpus(8, 0, 0, 0), shared(32, 32)}},
		nil,
	}
	unfit := append(fits[:3:3], &nodereport.Forecast{Resources: []nodereport.ForecastResource{gpus(8, 8, 8, 8)}, Unfit: []string{"ConfigMap gpu/profiles: the node label names \"new\"\x1b[31m, which does not exist: the profiles are old"}}, nil)
	const counted = "5 nodes to new, 2 at once; nothing was changed\n\n"
	const told = "\n" +
		"MIG partitions of 1 GPUs: 1 kept, 2 destroyed, 3 made\n\n" +
		"waiting for pods that keep a GPU as it is, 1 of 5 nodes; the rollout stops at its --timeout if they do not end:\n" +
		"NODE  WAVE  GPU  PODS\n" +
		"n2    1     0    research/train-0 research/train-1\n" +
		"n2    1     1    a pod that the kubelet does not name\n" +
		"n2    1     2:0  in use by a process\n"
	const unknown = "\n" +
		"not known and not counted, 2 of 5 nodes:\n" +
		"  n3: its Virgate is older and does not say, or has just ended\n" +
		"  n5: no pod of Virgate is ready there in the namespace gpu\n"
	const warnings = "\nwith warnings, 2 of 5 nodes:\n  n1, n2: s: no unit\n"
	for _, test := range []struct {
		name      string
		forecasts []*nodereport.Forecast
		code      int
		want      string
	}{
		{"fits", fits, 0, counted +
			"RESOURCE               BEFORE  LOWEST  AFTER  WAITS FOR PODS\n" +
			"nvidia.com/gpu         24      0       0      0\n" +
			"nvidia.com/gpu.shared  0       0       96     12\n" + told + unknown + warnings},
		{"does not fit", unfit, 1, counted +
			"RESOURCE               BEFORE  LOWEST  AFTER  WAITS FOR PODS\n" +
			"nvidia.com/gpu         24      8       8      0\n" +
			"nvidia.com/gpu.shared  0       0       64     12\n" + told + "\n" +
			"refusing, or left with nothing to offer, 1 of 5 nodes:\n" +
			"  n4: ConfigMap gpu/profiles: the node label names \"new\"\ufffd[31m, which does not exist: the profiles are old\n" + unknown + warnings},
	} {
		t.Run(test.name, func(t *testing.T) {
			words := "rollout start new -l nvidia.com/device-plugin.config=old --max-unavailable 2 --dry-run --virgate-namespace gpu --kubeconfig " + forecastAPI(t, true, test.forecasts...)
			var out, errors strings.Builder
			code := run(t.Context(), append([]string{"virgate"}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
			if diff := cmp.Diff(test.want, out.String()); diff != "" || code != test.code || errors.String() != "" {
				t.Errorf("exit code %d, %s (-want +got):\n%s", code, errors.String(), diff)
			}
			out.Reset()
			code = run(t.Context(), append([]string{"virgate"}, strings.Fields(words+" -o json")...), os.LookupEnv, &out, &errors)
			var f rollout.Forecast
			if err := json.Unmarshal([]byte(out.String()), &f); err != nil || code != test.code || len(f.Nodes) != 5 || f.Nodes[1].Busy[0].Pods[1] != "research/train-1" || f.Nodes[2].Unknown == "" {
				t.Errorf("-o json: exit code %d, %v\n%s%s", code, err, out.String(), errors.String())
			}
		})
	}
}

func TestRolloutDryRunRefuses(t *testing.T) {
	kubeconfig := forecastAPI(t, false, &nodereport.Forecast{}, nil)
	for words, want := range map[string]string{
		"-l nvidia.com/device-plugin.config --dry-run":                         "list Virgate's pods in the namespace virgate: ",
		"-l nvidia.com/device-plugin.config --dry-run --virgate-namespace gpu": "you may not get and create pods/portforward in the namespace gpu",
		"-l nvidia.com/device-plugin.config --dry-run -o xml":                  `--output "xml" is none of table, wide, json, yaml, name`,
		"-l nvidia.com/device-plugin.config -o json":                           "--output is for --dry-run",
		"-l nvidia.com/device-plugin.config --virgate-namespace gpu":           "keep the rollout in the namespace gpu: ",
		"-l none --dry-run": "no node has the labels none",
		"-l nvidia.com/device-plugin.config --dry-run --label my/label --timeout 0s": "--timeout must be 1s at least",
	} {
		var out, errors strings.Builder
		code := run(t.Context(), append([]string{"kubectl-virgate", "rollout", "--kubeconfig", kubeconfig, "start", "new"}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
		if code == 0 || !strings.Contains(errors.String(), want) || out.String() != "" {
			t.Errorf("%s: exit code %d, %q, want %q", words, code, errors.String(), want)
		}
	}
}

// TestRolloutDryRunOfAnotherNode checks that an answer from another node is ignored.
func TestRolloutDryRunOfAnotherNode(t *testing.T) {
	kubeconfig := forecastAPI(t, true, &nodereport.Forecast{Node: "other", Resources: []nodereport.ForecastResource{{Name: "nvidia.com/gpu", Before: 8}}}, nil)
	var out, errors strings.Builder
	words := "rollout start new -l nvidia.com/device-plugin.config --dry-run --virgate-namespace gpu --kubeconfig " + kubeconfig
	code := run(t.Context(), append([]string{"virgate"}, strings.Fields(words)...), os.LookupEnv, &out, &errors)
	if code != 0 || !strings.Contains(out.String(), "\n  n1: the answer is of node \"other\"\n") || strings.Contains(out.String(), "RESOURCE") {
		t.Errorf("exit code %d\n%s%s", code, out.String(), errors.String())
	}
}
