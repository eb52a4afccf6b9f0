package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
)

// plugin is Virgate's pod, the one that is to stay.
func (c *cluster) plugin(t *testing.T) *v1.Pod {
	t.Helper()
	var found *v1.Pod
	c.await(t, time.Minute, "one pod of Virgate", func() error {
		pods, err := c.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=virgate"})
		if err != nil {
			return err
		}
		var staying []*v1.Pod
		for i := range pods.Items {
			if pods.Items[i].DeletionTimestamp == nil && len(pods.Items[i].Status.ContainerStatuses) == 1 {
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

// processes are the process IDs in the pod's only container, as this machine has
// them: pods and test are in the same namespace of processes.
func processes(t *testing.T, pod *v1.Pod) []int {
	t.Helper()
	_, container, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil || container == "" {
		t.Fatalf("pod %s has container %q, and the processes are not known: %v", pod.Name, container, err)
	}
	var found []int
	for _, file := range files {
		groups, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(groups), container) {
			continue // One that has ended meanwhile is not in it either.
		}
		id, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, id)
	}
	return found
}

// fetch is what the pod answers over HTTP at the path.
func fetch(pod *v1.Pod, path string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get("http://" + net.JoinHostPort(pod.Status.PodIP, "9400") + path)
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

// awaitSeries waits until a series of that name, with at least these labels, has the
// value. A label is written as on /metrics: state="applied".
func (c *cluster) awaitSeries(t *testing.T, pod *v1.Pod, name, value string, labels ...string) {
	t.Helper()
	c.await(t, time.Minute, fmt.Sprintf("%s with %s to be %s", name, labels, value), func() error {
		values, err := series(pod, name, labels...)
		if err == nil && !slices.Contains(values, value) {
			err = fmt.Errorf("there are %q", values)
		}
		return err
	})
}

// series are the values of all series of that name with at least these labels.
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

// exec runs the command in the pod, as kubectl does, and returns what it prints.
func (c *cluster) exec(t *testing.T, pod *v1.Pod, command ...string) string {
	t.Helper()
	request := c.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&v1.PodExecOptions{Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, request.URL().String())
	if err != nil {
		t.Fatal(err)
	}
	var output, complaint bytes.Buffer // Both are written at once.
	if err := executor.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: &output, Stderr: &complaint}); err != nil {
		t.Fatalf("%q in pod %s: %v\n%s", command, pod.Name, err, &complaint)
	}
	return output.String()
}
