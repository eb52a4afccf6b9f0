package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/test/await"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	clusterview "github.com/virgate/virgate/internal/cluster"
)

// TestClusterView runs the part "cluster" of TestAPI with the requested number of nodes, and 30 pods on
// each: the figures of docs/internals/scale.md.
func TestClusterView(t *testing.T) {
	nodes, err := strconv.Atoi(os.Getenv(scaleVariable))
	if err != nil {
		t.Skipf("set %s to a number of nodes: TestAPI has 100", scaleVariable)
	}
	s := cluster(t)
	s.reset()
	playClusterView(t, s, nodes, 30)
}

func testClusterView(t *testing.T, s *server) { playClusterView(t, s, 100, 3) }

// playClusterView runs Virgate's command, as a process, on a cluster whose nodes have the status page of a
// running Virgate. It does so twice: the second time one in twenty is dead or does not answer.
func playClusterView(t *testing.T, s *server, count, podsEach int) {
	binary, plugin, kubeconfig := buildProgram(t, "virgate"), buildProgram(t, "kubectl-virgate"), s.kubeconfig(t)
	// Nodes of three kinds, one after the other.
	kinds := []nodeKind{{"sim:dgx-a100", 8}, {"sim:t4x2", 2}, {"sim:h100x2", 2}}
	pages := make([]map[string]any, len(kinds))
	for i, kind := range kinds {
		pages[i] = statusPage(t, binary, kind)
	}
	s.makeNodes(t, count, "a")
	ready := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True"}],"capacity":{"nvidia.com/gpu":"32"},"allocatable":{"nvidia.com/gpu":"32"},` + forwardPorts(t) + `}}`)
	pods := s.admin.CoreV1().Pods("default")
	eachNode(t, count, func(name string) error {
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, ready, metav1.PatchOptions{}, "status")
		for i := 0; i < podsEach && err == nil; i++ {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("work-%s-%d", name, i)}, Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{Name: "main", Image: "i"}}}}
			if i%3 == 0 { // The others have no GPU.
				pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
			}
			_, err = pods.Create(t.Context(), pod, metav1.CreateOptions{})
		}
		return err
	})
	t.Cleanup(func() {
		eachNode(t, count, func(name string) error {
			return pods.DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + name})
		})
	})
	answers := make(map[string]*statusServer, count)
	for i := range count {
		answers[nodeName(i)] = serveStatus(t, nodeName(i), pages[i%len(pages)])
	}
	eachNode(t, count, func(name string) error {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "virgate-" + name, Labels: map[string]string{"app.kubernetes.io/name": "virgate"}},
			Spec: corev1.PodSpec{NodeName: name, Containers: []corev1.Container{{
				Name: "virgate", Image: "i", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: answers[name].port}},
			}}},
		}
		if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			return err
		}
		running := []byte(`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`)
		_, err := pods.Patch(t.Context(), pod.Name, types.StrategicMergePatchType, running, metav1.PatchOptions{}, "status")
		return err
	})

	shown := func(what, table string) (view clusterView, said string) {
		command := exec.Command(plugin, table, "-o", "json", "-v", "--virgate-namespace", "default", "--kubeconfig", kubeconfig,
			"--status-timeout", "20s", "--all-timeout", "5m")
		var output, told bytes.Buffer
		command.Stdout, command.Stderr = &output, &told
		began := time.Now()
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		resident := peakMemory(command.Process.Pid)
		if err := command.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, told.String())
		}
		t.Logf("%s, %s: %d nodes in %s, at most %d MiB resident; %s", table, what, count, since(began), <-resident, told.String())
		if err := json.Unmarshal(output.Bytes(), &view); err != nil {
			t.Fatal(err)
		}
		return view, told.String()
	}
	// One list for each page of 500 objects, one question about the right to status pages, and one request
	// for each status page.
	lists := (count+499)/500 + (count*(podsEach+1)+499)/500 + 1
	all, requests := shown("all answer", "gpus")
	if want := fmt.Sprintf("%d requests for lists and rights, %d for status pages", lists, count); !strings.HasPrefix(requests, want) {
		t.Errorf("it says %q, want %q", requests, want)
	}
	has := map[string]int{}
	for _, gpu := range all.GPUs {
		has[gpu.Node]++
	}
	for i := range count {
		if name, want := nodeName(i), kinds[i%len(kinds)].gpus; has[name] != want {
			t.Fatalf("%s has %d GPUs, want %d", name, has[name], want)
		}
	}
	if len(all.Notes) > 0 {
		t.Fatal(all.Notes)
	}

	lost := map[string]bool{}
	for i := range count {
		switch name := nodeName(i); {
		case i%40 == 3:
			answers[name].silent()
			lost[name] = true
		case i%40 == 23:
			answers[name].die()
			lost[name] = true
		}
	}
	some, _ := shown("one in twenty is dead or silent", "gpus")
	note := fmt.Sprintf("the status page of %d nodes was not read, so only GPUs that a pod holds are known there: ", len(lost))
	if len(some.Notes) != 1 || !strings.HasPrefix(some.Notes[0], note) {
		t.Errorf("notes %q, want one that begins %q", some.Notes, note)
	}
	nodes, _ := shown("one in twenty is dead or silent", "nodes")
	held := int64((podsEach + 2) / 3)
	for _, node := range nodes.Nodes {
		if (node.Unread != "") != lost[node.Name] {
			t.Errorf("%s is lost: %v; it says %q", node.Name, lost[node.Name], node.Unread)
		}
		want := []clusterview.ResourceView{{Name: "nvidia.com/gpu", Allocatable: 32, Held: new(held), Free: new(32 - held)}}
		if diff := cmp.Diff(want, node.Resources); diff != "" {
			t.Errorf("%s (-want +got):\n%s", node.Name, diff)
		}
	}
	tenants, _ := shown("one in twenty is dead or silent", "tenants")
	if len(nodes.Nodes) != count || len(tenants.Tenants) != 1 || tenants.Tenants[0].Resources["nvidia.com/gpu"] != held*int64(count) {
		t.Errorf("%d nodes, want %d; tenants %+v", len(nodes.Nodes), count, tenants.Tenants)
	}
	of := func(view clusterView) map[string][]clusterview.GPUView {
		byNode := map[string][]clusterview.GPUView{}
		for _, gpu := range view.GPUs {
			if !lost[gpu.Node] {
				byNode[gpu.Node] = append(byNode[gpu.Node], gpu)
			}
		}
		return byNode
	}
	if diff := cmp.Diff(of(all), of(some)); diff != "" {
		t.Errorf("other nodes look otherwise (-all answer +some do not):\n%s", diff)
	}
	if len(of(some)) != count-len(lost) {
		t.Errorf("%d nodes are there, want %d", len(of(some)), count-len(lost))
	}
}

// clusterView is one of the tables that kubectl virgate prints.
type clusterView struct {
	Nodes   []clusterview.NodeView   `json:"nodes"`
	GPUs    []clusterview.GPUView    `json:"gpus"`
	Tenants []clusterview.TenantView `json:"tenants"`
	Notes   []string                 `json:"notes"`
}

// peakMemory sends the most memory that a process had, in MiB, when it has ended. The figure of wait4 would
// be at least the memory of this process, which contains the API server.
func peakMemory(pid int) <-chan int {
	peak := make(chan int, 1)
	go func() {
		most := 0
		for tick := time.Tick(5 * time.Millisecond); ; {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			_, after, found := strings.Cut(string(status), "VmHWM:")
			if err != nil || !found { // A zombie has no memory.
				peak <- most
				return
			}
			if kilobytes, err := strconv.Atoi(strings.Fields(after)[0]); err == nil {
				most = max(most, kilobytes>>10)
			}
			<-tick
		}
	}()
	return peak
}

// nodeKind is a simulated node, and how many GPUs it has.
type nodeKind struct {
	name string
	gpus int
}

// outsideAddress is an address of this machine: an API server connects to no pod on loopback.
func outsideAddress(t *testing.T) string {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range addresses {
		if ip, is := address.(*net.IPNet); is && ip.IP.IsGlobalUnicast() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	t.Skip("this machine has no address but loopback's, and the API server connects to no pod there")
	return ""
}

// statusPage is the status of a Virgate that runs on a simulated node.
func statusPage(t *testing.T, binary string, kind nodeKind) map[string]any {
	t.Helper()
	dir, address := t.TempDir(), "127.0.0.1:"+strconv.Itoa(freePort(t))
	command := exec.Command(binary, "run", "--node", kind.name, "--device-plugin-dir", dir, "--pod-resources-socket", dir+"/none", "--control-socket", "", "--listen", address)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	}()
	var page map[string]any
	await.True(t, "a status page with GPUs", func() bool {
		answer, err := http.Get("http://" + address + "/api/v1/status")
		if err != nil {
			return false
		}
		defer func() { _ = answer.Body.Close() }()
		page = nil
		gpus := func() []any { list, _ := page["gpus"].([]any); return list }
		return json.NewDecoder(answer.Body).Decode(&page) == nil && len(gpus()) == kind.gpus
	})
	return page
}

// statusServer answers for a node's Virgate.
type statusServer struct {
	port   int32
	server *http.Server
	// hangs is true if it answers no request.
	hangs atomic.Bool
}

func serveStatus(t *testing.T, node string, page map[string]any) *statusServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	page["node"] = node
	text, err := json.Marshal(page)
	if err != nil {
		t.Fatal(err)
	}
	s := &statusServer{port: int32(listener.Addr().(*net.TCPAddr).Port)}
	s.server = &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.hangs.Load() {
			<-r.Context().Done()
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.Copy(w, bytes.NewReader(text))
	})}
	go func() { _ = s.server.Serve(listener) }() // It ends with the test.
	t.Cleanup(s.die)
	return s
}

// silent stops it from answering.
func (s *statusServer) silent() { s.hangs.Store(true) }

// die closes it.
func (s *statusServer) die() { _ = s.server.Close() }
