package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// role says what a process of this binary is; without it, the test that a user started.
const role = "VIRGATE_E2E_ROLE"

// The roles besides Kubernetes' components.
const (
	// asFirst is process 1 of the namespaces.
	asFirst = "first"
	// asTest runs the tests in them.
	asTest = "test"
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
	default:
		component, ok := components[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "%s: no role %q\n", role, name)
			os.Exit(2)
		}
		os.Exit(cli.Run(component()))
	}
}

// TestKubernetes plays everything on one cluster, as starting it takes longest.
// Each part says what it needs installed.
func TestKubernetes(t *testing.T) {
	if os.Getenv(role) != asTest {
		t.Skip(unable())
	}
	c := startCluster(t)
	t.Cleanup(func() { c.removePods(t) })
	defer c.report.write(t)
	for _, part := range []struct {
		name string
		play func(*testing.T, *cluster)
	}{
		{"default values", testDefaultValues},
		{"shares", testShares},
		{"partitions", testPartitions},
		{"storm", testStorm},
		{"switches", testTransitions},
		{"full node", testQueue},
		{"repartitioning", testRepartitioning},
		{"shrink with held replicas", testShrink},
		{"rename under load", testRename},
		{"rollout", testRollout},
		{"profile rollout", testProfileRollout},
		{"kubelet restarts", testKubeletRestarts},
		{"containerd restarts", testContainerdRestarts},
		{"plugin killed", testPluginKilled},
		{"standby", testStandby},
		{"bad profile", testBadProfile},
		{"fault", testFault},
		{"guard", testGuard},
		{"mps", testMPS},
		{"dra", testDRA},
		{"dra mps", testDRAMPS},
		{"dra partitions", testDRAPartitions},
		{"dra faults", testDRAFaults},
		{"dra latency", testDRALatency},
		{"dra cases", testDRACases},
		{"dra reboot", testDRAReboot},
		{"dra storm", testDRAStorm},
		{"dra nvidia names", testNVIDIANames},
		{"outage", testOutage},
		{"rights", testRights},
		{"admission", testAdmission},
		{"feature labels", testFeatureLabels},
		{"uninstall", testUninstall},
		{"leaving", testLeaving},
		{"CDI", testCDI},
		{"Prometheus", testPrometheus},
		{"nvml", testNVML},
		{"image swap", testImageSwap},
		{"operator", testOperator},
		{"manifest", testManifest},
	} {
		t.Run(part.name, func(t *testing.T) { c.report.step(part.name, func() { part.play(t, c) }) })
	}
}

// report is what the run took, as a Markdown table.
type report struct {
	started time.Time
	rows    []string
}

// step plays it and notes the time.
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
