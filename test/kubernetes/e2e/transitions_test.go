package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/repeat"
)

// transitionMap is the ConfigMap of the profiles below.
const transitionMap = "transitions"

var transitionTexts = map[string]string{
	"exclusive": "version: v1\n",
	"four":      replicas("4"),
	"ten":       replicas("10"),
	"renamed":   replicas("4") + "      rename: nvidia.com/gpu.shared\n",
}

// allGPUs returns the layout of such a profile.
func allGPUs(profile string) layout {
	switch profile {
	case "exclusive":
		return layout{{"nvidia.com/gpu", false}: alike(1, 0, 8)}
	case "ten":
		return layout{{"nvidia.com/gpu", true}: alike(10, 0, 8)}
	case "renamed":
		return layout{{"nvidia.com/gpu.shared", true}: alike(4, 0, 8)}
	}
	return layout{{"nvidia.com/gpu", true}: alike(4, 0, 8)}
}

// beginExclusive installs Virgate on eight whole GPUs and follows them.
func (s *storm) beginExclusive(t *testing.T) {
	t.Helper()
	s.c.createNamespace(t, namespace)
	s.c.profiles(t, transitionMap, transitionTexts)
	s.c.label(t, "exclusive")
	t.Cleanup(func() { s.c.label(t, "") })
	s.c.install(t, "node=sim:dgx-a100", "config.name="+transitionMap, stays)
	s.layout = allGPUs("exclusive")
	s.c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 8})
	s.follow(t, units(t, s.kubelet, "nvidia.com/gpu"))
}

// label sets the node's label to such a profile.
func (s *storm) label(t *testing.T, profile, name string) *switching {
	t.Helper()
	s.goTo(name, allGPUs(profile))
	s.c.label(t, profile)
	return &s.switches[len(s.switches)-1]
}

// testTransitions measures each kind of switch, from the label to the node's status, while pods come and go.
// No switch waits for the removal delay. The times only go into the report, because they depend as much on
// the machine.
func testTransitions(t *testing.T, c *cluster) {
	const crowd = 3
	rounds := repeat.Times(8, 20)
	s := newStorm(t, c, "transitions", 8*time.Second, 16*time.Second) // Few enough that neverNone has something to judge.
	s.beginExclusive(t)
	var nextPod time.Time
	// until lets pods come and go until the condition holds.
	until := func(condition func() bool) {
		s.c.await(t, "the node to offer what it is to offer", func() error {
			if condition() {
				return nil
			}
			now := time.Now()
			if now.After(nextPod) && len(s.leaving) < crowd {
				s.addPod(t)
				nextPod = now.Add(s.between(0, time.Second))
			}
			s.removePods(t, now)
			s.most = max(s.most, s.events.running())
			return fmt.Errorf("it wants %v", s.wanted())
		})
	}
	kinds := []struct{ to, name string }{
		{"four", "exclusive to 4 replicas"}, {"ten", "4 to 10 replicas"}, {"four", "10 to 4 replicas"},
		{"renamed", "to another name"}, {"four", "to the first name"}, {"exclusive", "4 replicas to exclusive"},
	}
	times := map[string][]time.Duration{}
	for range rounds {
		for _, kind := range kinds {
			// The label is set at any moment of the kubelet's status period.
			begins := time.Now().Add(s.between(0, time.Second))
			until(func() bool { return time.Now().After(begins) })
			each := s.label(t, kind.to, kind.name)
			// The status is up to one period old: it may count pods that have ended meanwhile.
			var right []map[string]int64
			until(func() bool {
				right = append(right, s.wanted())
				return slices.ContainsFunc(right, s.events.offers)
			})
			each.shown = time.Now()
			times[kind.name] = append(times[kind.name], each.shown.Sub(each.at))
		}
		s.rest()
	}
	s.end(t)
	s.neverNone(t)
	for _, kind := range kinds {
		reportTimes(c, fmt.Sprintf("%s: label to allocatable, median and worst of %d", kind.name, rounds), times[kind.name])
	}
}

// reportTimes notes the median and the worst.
func reportTimes(c *cluster, what string, times []time.Duration) {
	slices.Sort(times)
	median, worst := times[len(times)/2], times[len(times)-1]
	c.report.note(what, fmt.Sprintf("%s, %s", median.Round(10*time.Millisecond), worst.Round(10*time.Millisecond)))
}

// offers reports whether the node's status has exactly these devices.
func (d *eventLog) offers(want map[string]int64) bool {
	got := maps.Clone(d.newest())
	maps.DeleteFunc(got, func(_ string, count int64) bool { return count == 0 })
	return got != nil && maps.Equal(want, got)
}

// neverNone checks that a resource which keeps its name in a switch was always there during it, if at least
// two GPUs were free.
func (s *storm) neverNone(t *testing.T) {
	t.Helper()
	s.events.mu.Lock()
	defer s.events.mu.Unlock()
	fewest, judged := map[string]int64{}, 0
	for i, each := range s.switches {
		// Virgate has taken up one of the two previous switches only after it asked for the holders.
		var known time.Time
		if i >= 2 {
			known = s.switches[i-2].at
		}
		for _, resource := range stormResources {
			if each.from.devices(resource) == 0 || each.to.devices(resource) == 0 {
				continue
			}
			for who, statuses := range map[string][]status{"the node's status": s.events.statuses, "the kubelet": s.events.kubeletStates} {
				for _, status := range statuses {
					if status.at.Before(each.at) || status.at.After(each.shown) {
						continue
					}
					count := status.allocatable[resource]
					free := s.monitor.free(known, status.at)
					if free > 1 {
						judged++
					}
					if count == 0 && free > 1 {
						t.Errorf("%s, %s after the label: %s has no %s, and %d GPUs were free", each.name, status.at.Sub(each.at), who, resource, free)
					}
					if least, found := fewest[each.name]; !found || count < least {
						fewest[each.name] = count
					}
				}
			}
		}
	}
	s.c.report.note("statuses while a name stays and GPUs are free, none of them 0", fmt.Sprint(judged))
	for _, name := range slices.Sorted(maps.Keys(fewest)) {
		s.c.report.note(name+": allocatable meanwhile, at least", fmt.Sprint(fewest[name]))
	}
}

// devices counts the layout's devices of the resource.
func (l layout) devices(resource string) (count int) {
	for mode, counts := range l {
		for _, each := range counts {
			if mode.resource == resource {
				count += each
			}
		}
	}
	return count
}

// testQueue switches a full node while many pods wait. Each GPU must change when its holders end, and not
// go to the next pod in the old mode.
func testQueue(t *testing.T, c *cluster) {
	waiting, lasts := repeat.Times(12, 40), time.Duration(repeat.Times(4, 10))*time.Second
	s := newStorm(t, c, "queue", lasts, lasts+1)
	s.beginExclusive(t)
	// until keeps this many pods waiting, and ends those that have run long enough, until the condition
	// holds.
	until := func(what string, condition func() bool) {
		s.c.await(t, what, func() error {
			if condition() {
				return nil
			}
			for range s.events.waiting(waiting) {
				s.queue(t)
			}
			for name := range s.leaving {
				s.leaving[name] = s.events.endsAfter(name, lasts)
			}
			s.removePods(t, time.Now())
			s.most = max(s.most, s.events.running())
			newest := s.monitor.last()
			return fmt.Errorf("pods hold %v at %s, the kubelet has healthy %v, and the node's status %v",
				s.monitor.counts(), newest.at.Format(clock), newest.healthy, s.events.newest())
		})
	}
	for _, each := range []struct{ to, name string }{{"four", "exclusive to 4 replicas"}, {"exclusive", "4 replicas to exclusive"}} {
		mode := onlyMode(s.layout)
		until("every GPU to be held", func() bool {
			counts := s.monitor.counts()[mode]
			return !slices.Contains(counts[:], 0) && s.events.waiting(waiting) == 0
		})
		began := time.Now()
		s.label(t, each.to, each.name)
		until(each.name, func() bool { return s.events.offers(s.wanted()) && s.monitor.changed(mode) })
		s.handovers(t, began, mode, each.name)
		s.rest()
	}
	s.end(t)
}

// queue creates a pod that waits for a GPU or a share of one.
func (s *storm) queue(t *testing.T) {
	t.Helper()
	one := pod(fmt.Sprintf("%s-%d", s.name, s.created), shared, 1)
	s.events.expect(one.Name)
	if _, err := s.c.client.CoreV1().Pods(workspace).Create(t.Context(), one, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.created++
	s.leaving[one.Name] = time.Now().Add(time.Hour)
}

// expect counts the pod before the API server reports it.
func (d *eventLog) expect(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pods[name] = &podRecord{}
}

// waiting returns how many pods are missing from this number of waiting ones.
func (d *eventLog) waiting(want int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, l := range d.pods {
		if l.bound.IsZero() && l.ended.IsZero() && !l.beingDeleted {
			want--
		}
	}
	return max(0, want)
}

// endsAfter returns when a pod has run this long; in an hour if it does not run.
func (d *eventLog) endsAfter(name string, lasts time.Duration) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	if ran := d.pods[name].ran; !ran.IsZero() {
		return ran.Add(lasts)
	}
	return time.Now().Add(time.Hour)
}

// changed reports whether in the newest look every GPU is offered, and none is held or offered in that
// mode. The node's status may be ahead of it.
func (f *shareMonitor) changed(from sharingMode) bool {
	newest, offered := f.last(), map[string]bool{}
	for _, devices := range newest.held {
		if slices.ContainsFunc(devices, func(d heldDevice) bool { return d.sharingMode == from }) {
			return false
		}
	}
	for _, devices := range newest.healthy {
		for _, device := range devices {
			if device.sharingMode == from {
				return false
			}
			offered[device.unit] = true
		}
	}
	return len(offered) == len(f.units)
}

// newest is the newest status of the node.
func (d *eventLog) newest() map[string]int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.statuses) == 0 {
		return nil
	}
	return d.statuses[len(d.statuses)-1].allocatable
}

// onlyMode returns the mode of a layout that has one.
func onlyMode(l layout) sharingMode {
	for mode := range l {
		return mode
	}
	return sharingMode{}
}

// handovers checks what the monitor saw since a switch away from the mode. Once the kubelet shows no device
// of a GPU as healthy in the old mode, it must not show one again, and none of them may get another holder.
// Two pods may have had one before; see alone. It notes how long after the end of its last holder each GPU
// was offered in the new mode.
func (s *storm) handovers(t *testing.T, began time.Time, mode sharingMode, name string) {
	t.Helper()
	s.monitor.mu.Lock()
	defer s.monitor.mu.Unlock()
	var times []time.Duration
	for _, unit := range s.monitor.units {
		withdrawn := false
		var ended, offered time.Time
		holders := map[string][]string{} // by device
		for _, look := range s.monitor.looks {
			if look.at.Before(began) {
				continue
			}
			now := map[string][]string{}
			for pod, devices := range look.held {
				for _, device := range devices {
					if device.unit == unit && device.sharingMode == mode {
						now[device.id] = append(now[device.id], pod)
					}
				}
			}
			for id, pods := range now {
				ended = look.at
				if !withdrawn {
					continue
				}
				if holders[id] == nil {
					holders[id] = pods
				}
				for _, pod := range pods {
					if !slices.Contains(holders[id], pod) {
						t.Errorf("%s: %s went from pods %q to pod %s after its mode had ended", name, id, holders[id], pod)
						holders[id] = append(holders[id], pod)
					}
				}
			}
			old, others := 0, 0
			for _, devices := range look.healthy {
				for _, device := range devices {
					switch {
					case device.unit != unit:
					case device.sharingMode == mode:
						old++
					default:
						others++
					}
				}
			}
			switch {
			case old == 0:
				withdrawn = true
			case withdrawn:
				t.Errorf("%s: %s is offered in the old mode again, %s after the label", name, unit, look.at.Sub(began))
			}
			if others > 0 && offered.IsZero() {
				offered = look.at
			}
		}
		if !withdrawn || offered.IsZero() || offered.Before(ended) {
			t.Errorf("%s: %s was not handed over: held until %s, offered anew %s", name, unit, ended.Format(clock), offered.Format(clock))
			continue
		}
		times = append(times, offered.Sub(ended))
	}
	if len(times) > 0 {
		reportTimes(s.c, "full node, "+name+": last holder's end to the GPU's new mode, median and worst", times)
	}
}

// testRepartitioning gives two H100 other MIG layouts by the node's label. The driver takes a second to
// create a GPU instance.
func testRepartitioning(t *testing.T, c *cluster) {
	const driver = time.Second
	text := func(layout string) string {
		return "version: v1\nflags:\n  migStrategy: mixed\nmig:\n  manage: true\n  config: " + layout + "\n"
	}
	c.createNamespace(t, namespace)
	c.profiles(t, "layouts", map[string]string{"small": text("all-1g.10gb"), "balanced": text("all-balanced")})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "small")
	c.install(t, "node=sim:h100x2+all-1g.10gb", "config.name=layouts")
	c.awaitAllocatable(t, map[string]int64{"nvidia.com/mig-1g.10gb": 14})
	for gpu := range 2 {
		c.simulate(t, c.plugin(t), "slow", "--gpu", strconv.Itoa(gpu), "DeviceCreateGpuInstanceWithPlacement", strconv.FormatInt(driver.Milliseconds(), 10))
	}
	for _, each := range []struct {
		profile string
		made    int
		want    map[string]int64
	}{
		{"balanced", 4, map[string]int64{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2}},
		{"small", 10, map[string]int64{"nvidia.com/mig-1g.10gb": 14}},
	} {
		began := time.Now()
		c.label(t, each.profile)
		c.awaitAllocatable(t, each.want)
		took, drivers := since(began), time.Duration(each.made)*driver
		c.report.note(fmt.Sprintf("two H100 to layout %s, %d instances made: label to allocatable, without %s of the driver", each.profile, each.made, drivers),
			(took - drivers).Round(10*time.Millisecond).String())
	}
	besideMIGManager(t, c)
}

// besideMIGManager does what NVIDIA's mig-manager does to a node that has fourteen 1g.10gb on two H100.
// Virgate makes no layout beside it, releases the GPUs while it is at work, and makes the layouts again
// when it is gone.
func besideMIGManager(t *testing.T, c *cluster) {
	const deploy, plugin, state = "nvidia.com/gpu.deploy.mig-manager", "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/mig.config.state"
	t.Cleanup(func() { c.setLabels(t, "", map[string]any{deploy: nil, plugin: nil, state: nil}) })
	small := map[string]int64{"nvidia.com/mig-1g.10gb": 14}
	c.setLabels(t, "gpu-operator", map[string]any{deploy: "true"})
	c.awaitCondition(t, v1.ConditionTrue, "Serving", deploy+" of node "+hostName+" is true")
	c.setLabels(t, "nvidia-mig-manager", map[string]any{state: "pending", plugin: "paused-for-mig-change"})
	c.label(t, "balanced")
	c.awaitCondition(t, v1.ConditionFalse, "PausedForMIGChange", plugin)
	c.awaitAllocatable(t, map[string]int64{})
	c.await(t, "GPU 0 to be closed, so that it can be reset", func() error {
		return c.trySimulate(t, c.plugin(t), "reset", "--gpu", "0")
	})
	c.setLabels(t, "nvidia-mig-manager", map[string]any{state: "success", plugin: "true"})
	half := map[string]int64{"nvidia.com/mig-1g.10gb": 7} // A reset removes the partitions.
	c.awaitAllocatable(t, half)
	c.awaitProfile(t, "balanced", "applied")
	if now := c.node(t); differs(half, now.Status.Allocatable) != nil || now.Labels[state] != "success" {
		t.Errorf("beside mig-manager the node has %v and says %q; want what that has made and said", offered(now.Status.Allocatable), now.Labels[state])
	}
	c.setLabels(t, "gpu-operator", map[string]any{deploy: nil}) // But it has been seen at work.
	c.awaitCondition(t, v1.ConditionTrue, "Serving", "nvidia-mig-manager has written the label "+state)
	c.setLabels(t, "gpu-operator", map[string]any{deploy: "false"})
	c.label(t, "small")
	c.awaitAllocatable(t, small)
	c.await(t, "the state to be Virgate's", func() error {
		if now := c.node(t).Labels[state]; now != "success" {
			return fmt.Errorf("it is %q", now)
		}
		return nil
	})
}
