package e2e

import (
	"fmt"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// testOutage ends the API server while pods hold shares. The profile is edited in
// the moment before, a GPU becomes too hot meanwhile, and the profile is edited
// once more when the API server is back.
func testOutage(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "edited", map[string]string{"chosen": replicas("4")})
	c.install(t, "node=sim:t4x2", "config.name=edited", "config.default=chosen")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	before, plugin := c.vitals(t, c.hold(t, "holder", 2)), c.plugin(t)

	c.editProfile(t, "edited", "chosen", replicas("5"))
	c.apiServer.stop(syscall.SIGKILL)
	down := time.Now()
	c.answers(t, plugin)
	heat(t, c, plugin)
	c.awaitServed(t, map[string]int64{shared: c.awaitHalf(t, plugin)})
	c.answers(t, plugin)

	c.apiServer.start(t)
	c.await(t, time.Minute, "the API server", c.ready)
	back := time.Now()
	c.report.note("API server away", back.Sub(down).Round(10*time.Millisecond).String())
	c.awaitAllocatable(t, map[string]int64{shared: 5})
	c.awaitEvent(t, down, "GPUUnhealthy", "GPU 0", "95")
	edited := time.Now()
	c.editProfile(t, "edited", "chosen", replicas("6"))
	c.awaitAllocatable(t, map[string]int64{shared: 6})
	c.report.note("edit after the API server's return to allocatable", time.Since(edited).Round(10*time.Millisecond).String())
	c.awaitEvent(t, back, "ProfileApplied", "chosen")
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "12 devices, 6 healthy")
	c.undisturbed(t, before)
	c.hold(t, "later", 1)
	if c.plugin(t).Status.ContainerStatuses[0].RestartCount != plugin.Status.ContainerStatuses[0].RestartCount {
		t.Error("Virgate has ended without an API server")
	}
}

// answers waits until the pod answers all that it should; it is not ready in the
// moment in which it takes up what was edited.
func (c *cluster) answers(t *testing.T, plugin *v1.Pod) {
	t.Helper()
	for _, path := range []string{"/healthz", "/readyz", "/status", "/api/v1/status"} {
		c.await(t, 10*time.Second, "an answer without an API server", func() error {
			_, err := fetch(plugin, path)
			return err
		})
	}
}

// awaitHalf waits until Virgate lists one GPU's devices as healthy and the other's
// not, and returns how many: four, or five if it had seen the edit.
func (c *cluster) awaitHalf(t *testing.T, plugin *v1.Pod) (healthy int64) {
	t.Helper()
	c.await(t, time.Minute, "half of the devices to be healthy", func() error {
		counts := [2]int64{}
		for i, state := range []string{"healthy", "unhealthy"} {
			values, err := series(plugin, "virgate_listed_devices", `resource="nvidia.com/gpu"`, `state="`+state+`"`)
			if err != nil || len(values) != 1 {
				return fmt.Errorf("%s are %q: %v", state, values, err)
			}
			if counts[i], err = strconv.ParseInt(values[0], 10, 64); err != nil {
				return err
			}
		}
		if healthy = counts[0]; healthy != counts[1] || healthy != 4 && healthy != 5 {
			return fmt.Errorf("%d are healthy, %d are not", counts[0], counts[1])
		}
		return nil
	})
	return healthy
}

// heat makes GPU 0 too hot without asking the API server: through the container's
// file system, which its process shows.
func heat(t *testing.T, c *cluster, plugin *v1.Pod) {
	t.Helper()
	for _, process := range processes(t, plugin) {
		socket := fmt.Sprintf("/proc/%d/root/run/virgate/control.sock", process)
		if output, err := exec.Command(c.path("virgate"), "sim", "--control-socket", socket, "temperature", "--gpu", "0", "95").CombinedOutput(); err != nil {
			t.Fatalf("heat GPU 0: %v\n%s", err, output)
		}
	}
}
