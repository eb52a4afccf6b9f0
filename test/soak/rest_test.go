package soak

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
)

// calm makes one check of a node at rest.
func (w *world) calm(o operation) error {
	before, err := w.still(o.conditions)
	if err != nil {
		return err
	}
	switch o.kind {
	case calmHangup:
		return w.nothing("8", o, before, w.looked)
	case calmRestart:
		return w.unchanged(o, before, w.restart)
	case calmKill:
		return w.unchanged(o, before, w.kill)
	case calmSuccession:
		return w.unchanged(o, before, w.succeed)
	case calmDeadKubelet:
		return w.unchanged(o, before, w.endWithoutKubelet)
	case calmDrop:
		return w.unchanged(o, before, func() error { return w.reconnect(o.resource) })
	case calmBad:
		return w.spoilt(o, before)
	case calmReplicas:
		w.streams = w.countStreams()
		return w.play(operation{kind: edit, name: o.name, wish: o.wish})
	case calmXID:
		return w.oneFault(o)
	case calmAdmit:
		return w.admitFree(o)
	case calmContainers:
		return w.restartContainers()
	case calmDrain:
		for _, pod := range w.kubelet.Snapshot().Pods {
			if err := w.kubelet.DeletePod(pod.Namespace, pod.Name); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("no operation %q", o.kind)
}

// slowEnd is the delay with which the kubelet notices the end of a stream, where a program must wait for
// that.
const slowEnd = 40 * time.Millisecond

// unchanged disturbs a node at rest, which must then return to the same lists.
func (w *world) unchanged(o operation, before settledNode, disturb func() error) error {
	w.observer.disturbed()
	w.kubelet.DelayLists(slowEnd)
	if err := disturb(); err != nil {
		return err
	}
	if err := w.rest(o); err != nil {
		return err
	}
	w.kubelet.DelayLists(0)
	w.observer.calm()
	return w.differ("8", o, before)
}

// endWithoutKubelet ends the program while the kubelet is down.
func (w *world) endWithoutKubelet() error {
	if err := w.kubelet.Stop(w.ctx); err != nil {
		return err
	}
	if err := w.restart(); err != nil {
		return err
	}
	if err := w.kubelet.Start(w.ctx); err != nil {
		return err
	}
	return w.kubelet.RestorePods(w.ctx)
}

// reconnect drops one stream.
func (w *world) reconnect(resource string) error {
	before := w.kubelet.Snapshot().Resources[resource]
	if len(before.Devices) == 0 || !w.kubelet.DropStream(resource) {
		return nil // It has no device on this node, and may be about to stop.
	}
	began := time.Now()
	err := w.await("invariant 4", func() string {
		if now := w.kubelet.Snapshot().Resources[resource]; now.StreamsOpened > before.StreamsOpened && now.Connected {
			return ""
		}
		return resource + " is not registered again"
	})
	w.figures.reconnected = max(w.figures.reconnected, elapsed(began))
	return err
}

// spoilt replaces the good profile by a bad one, and back.
func (w *world) spoilt(o operation, before settledNode) error {
	if err := w.nothing("2", o, before, func() error { return w.reject(o) }); err != nil {
		return err
	}
	w.cluster.setDocument(o.name, o.wish.written(w.uuids))
	return w.rest(o)
}

// reject waits until the bad profile is rejected with a reason.
func (w *world) reject(o operation) error {
	w.cluster.setDocument(o.name, o.text)
	var said error
	err := w.await("invariant 2", func() string {
		if _, _, _, said = w.program.seen.look(); said == nil {
			return "the profile is not rejected"
		}
		return ""
	})
	if err != nil {
		return err
	}
	if !strings.Contains(said.Error(), "["+o.name+"]:") || !quotesNumber(said, o.count) {
		return fmt.Errorf("invariant 2: the error does not say where or what: %w", said)
	}
	return w.looked()
}

// nothing calls do, which must change nothing.
func (w *world) nothing(invariant string, o operation, before settledNode, do func() error) error {
	lists, streams := w.observer.tally().lists, w.countStreams()
	if err := do(); err != nil {
		return err
	}
	if err := w.breathe(); err != nil {
		return err
	}
	if err := w.differ(invariant, o, before); err != nil {
		return err
	}
	if len(w.restless(o.conditions)) > 0 {
		return nil
	}
	if diff := cmp.Diff(streams, w.countStreams()); diff != "" {
		return fmt.Errorf("invariant %s: other streams (-before +after):\n%s", invariant, diff)
	}
	if now := w.observer.tally().lists; now != lists {
		return fmt.Errorf("invariant %s: %d lists were sent", invariant, now-lists)
	}
	return nil
}

// fatalXIDOfPartition is an XID that is fatal in the soak, but only for the partition that it names.
const fatalXIDOfPartition = 69

// oneFault makes one unit fail and recover.
func (w *world) oneFault(o operation) error {
	index, gpu := w.gpuAt(o.gpu)
	gi, ci, fatal := nvml.WholeGPU, nvml.WholeGPU, uint64(95)
	units := map[string]bool{gpu.UUID: true}
	switch parts := gpu.Partitions; {
	case len(parts) > 0 && o.count%2 == 0:
		hit := parts[o.count/2%len(parts)]
		gi, ci, fatal = uint32(hit.GPUInstance), uint32(hit.ComputeInstance), fatalXIDOfPartition
		units = map[string]bool{hit.UUID: true}
	default:
		for _, partition := range parts {
			units[partition.UUID] = true
		}
	}
	restless, gpuOf := w.restless(o.conditions), w.gpuOf()
	others := func(unit string) bool { return !units[unit] && !restless[gpuOf[unit]] }
	before := w.healthOf(others)
	w.pods.disturb(faults)
	w.hurt(o.gpu)
	repeat := w.scans()
	if err := w.site.node.XID(index, fatal, gi, ci); err != nil {
		return err
	}
	err := w.await("invariant 3", func() string {
		// If events could not be received for a while, the first one is missed.
		if w.scans()-repeat > missedAfter {
			repeat = w.scans()
			_ = w.site.node.XID(index, fatal, gi, ci)
		}
		for id, healthy := range w.healthOf(func(unit string) bool { return units[unit] }) {
			if healthy {
				return id + " is Healthy after a fatal error of its unit"
			}
		}
		return ""
	})
	if err != nil {
		return err
	}
	if err := w.breathe(); err != nil {
		return err
	}
	if diff := cmp.Diff(before, w.healthOf(others)); diff != "" {
		return fmt.Errorf("invariant 3: a fault of %v changed others (-before +after):\n%s", units, diff)
	}
	if err := w.resetGPU(gpu); err != nil {
		return err
	}
	return w.rest(o)
}

// healthOf returns the health of all listed devices of the units.
func (w *world) healthOf(of func(unit string) bool) map[string]bool {
	health := map[string]bool{}
	for name, resource := range w.kubelet.Snapshot().Resources {
		for _, device := range resource.Devices {
			if unit, _ := unitOf(device.ID); of(unit) {
				health[name+" "+device.ID] = device.Healthy
			}
		}
	}
	return health
}

// admitFree admits a pod for one device of each resource that has one, and deletes it.
func (w *world) admitFree(o operation) error {
	judged := judge(w.now(o))
	for resource, health := range judged.health {
		free := 0
		for id, healthy := range health {
			if healthy && !judged.held[resource][id] {
				free++
			}
		}
		if free == 0 {
			continue
		}
		name := o.text + "-" + strings.ReplaceAll(resource, "/", "-")
		err := w.pods.admit(w.ctx, operation{kind: admit, name: name, resource: resource, count: 1})
		w.pods.count("admission", err)
		if err != nil {
			return fmt.Errorf("%d devices of %s are free and Healthy, and a pod that wants one is refused: %w", free, resource, err)
		}
		if err := w.kubelet.DeletePod(namespace, name); err != nil {
			return err
		}
	}
	return w.rest(o)
}

// restartContainers is invariant 5: whatever has happened to the node, the containers of its pods can start
// again.
func (w *world) restartContainers() error {
	ctx, cancel := context.WithTimeout(w.ctx, w.patience)
	defer cancel()
	for _, pod := range w.kubelet.Snapshot().Pods {
		if pod.Phase != simkubelet.Running {
			continue
		}
		if _, err := w.kubelet.RestartContainer(ctx, pod.Namespace, pod.Name, "main"); err != nil && !errors.Is(err, simkubelet.ErrNoPod) {
			return fmt.Errorf("invariant 5: %w", err)
		}
	}
	return nil
}

// settledNode is what must stay the same, byte for byte, if nothing has changed.
type settledNode struct {
	// lists is everything that the kubelet knows about the devices of each GPU, by UUID; "" has those of
	// partitions that are gone.
	lists map[string][]string
	// plan is the program's plan, empty if a GPU is restless.
	plan string
	// restless are the GPUs of which both may change.
	restless map[string]bool
}

// still reads the lists and the program's plan, and waits for the plan.
func (w *world) still(conditions []condition) (settledNode, error) {
	now := settledNode{lists: map[string][]string{}, restless: w.restless(conditions)}
	gpuOf := w.gpuOf()
	snapshot := w.kubelet.Snapshot()
	for _, name := range slices.Sorted(maps.Keys(snapshot.Resources)) {
		for _, device := range snapshot.Resources[name].Devices {
			unit, _ := unitOf(device.ID)
			now.lists[gpuOf[unit]] = append(now.lists[gpuOf[unit]], fmt.Sprintf("%s %v", name, device))
		}
	}
	if len(now.restless) > 0 {
		return now, nil
	}
	err := w.await("the plan", func() string {
		code, body, err := w.program.page(w.ctx, "/plan")
		if err != nil || code != http.StatusOK {
			return fmt.Sprint(code, " ", err)
		}
		now.plan = body
		return ""
	})
	return now, err
}

// differ describes what has changed, except for GPUs that were restless before or are now: one that waits
// for its pods may be partitioned, or given up, in between.
func (s settledNode) differ(now settledNode) string {
	restless := maps.Clone(s.restless)
	maps.Copy(restless, now.restless)
	before, after := maps.Clone(s.lists), maps.Clone(now.lists)
	if len(restless) > 0 {
		restless[""] = true // Partitions that are gone may belong to a restless GPU.
	}
	for gpu := range restless {
		delete(before, gpu)
		delete(after, gpu)
	}
	if diff := cmp.Diff(before, after); diff != "" || len(restless) > 0 {
		return diff
	}
	return cmp.Diff(s.plan, now.plan)
}

func (w *world) differ(invariant string, o operation, before settledNode) error {
	now, err := w.still(o.conditions)
	if err != nil {
		return err
	}
	if diff := before.differ(now); diff != "" {
		return fmt.Errorf("invariant %s: other lists, or another plan (-before +after):\n%s", invariant, diff)
	}
	return nil
}

// calm adds a check that leaves the node at rest.
func (s *scheduler) calm() {
	o := s.atRest(pick(s.random,
		calmHangup, calmRestart, calmBad, calmReplicas, calmXID, calmAdmit, calmContainers, calmDrop, calmDrain, calmSuccession, calmDeadKubelet))
	w := s.inForce
	switch o.kind {
	case calmRestart:
		o.kind = s.orKill(calmRestart, calmKill)
	case calmBad:
		if o.rejected {
			return
		}
		s.edits++
		o.text, o.count = s.badDocument(), s.edits
	case calmReplicas:
		if o.rejected || len(w.shares) == 0 {
			return
		}
		s.edits++
		w = *s.documents[s.selected]
		w.edit, w.shares = s.edits, slices.Clone(w.shares)
		changed := &w.shares[s.random.IntN(len(w.shares))]
		changed.replicas = 2 + (changed.replicas-2+1+s.random.IntN(2))%3
		changed.policy = pick(s.random, "distributed", "packed", "spread")
		o.wish = &w
		s.documents[s.selected] = &w
		s.inForce, _ = s.wanted()
		s.add(o)
		s.obey()
		o = s.atRest(settle)
		o.text = "streams"
	case calmXID:
		o.gpu, o.count = s.random.IntN(gpus), s.random.IntN(100)
		if s.conditions[o.gpu] != sound || slices.Contains(s.pulled, o.gpu) {
			return
		}
	case calmDrop:
		o.resource = pick(s.random, w.names()...)
	case calmAdmit:
		s.made++
		o.text = fmt.Sprintf("probe-%d", s.made)
	case calmDrain:
		s.pods = nil
		s.add(o)
		o = s.atRest(settle)
	}
	s.add(o)
}
