package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

const gpuResource = "nvidia.com/gpu"

// patience is how long a step may take on a slow machine.
const patience = 2 * time.Minute

type step struct {
	title string
	play  func(context.Context) error
}

func (s *demoNode) mainSteps() []step {
	return []step{
		{"The node", s.showNode},
		{"The plan: every GPU as 10 time-slice replicas", s.showPlan},
		{"The kubelet's view", s.showKubelet},
		{"Exclusive, shared, under another name, and back", s.switchModes},
		{"Three pods ask for GPUs", s.runPods},
		{"A live switch of the profile to 4 replicas a GPU", s.switchProfile},
		{"GPU 0 falls off the bus (XID 79), and comes back", s.breakAndHeal},
		{"A broken profile", s.breakProfile},
		{"What the kubelet thinks of it", s.showVerdict},
	}
}

// playSteps goes through the steps, also after one that did not come true; an error ends it.
func (s *demoNode) playSteps(ctx context.Context, steps []step) error {
	for i, step := range steps {
		s.say("\n%d. %s", i+1, step.title)
		if err := step.play(ctx); err != nil {
			return err
		}
	}
	return nil
}

// podOf is a pod with one container, which asks for so many of the resource.
func podOf(namespace, name, resource string, count int) simkubelet.Pod {
	return simkubelet.Pod{Namespace: namespace, Name: name, Containers: []simkubelet.Container{
		{Name: "main", Requests: map[string]int{resource: count}},
	}}
}

// await waits until the kubelet's state is as wanted, and says whether it ever was.
func (s *demoNode) await(ctx context.Context, wanted func(simkubelet.Snapshot) bool) (bool, error) {
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.kubelet.Await(limit, wanted); err != nil {
		return false, ctx.Err()
	}
	return true, nil
}

func (s *demoNode) showNode(context.Context) error {
	for _, gpu := range s.gpus {
		s.say("   GPU %d  %s  %d GiB  NUMA %d  %s", gpu.Index, gpu.Model, gpu.Memory>>30, gpu.NUMANode, gpu.UUID)
	}
	s.check(len(s.gpus) == 8, "8 GPUs found")
	return nil
}

func (s *demoNode) showPlan(context.Context) error {
	config, err := (&configsource.File{Path: s.profile}).Config()
	if err != nil {
		return err
	}
	plan := sharing.NewPlan(s.gpus, config.Profile)
	for _, r := range plan.Summary().Resources {
		s.say("   %s  %s  %d units × %d replicas = %d devices", r.Name, r.Strategy, r.Units, r.Replicas, r.Devices)
	}
	s.check(len(plan.Resources) == 1 && len(plan.Resources[0].Devices) == 80, "80 devices of 8 GPUs × 10 planned")
	return nil
}

func (s *demoNode) showKubelet(ctx context.Context) error {
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Allocatable == 80 })
	r := s.kubelet.Snapshot().Resources[gpuResource]
	s.say("   %s  capacity %d  allocatable %d  streams %d", gpuResource, r.Capacity, r.Allocatable, r.Streams)
	s.check(came, "the kubelet lists 80 devices")
	return err
}

// switchModes changes how GPUs that nobody holds are offered, and ends as it began.
func (s *demoNode) switchModes(ctx context.Context) error {
	const renamed = gpuResource + ".shared"
	whole, before := []byte("version: v1\n"), gpuResource
	for _, to := range []struct {
		name     string
		profile  []byte
		resource string
		count    int
	}{
		{"exclusive", whole, gpuResource, 8},
		{"4 replicas of each GPU", timesSlicedBy(4), gpuResource, 32},
		{"renamed", append(timesSlicedBy(4), "      rename: "+renamed+"\n"...), renamed, 32},
		{"exclusive again", whole, gpuResource, 8},
		{"10 replicas of each GPU", timesSlicedBy(10), gpuResource, 80},
	} {
		start, fewest := time.Now(), to.count
		if err := s.replace(to.profile); err != nil {
			return err
		}
		came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
			now := k.Resources[to.resource].Allocatable
			fewest = min(fewest, now)
			return now == to.count
		})
		if err != nil {
			return err
		}
		note := ""
		if to.resource == before {
			came = came && fewest > 0
			note = fmt.Sprintf(", never fewer than %d", fewest)
		}
		s.check(came, "%s: %d × %s after %d ms%s", to.name, to.count, to.resource, time.Since(start).Milliseconds(), note)
		before = to.resource
	}
	return nil
}

func (s *demoNode) runPods(ctx context.Context) error {
	seen := map[string]bool{}
	for _, pod := range []struct {
		name  string
		count int
	}{{"trainer", 2}, {"notebook", 1}, {"inference", 1}} {
		status, err := s.kubelet.AddPod(ctx, podOf("demo", pod.name, gpuResource, pod.count))
		if err != nil {
			s.check(false, "pod %s runs: %v", pod.name, err)
			continue
		}
		container := status.Containers[0]
		devices := container.Devices(gpuResource)
		s.say("   pod %-9s  holds %s", pod.name, strings.Join(devices, " "))
		visible := container.Env()["NVIDIA_VISIBLE_DEVICES"]
		s.say("   %-13s  NVIDIA_VISIBLE_DEVICES=%s", "", visible)
		units := strings.Split(visible, ",")
		for _, unit := range units {
			seen[unit] = true
		}
		s.check(len(devices) == pod.count && len(units) == pod.count, "devices granted: %d, each on another GPU", pod.count)
	}
	s.check(len(seen) == 4, "the least used GPU came first: 4 devices on 4 GPUs")
	return nil
}

func (s *demoNode) switchProfile(ctx context.Context) error {
	before := s.kubelet.Snapshot().Resources[gpuResource]
	start := time.Now()
	if err := s.replace(timesSlicedBy(4)); err != nil {
		return err
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Allocatable == 32 })
	if err != nil {
		return err
	}
	s.check(came, "the kubelet may hand out 32 devices, %d ms after the file changed", time.Since(start).Milliseconds())
	came, err = s.await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Capacity == 32 })
	after := s.kubelet.Snapshot()
	r := after.Resources[gpuResource]
	s.check(came, "surplus devices retired: capacity %d", r.Capacity)
	s.check(r.StreamsClosed == before.StreamsClosed && r.Registrations == before.Registrations,
		"streams closed: %d, new registrations: %d", r.StreamsClosed-before.StreamsClosed, r.Registrations-before.Registrations)
	s.check(s.podsKeepDevices(after), "every pod still holds its devices")
	return err
}

// podsKeepDevices says that every device of a running pod is listed and Healthy.
func (s *demoNode) podsKeepDevices(k simkubelet.Snapshot) bool {
	running := 0
	for _, pod := range k.Pods {
		if pod.Phase != simkubelet.Running {
			return false
		}
		running++
		for _, id := range pod.Containers[0].Devices(gpuResource) {
			if !slices.ContainsFunc(k.Resources[gpuResource].Devices, func(d simkubelet.Device) bool { return d.ID == id && d.Healthy }) {
				return false
			}
		}
	}
	return running == 3
}

func (s *demoNode) breakAndHeal(ctx context.Context) error {
	if err := s.node.Do("xid", map[string]string{"gpu": "0", "code": "79"}); err != nil {
		return err
	}
	healthy := func(k simkubelet.Snapshot) (count int) {
		for _, d := range k.Resources[gpuResource].Devices {
			if d.Healthy && strings.HasPrefix(d.ID, s.gpus[0].UUID+"::") {
				count++
			}
		}
		return count
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Allocatable == 28 && healthy(k) == 0
	})
	if err != nil {
		return err
	}
	s.check(came, "all 4 replicas of GPU 0 are Unhealthy, the other 28 are not")
	if err := s.node.Do("heal", map[string]string{"gpu": "0"}); err != nil {
		return err
	}
	came, err = s.await(ctx, func(k simkubelet.Snapshot) bool { return healthy(k) == 4 })
	s.check(came, "after a reset of the GPU all 4 are back: allocatable %d", s.kubelet.Snapshot().Resources[gpuResource].Allocatable)
	return err
}

const brokenProfile = `version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicsa: 0
`

func (s *demoNode) breakProfile(ctx context.Context) error {
	if err := s.replace([]byte(brokenProfile)); err != nil {
		return err
	}
	_, err := (&configsource.File{Path: s.profile}).Config()
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			s.say("   %s", line[strings.LastIndex(line, "/")+1:])
		}
	}
	s.check(err != nil, "refused, with file, line and field")
	before := s.kubelet.Snapshot().Resources[gpuResource]
	// The program looks at the file every 200 ms. A pod that is admitted after a
	// second proves that it still serves.
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return ctx.Err()
	}
	_, podErr := s.kubelet.AddPod(ctx, podOf("demo", "late", gpuResource, 1))
	after := s.kubelet.Snapshot().Resources[gpuResource]
	s.check(podErr == nil && after.Allocatable == before.Allocatable && after.StreamsClosed == before.StreamsClosed,
		"the old profile serves on: allocatable %d, and a new pod runs", after.Allocatable)
	return s.replace(timesSlicedBy(4))
}

func (s *demoNode) showVerdict(context.Context) error {
	violations := s.kubelet.Violations()
	for _, violation := range violations {
		s.say("   %s", violation)
	}
	s.check(len(violations) == 0, "breaches of the kubelet's contract: %d", len(violations))
	return nil
}

// What --serve leaves running has an answer for every question of docs/monitoring.md.
const (
	fillReplicas = 6
	gibibyte     = 1 << 30
	// firstPID is that of the first simulated process.
	firstPID = 4000
	// freeGPU has a process of the host on it, faultyGPU breaks.
	freeGPU, faultyGPU = 7, 6
	// memoryError is the XID of an uncorrectable error that was not contained.
	memoryError = 95
)

// fillPods come after the pods of the steps and share GPUs with them, by one device each.
var fillPods = []struct{ namespace, name string }{
	{"team-a", "search"}, {"team-a", "ranking"}, {"team-a", "speech"}, {"team-b", "training"}, {"team-b", "vision"},
}

// load is what a container's process uses of each of its units.
type load struct {
	memory  uint64
	percent int
}

// loads are those of containers that differ from usualLoad, by pod.
var (
	usualLoad = load{memory: 4 * gibibyte, percent: 25}
	loads     = map[string]load{
		"training": {memory: 12 * gibibyte, percent: 70}, // More than its share, and loud.
		"notebook": {memory: 1 * gibibyte},
	}
)

// fillNode adds pods that use their GPUs, one that asks for too many, and a failing GPU.
func (s *demoNode) fillNode(ctx context.Context) error {
	s.say("\nMore pods come, and all of them work.")
	profile := append(timesSlicedBy(fillReplicas), "    failRequestsGreaterThanOne: true\n"...)
	if err := s.replace(profile); err != nil {
		return err
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Allocatable == 8*fillReplicas
	})
	if err != nil {
		return err
	}
	s.check(came, "6 replicas a GPU, and one for each container")
	for _, pod := range fillPods {
		_, err := s.kubelet.AddPod(ctx, podOf(pod.namespace, pod.name, gpuResource, 1))
		s.check(err == nil, "pod %s/%s runs", pod.namespace, pod.name)
	}
	_, err = s.kubelet.AddPod(ctx, podOf("team-b", "greedy", gpuResource, 2))
	s.check(err != nil, "pod team-b/greedy asks for 2, and is refused")
	if err := s.startProcesses(); err != nil {
		return err
	}
	return s.node.Do("xid", map[string]string{"gpu": strconv.Itoa(faultyGPU), "code": strconv.Itoa(memoryError)})
}

// startProcesses starts a process on each unit that a container holds, and one outside.
func (s *demoNode) startProcesses() error {
	index := map[string]int{}
	for _, gpu := range s.gpus {
		index[gpu.UUID] = gpu.Index
	}
	pid := firstPID
	start := func(gpu int, does load, container string) error {
		pid++
		return s.node.Do("process-add", map[string]string{
			"gpu": strconv.Itoa(gpu), "pid": strconv.Itoa(pid), "bytes": strconv.FormatUint(does.memory, 10),
			"sm": strconv.Itoa(does.percent), "container": container,
		})
	}
	for _, pod := range s.kubelet.Snapshot().Pods {
		does, special := loads[pod.Name]
		if !special {
			does = usualLoad
		}
		for _, container := range pod.Containers {
			for _, id := range container.Devices(gpuResource) {
				unit, _, _ := strings.Cut(id, "::")
				if err := start(index[unit], does, fmt.Sprintf("%s/%s/%s", pod.Namespace, pod.Name, container.Name)); err != nil {
					return err
				}
			}
		}
	}
	return start(freeGPU, load{memory: 2 * gibibyte}, "")
}
