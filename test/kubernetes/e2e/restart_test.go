package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/virgate/virgate/test/repeat"
)

// testKubeletRestarts stops the kubelet, gracefully and by force, while pods hold shares.
func testKubeletRestarts(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", fourShares)
	all := map[string]int64{shared: 8}
	c.awaitServed(t, all)
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.podStates(t, holders), c.plugin(t)
	lasting := pod("lasting", shared, 1)
	lasting.Spec.RestartPolicy = v1.RestartPolicyAlways
	c.run(t, lasting)
	gpu := c.printedVariable(t, lasting.Name, "NVIDIA_VISIBLE_DEVICES")
	for _, way := range []struct {
		name   string
		signal syscall.Signal
	}{{"stopped", syscall.SIGTERM}, {"killed", syscall.SIGKILL}} {
		c.kubelet.stop(way.signal)
		began := time.Now()
		c.kubelet.start(t)
		c.awaitServed(t, all)
		c.report.note("kubelet "+way.name+", start to shares", took(began))
		c.awaitAllocatable(t, all)
		c.hold(t, way.name, 1)
		c.undisturbed(t, before)
	}
	if c.plugin(t).Status.ContainerStatuses[0].RestartCount != plugin.Status.ContainerStatuses[0].RestartCount {
		t.Error("the kubelet's end has ended Virgate too")
	}
	c.restart(t, lasting.Name)
	if after := c.printedVariable(t, lasting.Name, "NVIDIA_VISIBLE_DEVICES"); after != gpu {
		t.Errorf("a container that started again has %s, its pod was given %s", after, gpu)
	}
	c.fill(t, append(holders, lasting.Name, "stopped-0", "killed-0"), 2, 4)
}

// testContainerdRestarts does the same to the container runtime, which neither Virgate nor a running pod
// needs.
func testContainerdRestarts(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", fourShares)
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.podStates(t, holders), c.plugin(t)
	registered := registrations(t, plugin)
	for _, way := range []struct {
		name   string
		signal syscall.Signal
	}{{"stopped", syscall.SIGTERM}, {"killed", syscall.SIGKILL}} {
		c.containerd.stop(way.signal)
		c.awaitServed(t, all)
		c.answers(t, plugin)
		began := time.Now()
		c.containerd.start(t)
		c.hold(t, way.name, 1)
		c.report.note("containerd "+way.name+", start to a new pod", took(began))
		c.undisturbed(t, before)
		c.awaitAllocatable(t, all)
	}
	if after := c.plugin(t); after.UID != plugin.UID || after.Status.ContainerStatuses[0].ContainerID != plugin.Status.ContainerStatuses[0].ContainerID {
		t.Error("containerd's end has ended Virgate too")
	}
	if after := registrations(t, plugin); after != registered {
		t.Errorf("Virgate has registered %s times, before containerd's end %s", after, registered)
	}
	c.fill(t, append(holders, "stopped-0", "killed-0"), 2, 4)
}

// registrations returns how often Virgate has registered with the kubelet.
func registrations(t *testing.T, plugin *v1.Pod) string {
	t.Helper()
	values, err := series(plugin, "virgate_kubelet_registrations_total", `resource="nvidia.com/gpu"`)
	if err != nil || len(values) != 1 {
		t.Fatalf("registrations are %q: %v", values, err)
	}
	return values[0]
}

// testPluginKilled kills Virgate without warning while pods hold shares.
func testPluginKilled(t *testing.T, c *cluster) {
	c.expectRestarts(t)
	c.install(t, "node=sim:t4x2", fourShares)
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.podStates(t, holders), c.plugin(t)
	killed := processes(t, plugin)
	if len(killed) != 1 {
		t.Fatalf("Virgate's container has processes %v, want one", killed)
	}
	began := time.Now()
	if err := syscall.Kill(killed[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.await(t, "the kubelet to start it again", func() error {
		status := c.plugin(t).Status.ContainerStatuses[0]
		if status.RestartCount == plugin.Status.ContainerStatuses[0].RestartCount || !status.Ready {
			return errors.New("it is not ready")
		}
		return nil
	})
	c.awaitServed(t, all)
	c.report.note("plugin killed to shares", took(began))
	c.awaitAllocatable(t, all)
	c.undisturbed(t, before)
	c.fill(t, holders, 2, 4)
	// The socket of the killed process does no harm. The command is repeated, because the output of one
	// that ends at once may be cut off. It also lists the GPUs of the previous parts, as lost: the machine
	// was not rebooted since.
	c.await(t, "virgate health", func() error {
		health, err := c.exec(t, c.plugin(t), "/usr/bin/virgate", "health")
		if strings.Count(health, "  healthy") != 2 {
			return fmt.Errorf("it says %q, %w", health, err)
		}
		return nil
	})
}

// testStandby kills Virgate again and again while pods start and end, with a standby container and without.
// With one, the shares come back from a program that already ran, and the killed one stands by next. The
// report notes how many pods that saves.
func testStandby(t *testing.T, c *cluster) {
	c.expectRestarts(t)
	kills := repeat.Times(4, 10)
	for _, enabled := range []bool{true, false} {
		c.install(t, "node=sim:dgx-a100", fourShares, fmt.Sprintf("standby.enabled=%t", enabled))
		all := map[string]int64{shared: 32}
		c.awaitServed(t, all)
		c.awaitAllocatable(t, all)
		before := c.podStates(t, c.hold(t, fmt.Sprintf("holder-%t", enabled), 2))
		d := c.watchCluster(t)
		d.rollingOut = true // The kubelet loses its connection to the killed process, too.
		ctx, cancel := context.WithCancel(t.Context())
		var busy sync.WaitGroup
		busy.Go(func() { c.startPods(ctx, d) })
		func() {
			defer busy.Wait()
			defer cancel()
			first := time.Now()
			for range kills {
				var ran []int
				killed := 0
				c.await(t, "all containers to be ready", func() error {
					for _, status := range c.plugin(t).Status.ContainerStatuses {
						if !status.Ready {
							return fmt.Errorf("%s is not", status.Name)
						}
					}
					ran, killed = c.virgates(t), serving(t) // The kubelet may not have reported yet that one is away.
					if want := map[bool]int{true: 2, false: 1}[enabled]; len(ran) != want || !slices.Contains(ran, killed) {
						return fmt.Errorf("there are %v, want %d, and %d serves", ran, want, killed)
					}
					return nil
				})
				if err := syscall.Kill(killed, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				var next int
				c.await(t, "another to serve", func() error {
					if next = serving(t); next == 0 || next == killed {
						return errNotYet
					}
					return nil
				})
				if ranBefore := slices.Contains(ran, next); ranBefore != enabled {
					t.Errorf("standby.enabled is %t, and the one that serves then ran before: %t", enabled, ranBefore)
				}
				c.awaitServed(t, all)
			}
			c.notes(t, d, kills, enabled, c.kubeletLog(t, first).gaps)
			if enabled {
				for _, process := range c.virgates(t) {
					role := map[bool]string{true: "serves", false: "stands by"}[process == serving(t)]
					c.report.note("memory of the one that "+role, resident(t, process))
				}
			}
		}()
		c.awaitAllocatable(t, all)
		c.undisturbed(t, before)
		c.clear(t)
	}
}

// notes notes the cost of the kills.
func (c *cluster) notes(t *testing.T, d *eventLog, kills int, standby bool, gaps []gap) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, wrong := range d.wrong {
		t.Error(wrong)
	}
	refused := 0
	for _, l := range d.pods {
		if l.refusal != "" {
			refused++
		}
	}
	var moments []time.Duration
	for _, g := range gaps {
		moments = append(moments, g.end.Sub(g.begin).Round(time.Millisecond))
	}
	c.report.note(fmt.Sprintf("%d kills, standby %t: pods, refused; without devices", kills, standby), fmt.Sprintf("%d, %d; %v", len(d.pods), refused, moments))
}

// virgates are the processes of Virgate's containers.
func (c *cluster) virgates(t *testing.T) (all []int) {
	t.Helper()
	plugin := c.plugin(t)
	for _, status := range plugin.Status.ContainerStatuses {
		one := plugin.DeepCopy()
		one.Status.ContainerStatuses = []v1.ContainerStatus{status}
		all = append(all, processes(t, one)...)
	}
	return all
}

// serving returns the process that has Virgate's lock, 0 for none.
func serving(t *testing.T) int {
	t.Helper()
	info, err := os.Stat("/var/lib/kubelet/device-plugins/virgate.lock")
	if err != nil {
		t.Fatal(err)
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	inode := fmt.Sprintf(":%d", info.Sys().(*syscall.Stat_t).Ino)
	for line := range strings.Lines(string(locks)) { // 1: FLOCK  ADVISORY  WRITE 123 00:2f:456 0 EOF
		words := strings.Fields(line)
		if len(words) < 6 || words[1] != "FLOCK" || !strings.HasSuffix(words[5], inode) {
			continue
		}
		process, err := strconv.Atoi(words[4])
		if err != nil {
			t.Fatal(err)
		}
		return process
	}
	return 0
}

// resident returns the process's resident memory.
func resident(t *testing.T, process int) string {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", process))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if size, found := strings.CutPrefix(line, "VmRSS:"); found {
			return strings.TrimSpace(size)
		}
	}
	return "unknown"
}

// testOutage stops the API server while pods hold shares. The profile is edited just before, a GPU
// overheats meanwhile, and the profile is edited again when the API server is back.
func testOutage(t *testing.T, c *cluster) {
	c.createNamespace(t, namespace)
	c.profiles(t, "edited", map[string]string{"chosen": replicas("4")})
	c.install(t, "node=sim:t4x2", "config.name=edited", "config.default=chosen")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	before, plugin := c.podStates(t, c.hold(t, "holder", 2)), c.plugin(t)

	c.editProfile(t, "edited", "chosen", replicas("5"))
	c.apiServer.stop(syscall.SIGKILL)
	down := time.Now()
	c.answers(t, plugin)
	heat(t, c, plugin)
	c.awaitServed(t, map[string]int64{shared: c.awaitHalf(t, plugin)})
	c.answers(t, plugin)

	c.apiServer.start(t)
	c.await(t, "the API server", c.ready)
	back := time.Now()
	c.report.note("API server away", back.Sub(down).Round(10*time.Millisecond).String())
	c.awaitAllocatable(t, map[string]int64{shared: 5})
	c.awaitEvent(t, down, "GPUUnhealthy", "GPU 0", "95")
	edited := time.Now()
	c.editProfile(t, "edited", "chosen", replicas("6"))
	c.awaitAllocatable(t, map[string]int64{shared: 6})
	c.report.note("edit after the API server's return to allocatable", took(edited))
	c.awaitEvent(t, back, "ProfileApplied", "chosen")
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "12 devices, 6 healthy")
	c.undisturbed(t, before)
	c.hold(t, "later", 1)
	if c.plugin(t).Status.ContainerStatuses[0].RestartCount != plugin.Status.ContainerStatuses[0].RestartCount {
		t.Error("Virgate has ended without an API server")
	}
}

// answers waits until the pod answers all requests, even if a part of the cluster is missing. The pod is not
// ready for a moment while it applies an edit.
func (c *cluster) answers(t *testing.T, plugin *v1.Pod) {
	t.Helper()
	for _, path := range []string{"/healthz", "/readyz", "/status", "/api/v1/status"} {
		c.await(t, "an answer from "+path, func() error {
			_, err := fetchInside(t, plugin, path)
			return err
		})
	}
	if page, err := fetch(plugin, "/api/v1/status"); err == nil || !strings.Contains(err.Error(), "404 Not Found") {
		t.Errorf("other pods get the status: %v %s", err, page)
	}
}

// awaitHalf waits until Virgate lists one GPU's devices as healthy and the other's as unhealthy. It returns
// the number of healthy ones: four, or five if Virgate had seen the edit.
func (c *cluster) awaitHalf(t *testing.T, plugin *v1.Pod) (healthy int64) {
	t.Helper()
	c.await(t, "half of the devices to be healthy", func() error {
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

// heat overheats GPU 0 without the API server: through the container's file system, which its process
// shows.
func heat(t *testing.T, c *cluster, plugin *v1.Pod) {
	t.Helper()
	c.simulate(t, plugin, "temperature", "--gpu", "0", "95")
}

// simulate runs a command of the pod's simulated node.
func (c *cluster) simulate(t *testing.T, plugin *v1.Pod, verb ...string) {
	t.Helper()
	if err := c.trySimulate(t, plugin, verb...); err != nil {
		t.Fatal(err)
	}
}

// trySimulate is simulate for commands that the simulated node may refuse.
func (c *cluster) trySimulate(t *testing.T, plugin *v1.Pod, verb ...string) error {
	t.Helper()
	for _, process := range processes(t, plugin) {
		socket := fmt.Sprintf("/proc/%d/root/run/virgate/control.sock", process)
		if output, err := exec.Command(c.path("virgate"), append([]string{"sim", "--control-socket", socket}, verb...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("sim %q: %w\n%s", verb, err, output)
		}
	}
	return nil
}

// rollouts is how often one version takes over from another; it must be even.
var rollouts = repeat.Times(2, 4)

// testRollout rolls the DaemonSet to another version and back while pods start and end all the time.
func testRollout(t *testing.T, c *cluster) {
	c.install(t, "node=sim:dgx-a100", fourShares)
	c.awaitAllocatable(t, map[string]int64{shared: 32})
	holders := c.hold(t, "holder", 4)
	before := c.podStates(t, holders)
	c.awaitCondition(t, v1.ConditionTrue, "Serving")
	d := c.watchCluster(t)
	d.rollingOut = true
	t.Cleanup(func() { c.clear(t) })
	kubelet := c.kubeletSays(t)
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	busy.Go(func() { c.startPods(ctx, d) })
	busy.Go(func() { d.followTruth(ctx, kubelet) })
	// However the test ends, nothing writes to it afterwards.
	defer busy.Wait()
	defer cancel()

	first, sum := time.Now(), time.Duration(0)
	var ended []time.Time // When the rollouts ended.
	for i := range rollouts {
		tag := []string{nextVersion, version}[i%2]
		began := time.Now()
		c.install(t, "node=sim:dgx-a100", fourShares, "image.tag="+tag)
		sum += since(began)
		// Helm waits only for a new pod that is ready.
		c.await(t, "the new pod to be alone", func() error { return d.only("virgate:" + tag) })
		c.awaitAllocatable(t, map[string]int64{shared: 32})
		ended = append(ended, time.Now())
	}
	cancel()
	busy.Wait()
	c.await(t, "the last pods to run", d.allRan)
	c.undisturbed(t, before)
	c.report.note("a rollout, on average", (sum / time.Duration(rollouts)).Round(10*time.Millisecond).String())
	c.judgeRollouts(t, d, first, ended, len(holders))
}

// judgeRollouts checks that the old and the new pod were ready together each time, that the kubelet had all
// shares or none, that it had none only between two plugins, and that it refused no pod at any other moment.
// The kubelet may process the new plugin's registration before it notices the old one's end, so this does
// not judge the number and length of those moments; test/speed measures Virgate's part.
func (c *cluster) judgeRollouts(t *testing.T, d *eventLog, began time.Time, ended []time.Time, holders int) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, wrong := range d.wrong {
		t.Error(wrong)
	}
	if d.stopped > 0 && d.lapses == 0 {
		t.Error("the node said that nobody serves it, while one took over from another")
	}
	// A pod whose probes have timed out is replaced without waiting for the new one.
	if d.overlaps == 0 || d.overlaps+d.lapses < rollouts {
		t.Errorf("old and new were ready together in %d of %d rollouts, and %d times one was not ready that was to stay", d.overlaps, rollouts, d.lapses)
	}
	if len(d.kubeletStates) == 0 {
		t.Error("the kubelet never said what it has")
	}
	for _, state := range d.kubeletStates {
		if count := state.allocatable[shared]; count != 32 && count != 0 {
			t.Errorf("at %s the kubelet had %v", state.at.Format(clock), state.allocatable)
		}
	}
	log := c.kubeletLog(t, began)
	var moments []time.Duration
	for _, g := range log.gaps {
		moments = append(moments, g.end.Sub(g.begin))
	}
	refused := 0
	for name, l := range d.pods {
		if l.refusal == "" {
			continue
		}
		refused++
		if !log.explains(name, l, ended) {
			t.Errorf("pod %s, bound %s, was refused %s: %s; the kubelet was without devices %v", name, l.bound.Format(clock), l.refused.Format(clock), l.refusal, log.gaps)
		}
	}
	c.report.note("rollouts, pods started meanwhile, refused in the moment of the handover", fmt.Sprintf("%d, %d, %d", rollouts, len(d.pods)-holders, refused))
	c.report.note("rollouts: moments in which the kubelet had no device", fmt.Sprint(moments))
	c.report.note("rollouts: times the node's status said 0", fmt.Sprint(count(d.statuses, func(s status) bool { return s.allocatable[shared] == 0 })))
}

// kubeletLog is what the kubelet's log says about the ends and starts of plugins, and about arriving pods.
// Line numbers give the order, which does not depend on the machine's speed.
type kubeletLog struct {
	gaps     []gap
	admitted []int          // Each pod that it began to look at and did not refuse.
	refused  map[string]int // By the pods' names.
}

// gap is the time between the end of one plugin's stream and the next one's first list. In it, the kubelet
// has no plugin for the shares.
type gap struct {
	begin, end       time.Time
	beginsAt, endsAt int
}

// explains reports whether the kubelet refused the pod because of a gap: in the gap, or so shortly before or
// after it that the kubelet admitted no other pod in between. The log has the end of a stream shortly after
// it happens, and a list shortly before it counts. An OutOf refusal goes by the kubelet's copy of the node's
// status, which may be older than the end of one rollout, but not of two.
func (k *kubeletLog) explains(name string, l *podRecord, rolloutsEnded []time.Time) bool {
	at, known := k.refused[name]
	if !known {
		return false
	}
	for _, g := range k.gaps {
		if strings.HasPrefix(l.refusal, outOf) {
			ended := 0
			for _, moment := range rolloutsEnded {
				if moment.After(g.end) && moment.Before(l.bound) {
					ended++
				}
			}
			if g.beginsAt < at && ended < 2 {
				return true
			}
			continue
		}
		from, to := min(at, g.beginsAt), max(at, g.endsAt)
		between := func(line int) bool { return from < line && line < g.beginsAt || g.endsAt < line && line < to }
		if !slices.ContainsFunc(k.admitted, between) {
			return true
		}
	}
	return false
}

func (g gap) String() string { return g.begin.Format(clock) + " to " + g.end.Format(clock) }

// kubeletLog reads the kubelet's log since then.
func (c *cluster) kubeletLog(t *testing.T, since time.Time) *kubeletLog {
	t.Helper()
	text, err := os.ReadFile(c.kubelet.log)
	if err != nil {
		t.Fatal(err)
	}
	k, came := &kubeletLog{refused: map[string]int{}}, map[string]int{}
	var begun gap
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		ended, list := strings.Contains(line, `"ListAndWatch ended unexpectedly`), strings.Contains(line, `"State pushed for device plugin"`)
		device := (ended || list) && strings.Contains(line, fmt.Sprintf(`resource=%q`, shared))
		comes, denied := strings.Contains(line, `"SyncLoop ADD"`), strings.Contains(line, `"Pod admission denied"`)
		if !device && !comes && !denied {
			continue
		}
		// Such as I1122 15:48:07.676210; it lacks the year.
		at, err := time.ParseInLocation("20060102 15:04:05.000000", since.Format("2006")+line[1:21], time.Local)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case at.Before(since):
		case comes:
			for _, match := range podInLog.FindAllStringSubmatch(line, -1) {
				came[match[1]] = number
			}
		case denied:
			for _, match := range podInLog.FindAllStringSubmatch(line, 1) {
				k.refused[match[1]] = number
			}
		case ended:
			begun = gap{begin: at, beginsAt: number}
		case !begun.begin.IsZero():
			begun.end, begun.endsAt = at, number
			k.gaps, begun = append(k.gaps, begun), gap{}
		}
	}
	for name, line := range came {
		if _, refused := k.refused[name]; !refused {
			k.admitted = append(k.admitted, line)
		}
	}
	return k
}

// podInLog is a pod of the tests in the kubelet's log.
var podInLog = regexp.MustCompile(`"` + workspace + `/([^"]+)"`)

// followTruth records what the kubelet has until the context ends.
func (d *eventLog) followTruth(ctx context.Context, kubelet api.PodResourcesListerClient) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if devices, err := healthy(ctx, kubelet); err == nil { // The kubelet refuses clients that ask too often.
			d.addKubeletState(devices)
		}
	}
}

func count(all []status, is func(status) bool) (found int) {
	for _, each := range all {
		if is(each) {
			found++
		}
	}
	return found
}

// startPods creates pods one after another until the context ends. It deletes each one when it runs or was
// refused and a few more have been created.
func (c *cluster) startPods(ctx context.Context, d *eventLog) {
	// Each pod takes two seconds of a processor: more of them would delay the test they run beside.
	tick, most := time.NewTicker(time.Duration(repeat.Times(1000, 100))*time.Millisecond), repeat.Times(6, 20)
	defer tick.Stop()
	pods := c.client.CoreV1().Pods(workspace)
	calls := context.WithoutCancel(ctx) // No call is cut off in the middle.
	var waiting []string
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if len(waiting) < most {
			one := pod(fmt.Sprintf("starting-%d", i), shared, 1)
			if _, err := pods.Create(calls, one, metav1.CreateOptions{}); err != nil {
				d.complain("create %s: %v", one.Name, err)
			}
			waiting = append(waiting, one.Name)
		}
		if len(waiting) > 4 && d.decided(waiting[0]) {
			d.deleting(waiting[0])
			if err := pods.Delete(calls, waiting[0], metav1.DeleteOptions{}); err != nil {
				d.complain("delete %s: %v", waiting[0], err)
			}
			waiting = waiting[1:]
		}
	}
}

// testFault has a GPU fail while pods hold its shares, and recover.
func testFault(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2", fourShares, "--probe=2s") // A probe sees heat, and the end of any fault.
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	before, plugin := c.podStates(t, c.hold(t, "holder", 2)), c.plugin(t)
	// What an operator's dashboard shows besides faults.
	c.simulate(t, plugin, "power", "--gpu", "0", "65")
	c.awaitSeries(t, plugin, "virgate_gpu_power_watts", "65")
	c.simulate(t, plugin, "throttle", "--gpu", "1", "hw_power_brake_slowdown")
	c.awaitSeries(t, plugin, "virgate_gpu_clocks_event_reason", "1", `reason="hw_power_brake_slowdown"`)
	for _, fault := range []struct {
		name   string
		inject []string
		says   string // What the event says about it.
		metric string
		labels []string
	}{
		{"XID", []string{"xid", "--gpu", "0", "79"}, "XID 79", "virgate_xid_events_total", []string{`action="fatal"`, `xid="79"`}},
		{"heat", []string{"temperature", "--gpu", "0", "95"}, "temperature at which the board slows it down", "virgate_health_transitions_total", []string{`cause="temperature"`, `to="unhealthy"`}},
	} {
		began := time.Now()
		c.simulate(t, plugin, fault.inject...)
		c.awaitAllocatable(t, map[string]int64{shared: 4})
		c.report.note("fault ("+fault.name+") to allocatable", took(began))
		message := c.awaitEvent(t, began, "GPUUnhealthy", "GPU 0", fault.says)
		c.awaitCondition(t, v1.ConditionTrue, "Serving", "8 devices, 4 healthy")
		c.awaitSeries(t, plugin, fault.metric, "1", fault.labels...)
		c.awaitSeries(t, plugin, "virgate_unit_health_state", "1", `state="unhealthy"`)
		c.awaitSeries(t, plugin, "virgate_listed_devices", "4", `resource="nvidia.com/gpu"`, `state="unhealthy"`)

		// A pod that starts now gets the other GPU.
		for name, started := range c.podStates(t, c.hold(t, strings.ToLower(fault.name), 1)) {
			if strings.Contains(message, started.GPU) {
				t.Errorf("pod %s was given the GPU of which an event had said: %s", name, message)
			}
		}

		began = time.Now()
		c.simulate(t, plugin, "heal", "--gpu", "0")
		c.awaitAllocatable(t, all)
		c.report.note("heal ("+fault.name+") to allocatable", took(began))
		c.awaitEvent(t, began, "GPURecovered", "GPU 0", fault.says)
		c.awaitCondition(t, v1.ConditionTrue, "Serving", "8 devices, 8 healthy")
		c.awaitSeries(t, plugin, "virgate_listed_devices", "0", `resource="nvidia.com/gpu"`, `state="unhealthy"`)
		c.undisturbed(t, before)
	}
}
