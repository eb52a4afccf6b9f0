package e2e

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/virgate/virgate/test/repeat"
)

// The parts below count the pods that the kubelet refuses because the scheduler bound them by an outdated
// number. Their kubelet reports its node every 10 s, which is the default.

const (
	kubeletPeriod = "10s"
	perSecond     = 4
)

// How long the scheduler and the kubelet take for a pod depends on the machine, and so does the number of
// pods that the kubelet may refuse during a storm in CI. In CI, a change may cost the pods of a moment, but
// not a queue.

// stormSize is how many pods a storm has.
var stormSize = repeat.Times(60, 500)

func testRefusals(t *testing.T, c *cluster) {
	c.kubeletReports(t, kubeletPeriod)
	t.Run("upgrades", func(t *testing.T) { testUpgradeStorm(t, c) })
	t.Run("kills", func(t *testing.T) { testKillStorm(t, c) })
	t.Run("renames", func(t *testing.T) { testRenameStorm(t, c) })
	t.Run("switches", func(t *testing.T) { testSwitchesOfFullNode(t, c) })
	t.Run("death after lowering", func(t *testing.T) { testDeathAfterLowering(t, c) })
}

// during creates the queue's pods while play runs, at least as many as a storm has.
func (q *podQueue) during(t *testing.T, lasts time.Duration, most int, resources []string, play func(more func() bool)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var flowing sync.WaitGroup
	defer flowing.Wait()
	defer cancel()
	failed := make(chan error, 1)
	flowing.Go(func() { failed <- q.flow(ctx, perSecond, lasts, most, resources...) })
	play(func() bool { return len(q.those(isBound)) < stormSize })
	cancel()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// testUpgradeStorm rolls the DaemonSet from one version to another again and again under a stream of pods.
// One version announces its end before the next starts.
func testUpgradeStorm(t *testing.T, c *cluster) {
	all := map[string]int64{shared: 32}
	c.install(t, "node=sim:dgx-a100", fourShares)
	c.awaitAllocatable(t, all)
	q, rollouts, began := c.newQueue(t, "upgraded", false), 0, time.Now()
	q.during(t, 2*time.Second, 16, []string{shared}, func(more func() bool) {
		for more() {
			rollouts++
			c.install(t, "node=sim:dgx-a100", fourShares, "image.tag="+[]string{version, nextVersion}[rollouts%2])
			c.plugin(t) // The old one is gone.
			c.awaitAllocatable(t, all)
		}
	})
	came := c.noteGaps(t, "upgrades", began)
	q.judge(t, fmt.Sprintf("%d upgrades", rollouts), repeat.Times(came, 1))
}

// testKillStorm kills Virgate again and again under a stream of pods, with a standby.
func testKillStorm(t *testing.T, c *cluster) {
	c.expectRestarts(t)
	all := map[string]int64{shared: 32}
	c.install(t, "node=sim:dgx-a100", fourShares, "standby.enabled=true")
	c.awaitAllocatable(t, all)
	q, kills, began := c.newQueue(t, "killed", false), 0, time.Now()
	q.during(t, 2*time.Second, 16, []string{shared}, func(more func() bool) {
		for more() {
			var victim int
			c.await(t, "both containers to be ready", func() error {
				for _, status := range c.plugin(t).Status.ContainerStatuses {
					if !status.Ready {
						return fmt.Errorf("%s is not", status.Name)
					}
				}
				ran := c.virgates(t)
				if victim = serving(t); len(ran) != 2 || !slices.Contains(ran, victim) {
					return fmt.Errorf("there are %v, and %d serves", ran, victim)
				}
				return nil
			})
			if err := syscall.Kill(victim, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			kills++
			c.await(t, "the other one to serve", func() error {
				if next := serving(t); next == 0 || next == victim {
					return errNotYet
				}
				return nil
			})
			c.awaitAllocatable(t, all)
		}
	})
	came := c.noteGaps(t, "kills with a standby", began)
	q.judge(t, fmt.Sprintf("%d kills with a standby", kills), came)
}

// noteGaps notes how long the kubelet was without a plugin, for each gap since then. It returns how many
// pods came in the gaps at most, and adds one per gap for a pod that was bound just before.
func (c *cluster) noteGaps(t *testing.T, what string, since time.Time) (came int) {
	t.Helper()
	var moments []time.Duration
	for _, g := range c.kubeletLog(t, since).gaps {
		moment := g.end.Sub(g.begin)
		moments = append(moments, moment.Round(time.Millisecond))
		came += int(math.Ceil(perSecond*moment.Seconds())) + 1
	}
	c.report.note(what+": the kubelet was without devices for", fmt.Sprint(moments))
	return came
}

// testRenameStorm switches between whole GPUs and shares of another name about once a second under a
// stream of pods for both names.
func testRenameStorm(t *testing.T, c *cluster) {
	switches := repeat.Times(12, 60)
	const renamed = shared + ".shared"
	c.offersProfiles(t, "sim:dgx-a100", "exclusive")
	c.awaitAllocatable(t, map[string]int64{shared: 8})
	q := c.newQueue(t, "renamed", false)
	q.during(t, time.Second, 16, []string{shared, renamed}, func(func() bool) {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for i := range switches {
			c.label(t, []string{"renamed", "exclusive"}[i%2])
			<-tick.C
		}
	})
	q.judge(t, fmt.Sprintf("%d switches exclusive to renamed and back", switches), repeat.Times(switches, 2))
}

// refusalProfiles is the name of the ConfigMap.
const refusalProfiles = "refusals"

// offersProfiles installs Virgate with profiles of all kinds; the node begins with first.
func (c *cluster) offersProfiles(t *testing.T, node, first string, settings ...string) {
	t.Helper()
	const byMPS = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	layout := func(name string) string {
		return "version: v1\nflags: {migStrategy: mixed}\nmig: {manage: true, config: " + name + "}\n"
	}
	texts := map[string]string{
		"mps": byMPS, "mps-dra": byMPS + "dra: {resources: all}\n", "dra": "version: v1\ndra: {resources: all}\n",
		"small": layout("all-1g.10gb"), "balanced": layout("all-balanced"),
	}
	for name, text := range transitionTexts {
		texts[name] = text
	}
	c.createNamespace(t, namespace)
	c.profiles(t, refusalProfiles, texts)
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, first)
	c.install(t, append([]string{"node=" + node, "config.name=" + refusalProfiles}, settings...)...)
}

// fullSwitch is a switch of a node on which every device is held and pods wait for more.
type fullSwitch struct {
	name     string
	from, to string
	// offersBefore and offers are what the device plugin offers with each of the profiles.
	offersBefore, offers map[string]int64
	resource             string // of the holders and the waiting pods
	most                 int    // of refused pods in a round
	runs                 bool   // The pods' containers start, because DRA drivers only then learn of a claim.
	raises               bool   // There are more devices at once, which waiting pods get.
	inCI                 bool
}

// testSwitchesOfFullNode runs every kind of switch many times.
func testSwitchesOfFullNode(t *testing.T, c *cluster) {
	const renamed = shared + ".shared"
	gpus := func(count int64) map[string]int64 { return map[string]int64{shared: count} }
	none := map[string]int64{}
	for _, group := range []struct {
		name, node string
		settings   []string
		nightly    bool // not in CI
		mps        bool
		switches   []fullSwitch
	}{
		{name: "time-slicing", node: "sim:t4x4", switches: []fullSwitch{
			{name: "exclusive to x4 (growth)", from: "exclusive", to: "four", offersBefore: gpus(4), offers: gpus(16), resource: shared, inCI: true},
			{name: "x4 to exclusive", from: "four", to: "exclusive", offersBefore: gpus(16), offers: gpus(4), resource: shared, most: 1, inCI: true},
			{name: "exclusive to renamed", from: "exclusive", to: "renamed", offersBefore: gpus(4), offers: map[string]int64{renamed: 16}, resource: shared, inCI: true},
			{name: "renamed to exclusive", from: "renamed", to: "exclusive", offersBefore: map[string]int64{renamed: 16}, offers: gpus(4), resource: renamed},
			{name: "x4 to x10", from: "four", to: "ten", offersBefore: gpus(16), offers: gpus(40), resource: shared, raises: true},
			{name: "x10 to x4", from: "ten", to: "four", offersBefore: gpus(40), offers: gpus(16), resource: shared, most: 1},
		}},
		{name: "MPS", node: "sim:t4x4", nightly: true, mps: true, switches: []fullSwitch{
			{name: "exclusive to MPS", from: "exclusive", to: "mps", offersBefore: gpus(4), offers: gpus(16), resource: shared, most: 1},
			{name: "MPS to exclusive", from: "mps", to: "exclusive", offersBefore: gpus(16), offers: gpus(4), resource: shared, most: 1},
			{name: "x4 to MPS", from: "four", to: "mps", offersBefore: gpus(16), offers: gpus(16), resource: shared, most: 1},
		}},
		{name: "DRA", node: "sim:t4x2", nightly: true, mps: true, settings: []string{"dra.enabled=true", "dra.resources={" + shared + "}", "--cdi-dir=/var/run/cdi"}, switches: []fullSwitch{
			{name: "exclusive to DRA", from: "exclusive", to: "dra", offersBefore: gpus(2), offers: none, resource: shared, runs: true, most: 1},
			{name: "DRA to exclusive", from: "dra", to: "exclusive", offersBefore: none, offers: gpus(2), resource: shared, runs: true, most: 1},
			{name: "MPS to MPS by DRA (dra_mps)", from: "mps", to: "mps-dra", offersBefore: gpus(8), offers: none, resource: shared, runs: true, most: 1},
			{name: "MPS by DRA to MPS", from: "mps-dra", to: "mps", offersBefore: none, offers: gpus(8), resource: shared, runs: true, most: 1},
		}},
		{name: "MIG", node: "sim:h100x2+all-1g.10gb", nightly: true, settings: []string{"mig.manage=true"}, switches: []fullSwitch{
			{
				name: "MIG layout, smaller to larger", from: "small", to: "balanced",
				offersBefore: map[string]int64{"nvidia.com/mig-1g.10gb": 14},
				offers:       map[string]int64{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2},
				resource:     "nvidia.com/mig-1g.10gb", most: 1,
			},
			{
				name: "MIG layout, larger to smaller", from: "balanced", to: "small",
				offersBefore: map[string]int64{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2},
				offers:       map[string]int64{"nvidia.com/mig-1g.10gb": 14},
				resource:     "nvidia.com/mig-1g.10gb", most: 1,
			},
		}},
	} {
		if group.nightly && !repeat.All() {
			continue
		}
		t.Run(group.name, func(t *testing.T) {
			settings := slices.Clone(group.settings)
			if group.mps {
				settings = append(settings, "mps.enabled=true", "nvidiaDriverRoot="+c.mpsDriver(t))
				t.Cleanup(func() { // After the chart and its daemons are gone.
					c.uninstall(t)
					removeMPSRoot(t)
				})
			}
			c.offersProfiles(t, group.node, group.switches[0].from, settings...)
			for i, each := range group.switches {
				if each.inCI || repeat.All() {
					c.switchFullNode(t, fmt.Sprintf("full-%s-%d", strings.ToLower(group.name), i), each)
				}
			}
		})
	}
}

// switchFullNode runs the switch again and again, each time back with an empty node.
func (c *cluster) switchFullNode(t *testing.T, name string, s fullSwitch) {
	t.Helper()
	q := c.newQueue(t, name, s.runs)
	waiting := 30
	if s.runs {
		waiting = 6 // Those that get a device start a container.
	}
	kubelet := c.kubeletSays(t)
	rounds := repeat.Times(1, 20)
	var untilBound []time.Duration
	for range rounds {
		c.label(t, s.from)
		// The numbers alone may come from the previous profile, or from a GPU that has not changed yet.
		c.awaitProfile(t, s.from, "applied")
		c.awaitAllocatable(t, s.offersBefore)
		devices := int(s.offersBefore[s.resource])
		if len(s.offersBefore) == 0 { // By DRA, as many as the plugin otherwise has.
			devices = int(s.offers[s.resource])
		}
		q.must(t, q.add(t.Context(), s.resource, devices+waiting))
		c.await(t, "all devices to be held", func() error {
			err := q.look(t.Context())
			if held := len(q.those(holds)); err == nil && held < devices {
				err = fmt.Errorf("%d of %d are; %s", held, devices, granted(t, kubelet))
			}
			return err
		})
		holders := q.those(holds)

		began := time.Now()
		c.label(t, s.to)
		if s.raises {
			c.await(t, "one of those who wait to be bound", func() error {
				if err := q.look(t.Context()); err != nil || len(q.those(isBound)) > devices {
					return err
				}
				return errNotYet
			})
			untilBound = append(untilBound, since(began))
		}
		// The first holder ends a second later, the others one by one.
		end := time.NewTicker(time.Second)
		for _, holder := range holders {
			<-end.C
			q.must(t, q.end(t.Context(), holder))
			end.Reset(max(50*time.Millisecond, 2*time.Second/time.Duration(len(holders))))
		}
		end.Stop()
		c.awaitAllocatable(t, s.offers)
		q.must(t, q.settle(t.Context()))
		q.clear(t)
	}
	if s.raises {
		reportTimes(c, s.name+": label to bound pod, median and worst", untilBound)
	}
	q.judge(t, fmt.Sprintf("%s, %d times", s.name, rounds), rounds*s.most)
}

// granted lists the devices that the kubelet can grant or has granted, and each pod's devices.
func granted(t *testing.T, kubelet api.PodResourcesListerClient) string {
	devices, err := healthy(t.Context(), kubelet)
	if err != nil {
		return err.Error()
	}
	pods, err := holdings(t.Context(), kubelet)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("the kubelet has %v, and pods hold %v", devices, pods)
}

// must ends the test with the error.
func (q *podQueue) must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// testDeathAfterLowering kills Virgate after it has told the API server of fewer devices and before it
// tells the kubelet, and starts no other. After the kubelet's next report, the Node has the kubelet's
// number.
func testDeathAfterLowering(t *testing.T, c *cluster) {
	c.offersProfiles(t, "sim:t4x2", "ten", stays)
	c.awaitAllocatable(t, map[string]int64{shared: 20})
	c.expectRestarts(t)
	plugin, victim, sets := c.plugin(t), serving(t), c.client.AppsV1().DaemonSets(namespace)
	orphan := metav1.DeletePropagationOrphan
	if err := sets.Delete(t.Context(), "virgate", metav1.DeleteOptions{PropagationPolicy: &orphan}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.uninstall(t) }) // An upgrade would miss the DaemonSet.
	c.await(t, "the DaemonSet to go", func() error {
		if _, err := sets.Get(t.Context(), "virgate", metav1.GetOptions{}); err == nil {
			return errNotYet
		}
		return nil
	})
	// lowered waits for the number on the Node, stops the program, and reports whether the program had
	// already told the kubelet, as happens on a machine that is too busy.
	lowered := func() (told bool) {
		changes, err := c.client.CoreV1().Nodes().Watch(t.Context(), metav1.ListOptions{
			ResourceVersion: c.node(t).ResourceVersion,
			FieldSelector:   fields.OneTermEqualSelector("metadata.name", hostName).String(),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer changes.Stop()
		lists := c.pushedLists(t)
		c.label(t, "four")
		for event := range changes.ResultChan() {
			node, ok := event.Object.(*v1.Node)
			if !ok {
				t.Fatalf("the watch says %v", event)
			}
			if offered(node.Status.Allocatable)[shared] == 8 {
				break
			}
		}
		if err := syscall.Kill(victim, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		return c.pushedLists(t) != lists
	}
	for lowered() {
		if err := syscall.Kill(victim, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		c.label(t, "ten")
		c.awaitAllocatable(t, map[string]int64{shared: 20})
	}
	killed := syscall.Kill(victim, syscall.SIGKILL)
	began, now := time.Now(), int64(0)
	err := c.client.CoreV1().Pods(namespace).Delete(t.Context(), plugin.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if err := errors.Join(killed, err); err != nil {
		t.Fatal(err)
	}
	// Its plugin is gone, so the kubelet has 0 devices; 8 is a number that it never had.
	c.await(t, "the kubelet's own number", func() error {
		if got := offered(c.node(t).Status.Allocatable)[shared]; got != 0 {
			return fmt.Errorf("allocatable is %d", got)
		}
		return nil
	})
	c.report.note("Virgate dies after its lowering patch: until the Node had the kubelet's number, which reports every "+kubeletPeriod, took(began))
}

// pushedLists counts the lists that the kubelet was sent, by the kubelet's log.
func (c *cluster) pushedLists(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(c.kubelet.log)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), `"State pushed for device plugin"`)
}
