package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// role is the environment variable that gives a process of this binary its role. Without it, the process is
// the test that a user started.
const role = "VIRGATE_E2E_ROLE"

// The roles besides Kubernetes' components.
const (
	// asFirst is process 1 of the namespaces.
	asFirst = "first"
	// asTest runs the tests in them.
	asTest = "test"
	// asBuild builds what they need: FOLDER TOOLS.
	asBuild = "build"
)

func TestMain(m *testing.M) {
	components := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllers.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	switch name := os.Getenv(role); name {
	case "":
		os.Exit(outside(m))
	case asFirst:
		os.Exit(first())
	case asTest:
		os.Exit(m.Run())
	case asBuild:
		if err := build(os.Args[1], os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
			os.Exit(1)
		}
	default:
		component, ok := components[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "%s: no role %q\n", role, name)
			os.Exit(2)
		}
		os.Exit(cli.Run(component()))
	}
}

// TestKubernetes runs all parts on one cluster, because starting it takes longest. Each part says what it
// needs installed.
func TestKubernetes(t *testing.T) {
	if os.Getenv(role) != asTest {
		t.Skip(unable())
	}
	shard, err := chosenShard(os.Getenv("SHARD"))
	if err != nil {
		t.Fatal(err)
	}
	c := startCluster(t)
	t.Cleanup(func() { c.removePods(t) })
	defer c.report.write(t)
	for _, part := range []struct {
		shard int // of two that take about as long
		name  string
		play  func(*testing.T, *cluster)
	}{
		{1, "documents", testDocuments},
		{1, "shares", testShares},
		{1, "partitions", testPartitions},
		{1, "storm", testStorm},
		{1, "switches", testTransitions},
		{1, "full node", testQueue},
		{1, "repartitioning", testRepartitioning},
		{1, "shrink with held replicas", testShrink},
		{1, "rename under load", testRename},
		{1, "rollout", testRollout},
		{1, "profile rollout", testProfileRollout},
		{1, "kubelet restarts", testKubeletRestarts},
		{1, "containerd restarts", testContainerdRestarts},
		{1, "plugin killed", testPluginKilled},
		{1, "standby", testStandby},
		{1, "bad profile", testBadProfile},
		{1, "rules", testRules},
		{1, "announced", testAnnounced},
		{1, "refusals", testRefusals},
		{1, "fault", testFault},
		{1, "why", testWhy},
		{1, "guard", testGuard},
		{2, "mps", testMPS},
		{2, "dra", testDRA},
		{2, "dra mps", testDRAMPS},
		{2, "dra partitions", testDRAPartitions},
		{2, "dra faults", testDRAFaults},
		{2, "dra latency", testDRALatency},
		{2, "dra cases", testDRACases},
		{2, "dra reboot", testDRAReboot},
		{2, "dra storm", testDRAStorm},
		{2, "dra nvidia names", testNVIDIANames},
		{2, "outage", testOutage},
		{2, "rights", testRights},
		{1, "admission", testAdmission},
		{2, "feature labels", testFeatureLabels},
		{1, "uninstall", testUninstall},
		{2, "leaving", testLeaving},
		{1, "CDI", testCDI},
		{1, "Prometheus", testPrometheus},
		{2, "nvml", testNVML},
		{2, "driver replaced", testDriverReplaced},
		{2, "toolkit", testToolkit},
		{1, "image swap", testImageSwap},
		{1, "operator", testOperator},
		{1, "manifest", testManifest},
	} {
		if shard == 0 || part.shard == shard {
			t.Run(part.name, func(t *testing.T) {
				defer c.logsOfFailed(t)
				c.report.step(part.name, func() { part.play(t, c) })
			})
		}
	}
}

// logsOfFailed logs the last lines of Virgate's containers if the test has failed.
func (c *cluster) logsOfFailed(t *testing.T) {
	if !t.Failed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	pods, err := c.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: pluginSelector})
	if err != nil {
		t.Logf("no logs: %v", err)
		return
	}
	for _, pod := range pods.Items {
		for _, container := range pod.Spec.Containers {
			options := &v1.PodLogOptions{Container: container.Name, TailLines: new(int64(300))}
			text, err := c.client.CoreV1().Pods(namespace).GetLogs(pod.Name, options).DoRaw(ctx)
			t.Logf("log of %s in %s: %v\n%s", container.Name, pod.Name, err, text)
		}
	}
}

// chosenShard is the number in SHARD=1/2 or 2/2, and 0 for all parts.
func chosenShard(text string) (int, error) {
	shard, ok := map[string]int{"": 0, "1/2": 1, "2/2": 2}[text]
	if !ok {
		return 0, fmt.Errorf("SHARD=%s: want 1/2 or 2/2", text)
	}
	return shard, nil
}

// report lists how long the run took, as a Markdown table.
type report struct {
	started time.Time
	rows    []string
}

// step runs play and notes the time.
func (r *report) step(name string, play func()) {
	began := time.Now()
	play()
	r.note(name, took(began))
}

// note adds a row.
func (r *report) note(name, value string) {
	r.rows = append(r.rows, fmt.Sprintf("| %s | %s |", name, value))
}

// write puts the table into the file that E2E_REPORT names, and into the log.
func (r *report) write(t *testing.T) {
	r.note("all", since(r.started).Round(time.Second).String())
	text := "| Step | Time or count |\n| --- | --- |\n" + strings.Join(r.rows, "\n") + "\n"
	t.Log("\n" + text)
	if path := os.Getenv("E2E_REPORT"); path != "" {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Error(err)
		}
	}
}
