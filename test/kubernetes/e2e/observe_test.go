package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/yaml"
)

// pluginSelector selects Virgate's pods.
const pluginSelector = "app.kubernetes.io/name=virgate"

// plugin returns Virgate's pod, the one that is to stay.
func (c *cluster) plugin(t *testing.T) *v1.Pod {
	t.Helper()
	var found *v1.Pod
	c.await(t, "one pod of Virgate", func() error {
		pods, err := c.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: pluginSelector})
		if err != nil {
			return err
		}
		var staying []*v1.Pod
		for i := range pods.Items {
			if pods.Items[i].DeletionTimestamp == nil && len(pods.Items[i].Status.ContainerStatuses) == len(pods.Items[i].Spec.Containers) {
				staying = append(staying, &pods.Items[i])
			}
		}
		if len(staying) != 1 {
			return fmt.Errorf("there are %d", len(staying))
		}
		found = staying[0]
		return nil
	})
	return found
}

// processes returns the process IDs in the pod's container of that name, or in its only one, as this machine
// numbers them: pods and test are in the same PID namespace.
func processes(t *testing.T, pod *v1.Pod, name ...string) []int {
	t.Helper()
	container := ""
	for _, status := range pod.Status.ContainerStatuses {
		if len(name) == 0 || status.Name == name[0] {
			_, container, _ = strings.Cut(status.ContainerID, "://")
		}
	}
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil || container == "" {
		t.Fatalf("pod %s has container %q, and the processes are not known: %v", pod.Name, container, err)
	}
	var found []int
	for _, file := range files {
		groups, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(groups), container) {
			continue // A process that has ended meanwhile is not in the container either.
		}
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, id)
	}
	return found
}

// fetch returns what the pod serves to other pods over HTTP at the path.
func fetch(pod *v1.Pod, path string) (string, error) {
	client := http.Client{Timeout: time.Minute}
	return fetchFrom(client, net.JoinHostPort(pod.Status.PodIP, "9400"), path)
}

// fetchInside returns what the pod serves on its loopback, where port-forwards arrive. It works without an
// API server.
func fetchInside(t *testing.T, pod *v1.Pod, path string) (string, error) {
	t.Helper()
	found := processes(t, pod, "virgate")
	if len(found) == 0 {
		return "", fmt.Errorf("pod %s has no process", pod.Name)
	}
	dial := func(_ context.Context, network, address string) (connection net.Conn, err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // The thread ends with this goroutine, and with it its network.
			var namespace *os.File
			if namespace, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", found[0])); err != nil {
				return
			}
			defer func() { _ = namespace.Close() }()
			if err = unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err == nil {
				connection, err = net.Dial(network, address)
			}
		}()
		<-done
		return connection, err
	}
	client := http.Client{
		Timeout:   time.Minute,
		Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true},
	}
	return fetchFrom(client, "127.0.0.1:9400", path)
}

func fetchFrom(client http.Client, address, path string) (string, error) {
	response, err := client.Get("http://" + address + path)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, response.Status, body)
	}
	return string(body), err
}

// awaitSeries waits until a series of that name, with at least these labels, has the value. Write a label
// as on /metrics: state="applied".
func (c *cluster) awaitSeries(t *testing.T, pod *v1.Pod, name, value string, labels ...string) {
	t.Helper()
	c.await(t, fmt.Sprintf("%s with %s to be %s", name, labels, value), func() error {
		values, err := series(pod, name, labels...)
		if err == nil && !slices.Contains(values, value) {
			err = fmt.Errorf("there are %q", values)
		}
		return err
	})
}

// series returns the values of all series of that name with at least these labels.
func series(pod *v1.Pod, name string, labels ...string) ([]string, error) {
	text, err := fetch(pod, "/metrics")
	if err != nil {
		return nil, err
	}
	var values []string
	for line := range strings.Lines(text) {
		written, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		if strings.HasPrefix(written, name+"{") && hasAll(written, labels) {
			values = append(values, value)
		}
	}
	return values, nil
}

// exec runs the command in the pod, as kubectl does, and returns its output. The output of a command that
// ends at once may be cut off.
func (c *cluster) exec(t *testing.T, pod *v1.Pod, command ...string) (string, error) {
	t.Helper()
	request := c.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&v1.PodExecOptions{Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, request.URL().String())
	if err != nil {
		t.Fatal(err)
	}
	var output, complaint bytes.Buffer // Both are written at once.
	if err := executor.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: &output, Stderr: &complaint}); err != nil {
		return "", fmt.Errorf("%q in pod %s: %w\n%s", command, pod.Name, err, &complaint)
	}
	return output.String(), nil
}

// profileLabel is the Node label that chooses the node's profile.
const profileLabel = "nvidia.com/device-plugin.config"

func (c *cluster) node(t *testing.T) *v1.Node {
	t.Helper()
	node, err := c.client.CoreV1().Nodes().Get(t.Context(), hostName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// awaitAllocatable waits until the node offers exactly these of NVIDIA's resources, ignoring those with 0
// devices. It asks the kubelet too, because the node's status may be a second old.
func (c *cluster) awaitAllocatable(t *testing.T, want map[string]int64) {
	t.Helper()
	kubelet := c.kubeletSays(t)
	c.await(t, fmt.Sprintf("allocatable %v", want), func() error {
		if err := serves(t, kubelet, want); err != nil {
			return err
		}
		return differs(want, c.node(t).Status.Allocatable)
	})
}

// offers waits until capacity and allocatable are exactly these of NVIDIA's resources.
func (c *cluster) offers(t *testing.T, want map[string]int64) {
	t.Helper()
	c.awaitAllocatable(t, want)
	c.await(t, fmt.Sprintf("capacity %v", want), func() error {
		return differs(want, c.node(t).Status.Capacity)
	})
}

// differs returns an error if the resources are not exactly these of NVIDIA's, ignoring those with 0
// devices.
func differs(want map[string]int64, resources v1.ResourceList) error {
	got := offered(resources)
	maps.DeleteFunc(got, func(_ string, count int64) bool { return count == 0 })
	if difference := cmp.Diff(want, got); difference != "" {
		return fmt.Errorf("it is (-want +got):\n%s", difference)
	}
	return nil
}

func offered(resources v1.ResourceList) map[string]int64 {
	found := map[string]int64{}
	for name, quantity := range resources {
		if strings.HasPrefix(string(name), "nvidia.com/") {
			found[string(name)] = quantity.Value()
		}
	}
	return found
}

// label sets the node's profile label; "" removes it, and so does the end of the test.
func (c *cluster) label(t *testing.T, profile string) {
	t.Helper()
	var value any
	if profile != "" {
		value = profile
	}
	c.setLabels(t, "", map[string]any{profileLabel: value})
}

// setLabels sets labels of the node, as the named program; nil takes one away.
func (c *cluster) setLabels(t *testing.T, program string, labels map[string]any) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.client.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), hostName, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: program}); err != nil {
		t.Fatal(err)
	}
}

// awaitServed waits until the kubelet itself has this many healthy devices of each resource. Unlike the
// node's status, its answer is never old.
func (c *cluster) awaitServed(t *testing.T, want map[string]int64) {
	t.Helper()
	kubelet := c.kubeletSays(t)
	c.await(t, fmt.Sprintf("the kubelet to have %v", want), func() error { return serves(t, kubelet, want) })
}

// serves returns an error if the kubelet's numbers of healthy devices differ.
func serves(t *testing.T, kubelet api.PodResourcesListerClient, want map[string]int64) error {
	devices, err := healthy(t.Context(), kubelet)
	if err != nil {
		return err
	}
	got := map[string]int64{}
	for resource, each := range devices {
		got[resource] = int64(len(each))
	}
	if difference := cmp.Diff(want, got); difference != "" {
		return fmt.Errorf("the kubelet has (-want +got):\n%s", difference)
	}
	return nil
}

// awaitEvent waits for an event about the node with this reason and all of these words that happened after
// began. It returns the event's message.
func (c *cluster) awaitEvent(t *testing.T, began time.Time, reason string, words ...string) (message string) {
	t.Helper()
	c.await(t, fmt.Sprintf("the event %s with %q", reason, words), func() error {
		events, err := c.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + hostName + ",reason=" + reason,
		})
		if err != nil {
			return err
		}
		var said []string
		for _, event := range events.Items {
			said = append(said, event.LastTimestamp.Format(time.TimeOnly)+" "+event.Message)
			// An event's time has whole seconds.
			if !event.LastTimestamp.Time.Before(began.Truncate(time.Second)) && hasAll(event.Message, words) {
				message = event.Message
				return nil
			}
		}
		return fmt.Errorf("there are %q", said)
	})
	return message
}

// awaitCondition waits until the node's condition GPUSharingReady has this status, reason and words.
func (c *cluster) awaitCondition(t *testing.T, status v1.ConditionStatus, reason string, words ...string) {
	t.Helper()
	c.await(t, fmt.Sprintf("GPUSharingReady to be %s, %s", status, reason), func() error {
		for _, condition := range c.node(t).Status.Conditions {
			if condition.Type != "GPUSharingReady" {
				continue
			}
			if condition.Status == status && condition.Reason == reason && hasAll(condition.Message, words) {
				return nil
			}
			return fmt.Errorf("it is %s, %s: %s", condition.Status, condition.Reason, condition.Message)
		}
		return errNotYet
	})
}

// awaitProfile waits until the Node's metadata name the profile in force and the state of the wanted one.
func (c *cluster) awaitProfile(t *testing.T, name, state string) {
	t.Helper()
	c.await(t, fmt.Sprintf("the node to say %s and %s", name, state), func() error {
		node := c.node(t)
		if got, gotState := node.Annotations["virgate.github.io/profile"], node.Labels[profileLabel+".state"]; got != name || gotState != state {
			return fmt.Errorf("it says %q and %q", got, gotState)
		}
		return nil
	})
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

// testPrometheus scrapes the pod and lets the chart's rules judge it.
func testPrometheus(t *testing.T, c *cluster) {
	program, err := exec.LookPath("prometheus")
	if err != nil {
		if os.Getenv("PROMETHEUS") == "required" {
			t.Fatal(err)
		}
		t.Skip("prometheus is not installed")
	}
	settings := []string{"node=sim:dgx-a100", "config.map.good=version: v1", "config.map.wrong=retireAfter:\n  switch: never", "config.default=good", "metrics.rules.enabled=true"}
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
	c.await(t, "a scrape", func() error { return found(t, "up{node='"+hostName+"'} == 1") })
	if found(t, "ALERTS{alertname='VirgateProfileRejected'}") == nil {
		t.Fatal("the alert fires while all is well")
	}
	c.label(t, "wrong")
	defer c.label(t, "")
	c.await(t, "the alert", func() error {
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

// found returns an error unless the query's answer has a series.
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
