package soak

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/test/kubelettest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// play does one operation. Its error names the broken invariant.
func (w *world) play(o operation) error {
	w.figures.kinds[o.kind]++
	switch o.kind {
	case admit, remove, restartContainer, resizePod:
		w.pods.add(o)
		return nil
	case edit:
		w.pods.disturb(cutting)
		w.pods.disturb(leaving)
		text := o.text
		if o.wish != nil {
			text = o.wish.document(w.uuids)
			if o.wish.oneOnly {
				w.pods.disturb(oneOnly)
			}
		}
		w.cluster.setDocument(o.name, text)
	case label:
		w.pods.disturb(cutting)
		w.pods.disturb(leaving)
		w.pods.disturb(oneOnly)
		w.cluster.setLabel(profileLabel, o.text)
	case migLabel:
		w.pods.disturb(cutting)
		w.pods.disturb(leaving)
		w.cluster.setLabel(layoutLabel, o.text)
	case lose, heal, xid, partitionXID, heat, pull, plug, failCall, slowCall:
		w.pods.disturb(faults)
		w.pods.disturb(leaving)
		w.pods.disturb(cutting)
		return w.hardware(o)
	case hangup:
		w.program.hangup()
	case scrape:
		return w.await(o.String(), func() string {
			if err := w.program.scrape(w.ctx); err != nil {
				return err.Error()
			}
			return ""
		})
	case obeyed:
		return w.await(o.String(), func() string {
			if missing := w.program.seen.awaited(o); missing != "" || o.rejected {
				return missing
			}
			return w.unsaved(o.wish.edit)
		})
	case settle:
		return w.settle(o)
	default:
		if strings.HasPrefix(string(o.kind), "calm") {
			return w.calm(o)
		}
		w.observer.disturbed()
		w.pods.disturb(connections)
		return w.disturb(o)
	}
	return nil
}

func (w *world) hardware(o operation) error {
	node := w.site.node
	index, gpu := w.gpuAt(o.gpu)
	switch o.kind {
	case lose:
		w.mayMissResets()
		return node.Lose(index)
	case heal:
		return w.resetGPU(gpu)
	case xid:
		w.hurt(o.gpu)
		return node.XID(index, uint64(o.count), nvml.WholeGPU, nvml.WholeGPU)
	case partitionXID:
		if len(gpu.Partitions) == 0 {
			return nil
		}
		w.hurt(o.gpu)
		hit := gpu.Partitions[o.count%len(gpu.Partitions)]
		return node.XID(index, uint64(o.count), uint32(hit.GPUInstance), uint32(hit.ComputeInstance))
	case heat:
		return node.SetTemperature(index, 95)
	case pull:
		return node.Remove(index)
	case plug:
		w.observer.resets(gpu)
		_, err := node.Add("")
		return err
	case failCall:
		if o.name == "DeviceGetCount" {
			w.mayMiss = true
			w.mayMissResets()
		}
		w.scripts = append(w.scripts, node.InjectFault(o.name, simnode.Fault{Return: nvml.Unknown, Times: o.count}))
	case slowCall:
		if o.name == "EventSetWait" {
			w.mayMiss = true
			w.mayMissResets()
		}
		w.scripts = append(w.scripts, node.InjectFault(o.name, simnode.Fault{Delay: o.delay, Times: o.count}))
	}
	return nil
}

func (w *world) disturb(o operation) error {
	switch o.kind {
	case restartProgram:
		return w.restart()
	case killProgram:
		return w.kill()
	case succeed:
		return w.succeed()
	case restartKubelet:
		return w.kubelet.Restart(w.ctx)
	case restorePods:
		return w.kubelet.RestorePods(w.ctx)
	case reboot:
		return w.kubelet.Reboot(w.ctx)
	case wipe:
		if err := w.kubelet.Stop(w.ctx); err != nil {
			return err
		}
		if err := w.removeSockets("*.sock"); err != nil {
			return err
		}
		return w.kubelet.Start(w.ctx)
	case dropStream:
		w.kubelet.DropStream(o.resource)
	case deleteSockets:
		return w.removeSockets("virgate-*.sock")
	case slowStream:
		w.observer.slowed()
		w.kubelet.DelayLists(o.delay)
	case refuse:
		w.kubelet.RefuseRegister(o.count)
	case silence:
		w.kubelet.HangRegister(o.count > 0)
	case cut:
		w.cluster.cut()
	case mend:
		w.cluster.mend()
	case expire:
		w.cluster.expire()
	default:
		return fmt.Errorf("no operation %q", o.kind)
	}
	return nil
}

func (w *world) removeSockets(pattern string) error {
	paths, err := filepath.Glob(filepath.Join(w.site.dir, pattern))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

// settle waits until the pods' operations are done and everything is as it should be.
func (w *world) settle(o operation) error {
	for _, end := range w.scripts {
		end()
	}
	w.scripts = nil
	w.kubelet.RefuseRegister(0)
	w.pods.pending.Wait()
	if err := w.rest(o); err != nil {
		return err
	}
	if o.text == "streams" && len(w.restless(o.conditions)) == 0 {
		if now := w.countStreams(); !maps.Equal(now, w.streams) {
			return fmt.Errorf("invariant 1: registrations and streams before and after other replicas: %v, %v", w.streams, now)
		}
	}
	w.observer.calm()
	w.pods.calm()
	w.mayMiss = false
	if o.wish.oneOnly {
		w.pods.disturb(oneOnly)
	}
	if len(w.settled.blocked) > 0 {
		w.pods.disturb(cutting)
	}
	return nil
}

// countStreams returns the registrations and streams of each resource so far.
func (w *world) countStreams() map[string][2]int {
	counts := map[string][2]int{}
	for name, resource := range w.kubelet.Snapshot().Resources {
		if len(resource.Devices) > 0 {
			counts[name] = [2]int{resource.Registrations, resource.StreamsOpened}
		}
	}
	return counts
}

// restless returns the GPUs, by UUID, whose list may change by itself: a program that starts while a GPU is
// away does not know of it, and a GPU that waits for pods before it is partitioned is retried now and then.
func (w *world) restless(conditions []condition) map[string]bool {
	gpus := map[string]bool{}
	for ordinal, gpu := range w.site.node.GPUs() {
		if conditions[ordinal] != sound || slices.Contains(w.settled.blocked, gpu.UUID) {
			gpus[gpu.UUID] = true
		}
	}
	return gpus
}

// gpuOf maps each existing unit to its GPU, by UUID.
func (w *world) gpuOf() map[string]string {
	gpus := map[string]string{}
	for _, gpu := range w.site.node.GPUs() {
		gpus[gpu.UUID] = gpu.UUID
		for _, partition := range gpu.Partitions {
			gpus[partition.UUID] = gpu.UUID
		}
	}
	return gpus
}

// looked waits until the program has read its profile twice more: what it read the first time is then in
// force.
func (w *world) looked() error {
	_, _, before, _ := w.program.seen.look()
	return w.await("SIGHUP", func() string {
		w.program.hangup()
		if _, _, now, _ := w.program.seen.look(); now < before+3 {
			return "the program does not look"
		}
		return ""
	})
}

// breathe lets the program scan until anything that must not happen would have happened.
func (w *world) breathe() error {
	begun := w.scans()
	return w.await("scans", func() string {
		if w.scans()-begun <= steady {
			return "the program does not scan the GPUs"
		}
		return ""
	})
}

// blow adds one operation of a storm.
func (s *scheduler) blow() {
	if s.cutOff > 0 {
		if s.cutOff--; s.cutOff == 0 {
			s.cutOff = 1
			s.mend()
		}
	}
	switch n := s.random.IntN(100); {
	case n < 45:
		s.pod()
	case n < 65:
		s.profile()
	case n < 80:
		s.hardware()
	case n < 85:
		s.add(operation{kind: pick(s.random, hangup, scrape)})
	case s.rough:
		s.disturb()
	default:
		s.pod()
	}
}

// mostPods is the largest number of pods at once, failed ones included.
const mostPods = 16

func (s *scheduler) pod() {
	if len(s.pods) > 0 && (len(s.pods) >= mostPods || s.one(3)) {
		at := s.random.IntN(len(s.pods))
		s.add(operation{kind: remove, name: s.pods[at]})
		s.pods = slices.Delete(s.pods, at, at+1)
		return
	}
	if len(s.pods) > 0 && s.one(4) {
		s.add(operation{kind: pick(s.random, restartContainer, resizePod), name: pick(s.random, s.pods...)})
		return
	}
	s.made++
	names := s.inForce.names()
	if s.one(6) {
		names = []string{gpuName, gpuName + ".shared", h100Name, "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"}
	}
	o := operation{kind: admit, name: fmt.Sprintf("pod-%d", s.made), resource: pick(s.random, names...), count: 1}
	if s.one(4) {
		o.count = 2 + s.random.IntN(2)
	}
	if s.one(8) {
		o.text = "init"
	}
	s.pods = append(s.pods, o.name)
	s.add(o)
}

// The calls that a storm makes fail or slows down; those of the second kind change partitions.
var (
	readingCalls = []string{"DeviceGetMemoryInfo", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID", "DeviceGetMigMode", "DeviceGetTemperature", "EventSetWait", "DeviceGetMigDeviceHandleByIndex"}
	cuttingCalls = []string{"DeviceSetMigMode", "DeviceCreateGpuInstanceWithPlacement", "GpuInstanceCreateComputeInstance", "ComputeInstanceDestroy", "GpuInstanceDestroy"}
)

func (s *scheduler) hardware() {
	ordinal := s.random.IntN(gpus)
	if slices.Contains(s.pulled, ordinal) {
		s.plug()
		return
	}
	condition := &s.conditions[ordinal]
	switch n := s.random.IntN(20); {
	case n < 3:
		s.add(operation{kind: lose, gpu: ordinal})
		*condition = faulty
	case n < 8:
		s.heal(ordinal)
	case n < 10 && *condition != faulty:
		s.add(operation{kind: pick(s.random, xid, partitionXID), gpu: ordinal, count: pick(s.random, 79, 48, 94, 62, 13, 69, 109)})
		*condition = doubtful
	case n < 11:
		s.add(operation{kind: heat, gpu: ordinal})
		*condition = faulty
	case n < 13:
		if len(s.pulled) < gpus-2 {
			s.add(operation{kind: pull, gpu: ordinal})
			s.pulled = append(s.pulled, ordinal)
			*condition = faulty
		}
	case n < 14:
		s.plug()
	case n < 17:
		s.add(operation{kind: failCall, name: pick(s.random, readingCalls...), count: 1 + s.random.IntN(4)})
	case n < 18:
		s.add(operation{kind: failCall, name: pick(s.random, cuttingCalls...), count: 1})
	default:
		s.add(operation{
			kind: slowCall, name: pick(s.random, slices.Concat(readingCalls, cuttingCalls)...),
			count: 1 + s.random.IntN(5), delay: time.Duration(20+s.random.IntN(200)) * time.Millisecond,
		})
	}
}

// plug puts the last pulled GPU back.
func (s *scheduler) plug() {
	if last := len(s.pulled) - 1; last >= 0 {
		s.add(operation{kind: plug, gpu: s.pulled[last]})
		s.conditions[s.pulled[last]] = sound
		s.pulled = s.pulled[:last]
	}
}

// mostCuts bounds how long the program stays away from an API server that comes and goes: the program
// doubles its pause each time.
const mostCuts = 2

func (s *scheduler) disturb() {
	switch n := s.random.IntN(20); {
	case n < 3:
		s.add(operation{kind: s.orKill(restartProgram, killProgram)})
	case n < 4:
		s.add(operation{kind: succeed})
	case n < 7:
		s.add(operation{kind: restartKubelet})
		s.unheard = true
	case n < 9:
		if s.unheard {
			s.add(operation{kind: restorePods})
			s.unheard = false
		}
	case n < 10 && s.one(3):
		s.add(operation{kind: reboot})
		s.unheard = true
	case n < 10:
		s.add(operation{kind: wipe})
		s.unheard = true
	case n < 12:
		s.add(operation{kind: dropStream, resource: pick(s.random, s.inForce.names()...)})
	case n < 14:
		s.add(operation{kind: deleteSockets})
	case n < 15:
		s.add(operation{kind: slowStream, delay: time.Duration(5+s.random.IntN(60)) * time.Millisecond})
		s.slow = true
	case n < 16:
		s.add(operation{kind: refuse, count: 1 + s.random.IntN(3)})
	case n < 17 && s.one(4):
		s.add(operation{kind: silence, count: 1})
		s.silenced = true
	case s.cutOff == 0 && s.cuts < mostCuts && n < 18:
		s.add(operation{kind: expire})
		s.cuts++
	case s.cutOff == 0 && s.cuts < mostCuts:
		s.add(operation{kind: cut})
		s.cutOff, s.cuts = 2+s.random.IntN(6), s.cuts+1
	}
}

// start starts a run of the program beside the existing ones.
func (w *world) start() (*program, error) {
	w.runs++
	at, err := w.site.reach(w.runs)
	if err != nil {
		return nil, err
	}
	w.mayMissResets()
	return start(at), nil
}

// A GPU with a fatal error is used again after a reset, and a reset only counts for a Virgate that has seen
// the GPU before and after it. A Virgate misses the reset if it ends before it looks, has lost its driver,
// or opens it again because a GPU stays lost (docs/reference/health.md). If it waits for events in a slow
// call, it learns of an error only after the reset that ended it. In these cases the GPU is reset again.

// hurt notes that the GPU may have had a fatal error.
func (w *world) hurt(ordinal int) {
	if _, already := w.missed[ordinal]; !already {
		w.missed[ordinal] = w.mayMiss || slices.ContainsFunc(w.site.node.GPUs(), func(gpu simnode.GPU) bool { return gpu.Lost })
	}
}

// mayMissResets notes that none of the GPUs' resets so far may count.
func (w *world) mayMissResets() {
	for ordinal := range w.missed {
		w.missed[ordinal] = true
	}
}

// resetAgain resets the sound GPUs whose reset may have been missed.
func (w *world) resetAgain(conditions []condition) {
	for ordinal, missed := range w.missed {
		if index, gpu := w.gpuAt(ordinal); missed && conditions[ordinal] == sound && index >= 0 {
			_ = w.resetGPU(gpu)
		}
	}
}

// recovered forgets the errors of GPUs that are in use again.
func (w *world) recovered() {
	for ordinal := range w.missed {
		if w.settled.isUsed(ordinal) {
			delete(w.missed, ordinal)
		}
	}
}

// isUsed reports whether every unit of the GPU can be given out.
func (j *restCheck) isUsed(ordinal int) bool {
	gpu := j.gpus[ordinal]
	units := map[string]bool{gpu.UUID: false}
	if gpu.MIG {
		units = map[string]bool{}
		for _, partition := range gpu.Partitions {
			units[partition.UUID] = false
		}
	}
	for _, health := range j.health {
		for id, healthy := range health {
			if unit, _ := unitOf(id); healthy {
				if _, of := units[unit]; of {
					units[unit] = true
				}
			}
		}
	}
	for _, used := range units {
		if !used {
			return false
		}
	}
	return len(units) > 0
}

const namespace = "soak"

// pods performs the schedule's pod operations one after the other, beside everything else, and judges the
// answers.
type pods struct {
	kubelet *kubelettest.Kubelet
	queue   chan operation
	pending sync.WaitGroup

	mu sync.Mutex
	// known are the disturbances since the last calm.
	known   map[disturbance]bool
	answers map[string]int
	wrong   []string
}

// disturbance is a reason that explains a refused admission.
type disturbance string

const (
	// connections break, and Virgate or the kubelet is away.
	connections disturbance = "broken connection"
	// leaving ends the server of a resource that the next profile or layout does not have, perhaps during a
	// call of the kubelet.
	leaving disturbance = "resource left"
	// faults make devices Unhealthy that the kubelet has just chosen.
	faults disturbance = "fault"
	// cutting closes devices that the kubelet has just chosen.
	cutting disturbance = "GPU being cut"
	// oneOnly refuses more than one share.
	oneOnly disturbance = "one share only"
	// exhaustion is the kubelet's own refusal: it has too few devices.
	exhaustion disturbance = "too few devices"
)

func newPods(kubelet *kubelettest.Kubelet) *pods {
	return &pods{kubelet: kubelet, queue: make(chan operation, mostQueued), known: map[disturbance]bool{}, answers: map[string]int{}}
}

// mostQueued exceeds the number of operations in a storm.
const mostQueued = 1000

// run performs the queued operations until the queue is closed.
func (p *pods) run(ctx context.Context) {
	for o := range p.queue {
		p.do(ctx, o)
		p.pending.Done()
	}
}

func (p *pods) add(o operation) {
	p.pending.Add(1)
	p.queue <- o
}

func (p *pods) disturb(d disturbance) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[d] = true
}

// calm forgets the disturbances. The queue must be empty.
func (p *pods) calm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.known)
}

func (p *pods) do(ctx context.Context, o operation) {
	switch o.kind {
	case admit:
		p.count("admission", p.admit(ctx, o))
	case remove:
		if err := p.kubelet.DeletePod(namespace, o.name); err != nil && !errors.Is(err, simkubelet.ErrNoPod) {
			p.complain("%s: %v", o, err)
		}
	case restartContainer:
		_, err := p.kubelet.RestartContainer(ctx, namespace, o.name, "main")
		switch {
		case err == nil, errors.Is(err, simkubelet.ErrNoPod), errors.Is(err, simkubelet.ErrDown):
		case strings.Contains(err.Error(), "pod is Failed"), strings.Contains(err.Error(), "pod is Pending"):
		default:
			p.complain("invariant 5: %s: %v", o, err)
		}
	case resizePod:
		err := p.kubelet.ResizePod(ctx, namespace, o.name)
		switch {
		case err == nil, errors.Is(err, simkubelet.ErrNoPod), errors.Is(err, simkubelet.ErrDown):
		default:
			// A held device may be Unhealthy. Then the resize waits, and the pod runs on.
			p.count("resize", err)
		}
	}
}

func (p *pods) admit(ctx context.Context, o operation) error {
	requests := map[string]int{o.resource: o.count}
	pod := simkubelet.Pod{Namespace: namespace, Name: o.name, Containers: []simkubelet.Container{{Name: "main", Requests: requests}}}
	if o.text == "init" {
		pod.Containers = append(pod.Containers, simkubelet.Container{Name: "first", Init: true, Requests: requests})
	}
	status, err := p.kubelet.AddPod(ctx, pod)
	if err == nil {
		p.judgeGrants(o, status)
	}
	return err
}

// judgeGrants compares the container's environment with the pod's devices.
func (p *pods) judgeGrants(o operation, pod simkubelet.PodStatus) {
	for _, container := range pod.Containers {
		for _, grant := range container.Grants {
			var units []string
			for _, id := range grant.Devices {
				if unit, _ := unitOf(id); !slices.Contains(units, unit) {
					units = append(units, unit)
				}
			}
			told := strings.Split(grant.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"], ",")
			slices.Sort(units)
			slices.Sort(told)
			if !slices.Equal(units, told) {
				p.complain("%s: %v granted, and the container sees %v", o, grant.Devices, told)
			}
		}
	}
}

// count counts an answer, and complains if nothing explains it.
func (p *pods) count(what string, err error) {
	reason, explained := p.explain(err)
	p.mu.Lock()
	p.answers[what+": "+reason]++
	p.mu.Unlock()
	if !explained {
		p.complain("%s: nothing explains %v", what, err)
	}
}

// explain names the answer, and reports whether it is one of the program's answers that the last
// disturbances can cause.
func (p *pods) explain(err error) (reason string, explained bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	because := func(d disturbance) (string, bool) { return string(d), p.known[d] }
	text, code := "", codes.OK
	if err != nil {
		text, code = err.Error(), status.Code(errors.Unwrap(err))
		if from, ok := errors.AsType[*simkubelet.AdmissionError](err); ok {
			code = status.Code(from.Cause)
		}
	}
	contains := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
	}
	switch {
	case err == nil:
		return "admitted", true
	case contains("unregistered device", "no healthy devices", "requested number of devices unavailable", "previously allocated devices are no longer healthy"):
		return string(exhaustion), true
	case errors.Is(err, simkubelet.ErrDown), errors.Is(err, context.Canceled):
		return because(connections)
	case contains("unknown Device Plugin", "has been stopped", "endpoint not found", "transport", "connection", "EOF", "the plugin stops"):
		if p.known[connections] {
			return string(connections), true
		}
		return because(leaving)
	}
	switch code {
	case codes.Canceled:
		return because(connections)
	case codes.FailedPrecondition:
		return because(cutting)
	case codes.InvalidArgument:
		return because(oneOnly)
	case codes.Unavailable:
		return because(faults)
	default:
		return "unexplained: " + code.String(), false
	}
}

func (p *pods) complain(format string, arguments ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wrong = append(p.wrong, fmt.Sprintf(format, arguments...))
}

// check returns all complaints so far.
func (p *pods) check() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.wrong)
}

// tally counts the answers by name.
func (p *pods) tally() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.answers)
}
