package e2e

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// rollouts is how often one version takes over from another.
const rollouts = 4

// handover is how long the kubelet may be without a plugin when one takes over from
// another: it drops the devices when the connection of the one ends, and takes a
// registration only after that.
const handover = 5 * time.Second

// testRollout rolls the DaemonSet to another version and back while pods start
// and end all the time.
func testRollout(t *testing.T, c *cluster) {
	c.install(t, "node=sim:dgx-a100")
	c.offers(t, map[string]int64{shared: 32})
	holders := c.hold(t, "holder", 4)
	before := c.vitals(t, holders)
	d := c.keepDiary(t)
	t.Cleanup(func() { c.clear(t) })
	kubelet := c.kubeletSays(t)
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	busy.Go(func() { c.startPods(ctx, d) })
	busy.Go(func() { d.followTruth(ctx, kubelet) })
	// Whatever ends the test, nobody writes to it after.
	defer busy.Wait()
	defer cancel()

	took := time.Duration(0)
	for i := range rollouts {
		tag := []string{nextVersion, version}[i%2]
		began := time.Now()
		c.install(t, "node=sim:dgx-a100", "image.tag="+tag)
		took += time.Since(began)
		if got, want := c.plugin(t).Spec.Containers[0].Image, "virgate:"+tag; got != want {
			t.Fatalf("after the rollout %s runs, want %s", got, want)
		}
	}
	c.awaitAllocatable(t, map[string]int64{shared: 32})
	cancel()
	busy.Wait()
	c.await(t, time.Minute, "the last pods to run", d.allRan)
	c.undisturbed(t, before)
	c.report.note("a rollout, on average", (took / rollouts).Round(10*time.Millisecond).String())
	c.judgeRollouts(t, d, len(holders))
}

// judgeRollouts says that old and new were ready together each time, that the
// kubelet had all shares but for one short moment each time, and that no pod was
// refused at any other moment.
func (c *cluster) judgeRollouts(t *testing.T, d *diary, holders int) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, wrong := range d.wrong {
		t.Error(wrong)
	}
	if d.overlaps < rollouts {
		t.Errorf("old and new were ready together in %d of %d rollouts", d.overlaps, rollouts)
	}
	var moments []time.Duration
	for i, truth := range d.truths {
		switch {
		case truth.allocatable[shared] == 32:
		case truth.allocatable[shared] == 0 && i > 0 && i+1 < len(d.truths):
			moments = append(moments, d.truths[i+1].at.Sub(truth.at))
		default:
			t.Errorf("at %s the kubelet had %v", truth.at.Format(clock), truth.allocatable)
		}
	}
	if len(moments) > rollouts || slices.ContainsFunc(moments, func(m time.Duration) bool { return m > handover }) {
		t.Errorf("in %d rollouts the kubelet was without devices for %v", rollouts, moments)
	}
	refused := 0
	for name, l := range d.lives {
		if l.refusal == "" {
			continue
		}
		refused++
		if !slices.ContainsFunc(d.truths, func(s status) bool {
			return s.allocatable[shared] == 0 && s.at.After(l.bound.Add(-handover)) && s.at.Before(l.refused)
		}) {
			t.Errorf("pod %s, bound %s, was refused: %s", name, l.bound.Format(clock), l.refusal)
		}
	}
	c.report.note("rollouts, pods started meanwhile, refused in the moment of the handover", fmt.Sprintf("%d, %d, %d", rollouts, len(d.lives)-holders, refused))
	c.report.note("rollouts: moments in which the kubelet had no device", fmt.Sprint(moments))
	c.report.note("rollouts: times the node's status said 0", fmt.Sprint(count(d.statuses, func(s status) bool { return s.allocatable[shared] == 0 })))
}

// followTruth looks what the kubelet has until the context ends.
func (d *diary) followTruth(ctx context.Context, kubelet api.PodResourcesListerClient) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		devices, err := healthy(ctx, kubelet)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			d.complain("the kubelet does not say what it has: %v", err)
			continue
		}
		d.takeTruth(devices)
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

// startPods creates pods one after another until the context ends, and deletes each
// when it runs or was refused, and a few more have been created.
func (c *cluster) startPods(ctx context.Context, d *diary) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	pods := c.client.CoreV1().Pods(workspace)
	calls := context.WithoutCancel(ctx) // None is cut off in the middle.
	var waiting []string
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if len(waiting) < 20 {
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
