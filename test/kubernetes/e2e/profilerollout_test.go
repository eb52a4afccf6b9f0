package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// testProfileRollout runs kubectl virgate rollout, as users do, to give the node other profiles while pods
// hold all of its shares. No pod notices, and each undo leaves the node without a label, as it was.
func testProfileRollout(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "rolled", map[string]string{"four": replicas("4"), "five": replicas("5"), "broken": replicas("many"), "whole": "version: v1\n"})
	c.label(t, "")
	t.Cleanup(func() { c.label(t, "") })
	c.install(t, "node=sim:t4x2", "config.name=rolled", "config.default=four")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	c.awaitProfile(t, "four", "applied")
	pods := numbered("rolled", 9, shared)
	c.runAll(t, pods[:8])
	waiting := pods[8].Name
	c.awaitInsufficient(t, waiting, shared)
	all := names(pods[:8])
	before, held := c.podStates(t, all), c.holdings(t)
	unharmed := func(when string) {
		t.Helper()
		c.undisturbed(t, before)
		now := c.holdings(t)
		for name := range held {
			if !slices.Equal(held[name], now[name]) {
				t.Errorf("%s: %s holds %v, before %v", when, name, now[name], held[name])
			}
		}
	}

	// When the command ends, the node has reported the profile. The only change for pods is that one more
	// fits.
	output := c.rollout(t, 0, "start", "five", "-l", "kubernetes.io/hostname="+hostName)
	id := rolloutID(output)
	c.saysNow(t, "five", "five", "applied")
	if !strings.Contains(output, "is finished: 1 of 1 nodes have five") {
		t.Errorf("it ends with %q", output)
	}
	c.awaitPhase(t, waiting, v1.PodRunning)
	c.awaitAllocatable(t, map[string]int64{shared: 10})
	unharmed("five shares instead of four")
	all = append(all, waiting)
	before, held = c.podStates(t, all), c.holdings(t)
	if output := c.rollout(t, 0, "status", id); !hasAll(output, []string{"finished", hostName, "done"}) {
		t.Errorf("status says %q", output)
	}
	c.kubectl(t)
	c.rollout(t, 0, "undo")
	c.saysNow(t, "", "four", "applied")
	unharmed("undone, with more shares held than there are to be")

	// The node refuses a profile: the rollout stops, and keeps the node for the person who continues it.
	output = c.rollout(t, 1, "start", "broken", "-l", "kubernetes.io/hostname="+hostName, "--pause-after", "0")
	if !hasAll(output, []string{"is stopped", hostName + ": the node refuses the profile", "replicas", "--skip-failed"}) {
		t.Errorf("refused, it says %q", output)
	}
	c.saysNow(t, "broken", "four", "rejected")
	c.refusesSecond(t)
	unharmed("a profile that the node refuses")
	c.rollout(t, 0, "undo")
	c.awaitProfile(t, "four", "applied")
	c.saysNow(t, "", "four", "applied")

	// If a profile must wait for pods to end, the rollout waits too, as long as it takes.
	driver, said := c.startDriving(t, "start", "whole", "-l", "kubernetes.io/hostname="+hostName)
	c.awaitProfile(t, "four", "switching")
	c.refusesSecond(t)
	if err := driver.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = driver.Wait() // The exit code is checked below.
	if code, output := driver.ProcessState.ExitCode(), said.String(); code != 1 || !hasAll(output, []string{"is paused", "interrupted by", "kubectl virgate rollout resume"}) {
		t.Errorf("interrupted, it ends with %d and says %q", code, output)
	}
	unharmed("a profile that waits for the pods")
	id = rolloutID(said.String())
	driver, said = c.startDriving(t, "resume")
	c.await(t, "the rollout to run again", func() error {
		if output := c.rollout(t, 0, "status"); !strings.Contains(output, "running") {
			return fmt.Errorf("status says %q", output)
		}
		return nil
	})
	c.removeAll(t, pods)
	if err := driver.Wait(); err != nil {
		t.Errorf("%v: %s", err, said.String())
	}
	c.saysNow(t, "whole", "whole", "applied")
	c.rollout(t, 0, "undo")
	c.saysNow(t, "", "four", "applied")
	c.rollout(t, 0, "forget", id)
	for name := range c.node(t).Annotations {
		if strings.HasPrefix(name, "virgate.github.io/rollout") {
			t.Errorf("the annotation %s is left", name)
		}
	}
}

// holdings are the devices of the tests' pods as the kubelet has them.
func (c *cluster) holdings(t *testing.T) map[string][]heldDevice {
	t.Helper()
	held, err := holdings(t.Context(), c.kubeletSays(t))
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// saysNow checks, without waiting, that the node has the label ("" for none) and reports this about its
// profile.
func (c *cluster) saysNow(t *testing.T, label, profile, state string) {
	t.Helper()
	node := c.node(t)
	got := []string{node.Labels[profileLabel], node.Annotations["virgate.github.io/profile"], node.Labels[profileLabel+".state"]}
	if difference := cmp.Diff([]string{label, profile, state}, got); difference != "" {
		t.Errorf("label, profile in force and state (-want +got):\n%s", difference)
	}
	if _, found := node.Labels[profileLabel]; found && label == "" {
		t.Error("there is a label, and there was none")
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == "GPUSharingReady" && condition.Status != v1.ConditionTrue {
			t.Errorf("GPUSharingReady is %s: %s: %s", condition.Status, condition.Reason, condition.Message)
		}
	}
}

// refusesSecond checks that another rollout of the node is refused and leaves the node as it is.
func (c *cluster) refusesSecond(t *testing.T) {
	t.Helper()
	before := c.node(t).Labels[profileLabel]
	if output := c.rollout(t, 1, "start", "five", "-l", "kubernetes.io/hostname="+hostName); !hasAll(output, []string{"node " + hostName + " belongs to rollout", "has not ended"}) {
		t.Errorf("a second rollout is refused with %q", output)
	}
	if after := c.node(t).Labels[profileLabel]; after != before {
		t.Errorf("a second rollout that is refused changes the label from %q to %q", before, after)
	}
}

func (c *cluster) rolloutCommand(arguments ...string) *exec.Cmd {
	return exec.Command(c.path("kubectl-virgate"), append([]string{"rollout", "--kubeconfig", c.path("admin.conf")}, arguments...)...)
}

// rollout runs kubectl virgate rollout to its end, checks the exit code, and returns the output.
func (c *cluster) rollout(t *testing.T, code int, arguments ...string) string {
	t.Helper()
	command := c.rolloutCommand(arguments...)
	output, err := command.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || command.ProcessState.ExitCode() != code {
		t.Fatalf("kubectl virgate rollout %q: %v, want exit code %d\n%s", arguments, err, code, output)
	}
	return string(output)
}

// rolloutID returns the rollout's ID from start's output.
func rolloutID(output string) string {
	id, _, _ := strings.Cut(strings.TrimPrefix(output, "rollout "), ":")
	return id
}

// startDriving starts kubectl virgate rollout; its output is complete after Wait.
func (c *cluster) startDriving(t *testing.T, arguments ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	command, said := c.rolloutCommand(arguments...), &bytes.Buffer{}
	command.Stdout, command.Stderr = said, said
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if command.ProcessState == nil {
			_ = command.Process.Kill()
			_ = command.Wait()
		}
	})
	return command, said
}

// kubectl calls the program as a plugin of kubectl, if kubectl is installed.
func (c *cluster) kubectl(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Log(err)
		return
	}
	call := func(arguments ...string) string {
		command := exec.Command("kubectl", append([]string{"virgate"}, arguments...)...)
		command.Env = append(os.Environ(), "PATH="+filepath.Dir(c.path("kubectl-virgate"))+":"+os.Getenv("PATH"), "KUBECONFIG="+c.path("admin.conf"))
		output, err := command.CombinedOutput()
		if err != nil {
			t.Errorf("kubectl virgate %q: %v\n%s", arguments, err, output)
		}
		return string(output)
	}
	if output := call(); !hasAll(output, []string{hostName, "five", "applied", shared}) {
		t.Errorf("kubectl virgate says %q", output)
	}
	if output := call("gpus", hostName); strings.Count(output, workspace+"/rolled-") != 9 {
		t.Errorf("kubectl virgate gpus says %q, want the 9 pods", output)
	}
}
