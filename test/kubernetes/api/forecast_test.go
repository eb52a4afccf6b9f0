package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/rollout"
	"github.com/virgate/virgate/internal/simkubelet"
)

// testForecast runs Virgate's command, as a process, to ask whole programs on simulated nodes what a
// rollout of profiles and of MIG layouts would change. It writes nothing.
func testForecast(t *testing.T, s *server) {
	const shared, small, big = "nvidia.com/gpu.shared", "nvidia.com/mig-1g.6gb", "nvidia.com/mig-2g.12gb"
	c := &commandLine{t: t, binary: buildProgram(t, "kubectl-virgate"), kubeconfig: s.kubeconfig(t)}
	address := outsideAddress(t)
	ready := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True"}],` + forwardPorts(t) + `}}`)
	s.setProfiles(map[string]string{
		"a":   document("4"),
		"b":   "version: v1\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 8}]}}\n",
		"cut": "flags: {migStrategy: mixed}\nmig: {manage: true, config: all-2g.12gb}\n",
	})
	start := func(name, profile, gpus string) *program {
		port := freePort(t)
		s.setNode(name, profile)
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, ready, metav1.PatchOptions{}, "status")
		s.must(err)
		p := s.run(t, name, gpus, func(o *daemon.Options) { o.Listen = ":" + strconv.Itoa(port) })
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "virgate-" + name, Labels: map[string]string{"app.kubernetes.io/name": "virgate"}},
			Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{
				Name: "virgate", Image: "i", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: int32(port)}},
			}}},
		}
		pods := s.admin.CoreV1().Pods("default")
		_, err = pods.Create(t.Context(), pod, metav1.CreateOptions{})
		s.must(err)
		t.Cleanup(func() {
			s.must(pods.Delete(s.t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
		})
		running := fmt.Appendf(nil, `{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}],"conditions":[{"type":"Ready","status":"True"}]}}`, address, address)
		_, err = pods.Patch(t.Context(), pod.Name, types.StrategicMergePatchType, running, metav1.PatchOptions{}, "status")
		s.must(err)
		return p
	}
	programs := map[string]*program{}
	for i := range 4 {
		name := fmt.Sprint("gpu-", i)
		programs[name] = start(name, "a", "dgx-a100")
	}
	programs["cut-0"] = start("cut-0", "cut", "a30x2+all-2g.12gb")
	hold := func(node, pod, resource string) {
		_, err := programs[node].kubelet.AddPod(t.Context(), simkubelet.Pod{
			Namespace: "research", Name: pod, Containers: []simkubelet.Container{{Name: "c", Requests: map[string]int{resource: 1}}},
		})
		s.must(err)
	}
	for name, p := range programs {
		s.await("the profile of "+name, func() bool {
			return s.node(name).Labels[nodestatus.StateLabel] == "applied" && (p.offers("nvidia.com/gpu", 32) || p.offers(big, 4))
		})
	}
	hold("gpu-1", "train-0", "nvidia.com/gpu")
	hold("cut-0", "notebook-0", big)
	state := func() map[string]string {
		all := map[string]string{}
		for name := range programs {
			all[name] = fmt.Sprint(s.node(name).Labels, slices.Sorted(maps.Keys(s.node(name).Annotations)))
		}
		return all
	}
	notFromOutside(t, s, "virgate-cut-0")
	before := state()
	// plan repeats the command while a node does not answer in time, or the kubelet has not listed a pod
	// yet.
	plan := func(code, waiting int, arguments ...string) (f rollout.Forecast) {
		t.Helper()
		arguments = append([]string{"start"}, append(arguments, "--dry-run", "--virgate-namespace", "default", "-o", "json")...)
		s.await("what all nodes foresee", func() bool {
			f = rollout.Forecast{}
			got, output := c.runs(arguments...)
			unnamed := func(u nodereport.BusyUnit) bool { return len(u.Pods) == 0 }
			busy := 0
			return json.Unmarshal([]byte(output), &f) == nil && !slices.ContainsFunc(f.Nodes, func(n rollout.NodeForecast) bool {
				busy += len(n.Busy)
				return n.Unknown != "" || slices.ContainsFunc(n.Busy, unnamed)
			}) && got == code && busy == waiting
		})
		return f
	}
	expect := func(what string, f rollout.Forecast, want ...rollout.Capacity) {
		t.Helper()
		if diff := cmp.Diff(want, f.Resources); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	holders := func(f rollout.Forecast) (pods []string) {
		for _, n := range f.Nodes {
			for _, u := range n.Busy {
				pods = append(pods, n.Name+" "+strings.Join(u.Pods, " "))
			}
		}
		return pods
	}
	f := plan(0, 1, "b", "-l", label+"=a", "--max-unavailable", "1")
	if got := holders(f); !slices.Equal(got, []string{"gpu-1 research/train-0"}) {
		t.Errorf("holders %q", got)
	}
	expect("b", f, rollout.Capacity{Name: "nvidia.com/gpu", Before: 128}, rollout.Capacity{Name: shared, After: 256, Waiting: 8})

	f = plan(0, 1, "all-1g.6gb", "--mig-config", "-l", label+"=cut")
	if got := holders(f); !slices.Equal(got, []string{"cut-0 research/notebook-0"}) {
		t.Errorf("holders %q", got)
	}
	expect("a layout", f, rollout.Capacity{Name: small, After: 8, Waiting: 2}, rollout.Capacity{Name: big, Before: 4})

	f = plan(1, 0, "none", "-l", label+"=a")
	if got := len(f.Unfit()); got != 4 || !strings.Contains(f.Nodes[0].Unfit[0], `names "none", which does not exist: the profiles are a, b, cut`) {
		t.Errorf("%+v", f)
	}
	expect("none", f, rollout.Capacity{Name: "nvidia.com/gpu", Before: 128, Lowest: 128, After: 128})
	f = plan(1, 1, "all-1g.6gb", "--mig-config", "-l", configsource.MIGLabel+"!=x")
	if got := f.Unfit(); len(got) != 4 || !strings.Contains(got[0].Unfit[0], "mig.manage") {
		t.Errorf("%+v", got)
	}
	if output := c.run(0, "start", "b", "-l", label+"=a", "--dry-run", "--virgate-namespace", "default"); !strings.HasPrefix(output, "4 nodes to b, 1 at once; nothing was changed\n") {
		t.Errorf("%q", output)
	}
	if diff := cmp.Diff(before, state()); diff != "" {
		t.Errorf("something was written (-before +after):\n%s", diff)
	}
}

// notFromOutside checks that a request by the pod's address, as through the API server's proxy, gets
// metrics and no page.
func notFromOutside(t *testing.T, s *server, pod string) {
	t.Helper()
	got, err := s.admin.CoreV1().Pods("default").Get(t.Context(), pod, metav1.GetOptions{})
	s.must(err)
	name := fmt.Sprint(pod, ":", got.Spec.Containers[0].Ports[0].ContainerPort)
	for path, want := range map[string]int{
		"metrics":          http.StatusOK,
		"healthz":          http.StatusOK,
		"api/v1/status":    http.StatusNotFound,
		"api/v1/forecast":  http.StatusNotFound,
		"status":           http.StatusNotFound,
		"plan":             http.StatusNotFound,
		"debug/pprof/heap": http.StatusNotFound,
	} {
		var code int
		err := s.admin.CoreV1().RESTClient().Get().Namespace("default").Resource("pods").Name(name).SubResource("proxy").
			Suffix(path).Do(t.Context()).StatusCode(&code).Error()
		if apierrors.IsNotFound(err) { // Such an error has no code.
			code = http.StatusNotFound
		}
		if code != want {
			t.Errorf("%s through the API server's proxy: %d, want %d: %v", path, code, want, err)
		}
	}
}
