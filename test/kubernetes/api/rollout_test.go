package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nodereport"
)

// TestRollouts runs the part "rollouts" of TestAPI with the requested number of nodes.
func TestRollouts(t *testing.T) {
	nodes, err := strconv.Atoi(os.Getenv(scaleVariable))
	if err != nil {
		t.Skipf("set %s to a number of nodes: TestAPI has 40", scaleVariable)
	}
	s := cluster(t)
	s.reset()
	playRollouts(t, s, nodes)
}

func testRollouts(t *testing.T, s *server) { playRollouts(t, s, 40) }

// trouble is what a node does with the profile b.
type trouble string

const (
	// refuses: the node says that it cannot use the profile. silent: the node says nothing. faulty: the
	// profile is in force, and then a GPU of the node fails.
	refuses, silent, faulty trouble = "refuses", "silent", "faulty"
)

// playRollouts runs Virgate's command, as a process, to give Nodes another profile. The nodes follow it and
// report by Virgate's own code. Three refuse, two never answer, and a GPU of one fails.
func playRollouts(t *testing.T, s *server, count int) {
	c := &commandLine{t: t, binary: buildProgram(t, "kubectl-virgate"), kubeconfig: s.kubeconfig(t)}
	s.setProfiles(map[string]string{"a": document("2"), "b": document("4")})
	s.makeNodes(t, count, "a")
	ready := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True"}],"capacity":{"nvidia.com/gpu":"8"},"allocatable":{"nvidia.com/gpu":"8"}}}`)
	eachNode(t, count, func(name string) error {
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, ready, metav1.PatchOptions{}, "status")
		return err
	})
	names := make([]string, count)
	for i := range names {
		names[i] = nodeName(i)
	}
	slices.Sort(names) // In the order of a rollout.
	at := func(part float64) string { return names[int(part*float64(count-1))] }
	troubles := map[string]trouble{at(0.3): refuses, at(0.5): refuses, at(0.7): refuses, at(0.4): silent, at(0.6): silent, at(0.8): faulty}
	var healed sync.Map // by node, once its trouble is over
	all := s.startFleet(t, count, func(f *nodeClient, node string) {
		f.tellWithTroubles(t, s, node, func() trouble {
			if _, over := healed.Load(node); over {
				return ""
			}
			return troubles[node]
		})
	})
	defer all.stop()
	s.await("all nodes to say that they have a", func() bool {
		return len(s.nodesThat(t, func(n corev1.Node) bool { return n.Annotations["virgate.github.io/profile"] == "a" })) == count
	})
	before := s.labels(t)
	hasB := func(n corev1.Node) bool { return n.Labels[label] == "b" }

	// Records of rollouts that do not exist do no harm.
	s.invent(t, names[0], "none", "claiming")
	s.invent(t, at(0.9), "none", "running")

	// It pauses after the first wave. The next process that drives it is killed, and another one continues.
	c.run(0, "start", "b", "-l", label+"=a", "--max-unavailable", "10%", "--timeout", "20s")
	wave := (count + 9) / 10
	if got := len(s.nodesThat(t, hasB)); got != wave {
		t.Errorf("%d nodes have b after the first wave of %d", got, wave)
	}
	kept, err := s.admin.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "virgate.github.io/rollout"})
	if err != nil || len(kept.Items) != 1 {
		t.Fatalf("%v, ConfigMaps of rollouts: %d", err, len(kept.Items))
	}
	s.invent(t, at(0.9), kept.Items[0].Labels["virgate.github.io/rollout"], "finished")
	driver := c.begin("resume", "--pause-after", "0")
	s.await("the second wave to begin", func() bool { return len(s.nodesThat(t, hasB)) > wave })
	c.kill(driver)

	// It stops at each trouble, and at nothing else.
	stopped := map[string]bool{}
	for range count {
		code, output := c.runs("resume", "--pause-after", "0", "--skip-failed")
		failed := s.failed(t)
		if code == 0 {
			break
		}
		if code != 1 || len(failed) == 0 {
			t.Fatalf("exit code %d, nodes that have failed: %v", code, failed)
		}
		for node := range failed {
			switch {
			case !strings.Contains(output, node):
				t.Errorf("it stopped at %s, and said %q", node, output)
			case troubles[node] != "":
				stopped[node] = true
			case !strings.Contains(failed[node], "not done within"): // The cause may be that this machine is slow.
				t.Errorf("it stopped at %s: %s", node, failed[node])
			}
		}
	}
	if len(stopped) != len(troubles) {
		t.Errorf("it stopped at %v, of %v", stopped, troubles)
	}
	if got := len(s.nodesThat(t, hasB)); got != count {
		t.Errorf("%d of %d nodes have b at the end", got, count)
	}

	// After undo, every label is as it was.
	for node := range troubles {
		healed.Store(node, true)
	}
	c.run(0, "undo")
	if labels := s.labels(t); !maps.Equal(labels, before) {
		t.Errorf("labels %v, before the rollout %v", labels, before)
	}

	for node, n := range s.nodesByName(t) {
		if n.Labels["evil"] != "" || n.Labels[label] == "evil" {
			t.Errorf("%s has what another node invented: %v", node, n.Labels)
		}
	}

	// Nothing of it hinders the next rollout. While that waits for a silent node, no other process can
	// drive it or take its nodes.
	healed.Delete(at(0.4))
	driver = c.begin("start", "b", "-l", label+"=a", "--max-unavailable", "100%", "--pause-after", "0", "--timeout", "20m")
	s.await("all nodes but one to have b", func() bool {
		return len(s.nodesThat(t, func(n corev1.Node) bool { return n.Annotations["virgate.github.io/profile"] == "b" })) == count-1
	})
	if output := c.run(1, "resume"); !strings.Contains(output, "process "+strconv.Itoa(driver.Process.Pid)) {
		t.Errorf("a second driver is refused with %q, which does not name the first", output)
	}
	if output := c.run(1, "start", "a", "-l", label+"=b"); !strings.Contains(output, "node-") {
		t.Errorf("a second rollout of the nodes is refused with %q", output)
	}
	c.run(0, "pause")
	if err := driver.Wait(); err != nil {
		t.Errorf("paused by somebody else: %v", err)
	}
	c.run(0, "undo", "--now")
	if labels := s.labels(t); !maps.Equal(labels, before) {
		t.Errorf("labels %v, before the second rollout %v", labels, before)
	}
}

// invent puts an arbitrary record of the rollout of that ID on the node.
func (s *server) invent(t *testing.T, node, id, phase string) {
	t.Helper()
	record := fmt.Sprintf(`{"id":%q,"rollout":%q,"label":"evil","to":"evil","by":"eve","started":"2020-01-01T00:00:00Z","max":1000,"timeout":1,`+
		`"domain":"nvidia.com","from":"evil","wave":0,"place":"waiting"}`, id, id)
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		"virgate.github.io/rollout":      record,
		"virgate.github.io/rollout-head": fmt.Sprintf(`{"rollout":%q,"phase":%q,"holder":"eve"}`, id, phase),
	}}})
	s.must(err)
	_, err = s.admin.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, patch, metav1.PatchOptions{})
	s.must(err)
}

// nodesByName returns all Nodes.
func (s *server) nodesByName(t *testing.T) map[string]corev1.Node {
	t.Helper()
	nodes := map[string]corev1.Node{}
	s.nodesThat(t, func(n corev1.Node) bool { nodes[n.Name] = n; return false })
	return nodes
}

// tellWithTroubles calls tell for a node that may have trouble with the profile b.
func (f *nodeClient) tellWithTroubles(t *testing.T, s *server, node string, has func() trouble) {
	f.tell(t, node)
	follows, reporter := f.applies, f.reporter
	f.applies = func(selected configs.SelectedProfile) {
		kind := has()
		switch {
		case selected.Name != "b" || kind == "":
			follows(selected)
		case kind == silent:
		case kind == refuses:
			wanted := nodereport.ProfileRef{Name: selected.Name, Source: selected.Source, Generation: selected.Generation}
			reporter.Report(nodereport.Report{
				State: nodereport.ProfileRejected, Wanted: wanted, Applied: f.last,
				Ready: nodereport.ConditionTrue, Reason: "ProfileRejected", Message: "replicas: as the test says",
			})
		case kind == faulty:
			follows(selected)
			// The rollout stops whether or not the node is done by then.
			patch := []byte(`{"status":{"allocatable":{"nvidia.com/gpu":"6"}}}`)
			if _, err := s.admin.CoreV1().Nodes().Patch(context.WithoutCancel(t.Context()), node, types.MergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
				t.Error(err)
			}
		}
	}
}

// nodesThat returns the names of the Nodes that meet the condition.
func (s *server) nodesThat(t *testing.T, is func(corev1.Node) bool) (names []string) {
	t.Helper()
	list, err := s.admin.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range list.Items {
		if is(node) {
			names = append(names, node.Name)
		}
	}
	return names
}

// labels returns the profile of each Node.
func (s *server) labels(t *testing.T) map[string]string {
	t.Helper()
	labels := map[string]string{}
	s.nodesThat(t, func(n corev1.Node) bool { labels[n.Name] = n.Labels[label]; return false })
	return labels
}

// failed returns the nodes at which the rollout has stopped, with their records.
func (s *server) failed(t *testing.T) map[string]string {
	t.Helper()
	failed := map[string]string{}
	s.nodesThat(t, func(n corev1.Node) bool {
		if record := n.Annotations["virgate.github.io/rollout"]; strings.Contains(record, `"failed"`) {
			failed[n.Name] = record
		}
		return false
	})
	return failed
}

// kubeconfig writes a kubectl configuration for the server's administrator.
func (s *server) kubeconfig(t *testing.T) string {
	t.Helper()
	path := t.TempDir() + "/kubeconfig"
	write(t, path, fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:%d", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, s.port, adminToken))
	return path
}

// buildProgram builds the program of cmd/name.
func buildProgram(t *testing.T, name string) string {
	t.Helper()
	binary := t.TempDir() + "/" + name
	build := exec.Command("go", "build", "-o", binary, "./cmd/"+name)
	build.Dir, build.Env = "../../..", append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, output)
	}
	return binary
}

// commandLine runs kubectl virgate rollout.
type commandLine struct {
	t                  *testing.T
	binary, kubeconfig string
}

func (c *commandLine) command(arguments ...string) *exec.Cmd {
	return exec.Command(c.binary, append([]string{"rollout", "--kubeconfig", c.kubeconfig, "--virgate-namespace", namespace}, arguments...)...)
}

// runs runs the command to its end.
func (c *commandLine) runs(arguments ...string) (code int, output string) {
	c.t.Helper()
	command := c.command(arguments...)
	text, err := command.CombinedOutput()
	c.t.Logf("%q\n%s", arguments, text)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		c.t.Fatal(err)
	}
	return command.ProcessState.ExitCode(), string(text)
}

// run calls runs and checks the exit code.
func (c *commandLine) run(code int, arguments ...string) (output string) {
	c.t.Helper()
	got, output := c.runs(arguments...)
	if got != code {
		c.t.Fatalf("%q: exit code %d, want %d", arguments, got, code)
	}
	return output
}

// begin starts the command; the caller ends it.
func (c *commandLine) begin(arguments ...string) *exec.Cmd {
	c.t.Helper()
	command := c.command(arguments...)
	var output bytes.Buffer
	command.Stdout, command.Stderr = &output, &output
	if err := command.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		c.kill(command)
		c.t.Logf("%q\n%s", arguments, output.String())
	})
	return command
}

// kill kills the command unless it has ended, and waits for its end.
func (c *commandLine) kill(command *exec.Cmd) {
	if command.ProcessState == nil {
		_ = command.Process.Kill()
		_ = command.Wait() // It was killed, or ended by itself.
	}
}
