package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

const gpuResource = "nvidia.com/gpu"

// patience is how long a step may take on a slow machine.
const patience = 15 * time.Second

// step is a part of a play.
type step struct {
	title string
	play  func(context.Context) error
}

// mainSteps are the main job.
func (s *stage) mainSteps() []step {
	return []step{
		{"The node", s.showNode},
		{"The plan: every GPU as 10 time-slice replicas", s.showPlan},
		{"The kubelet's view", s.showKubelet},
		{"Three pods ask for GPUs", s.runPods},
		{"A live switch of the profile to 4 replicas a GPU", s.switchProfile},
		{"GPU 0 falls off the bus (XID 79), and comes back", s.breakAndHeal},
		{"A broken profile", s.breakProfile},
		{"What the kubelet thinks of it", s.showVerdict},
	}
}

// play goes through the steps. One that does not come true is remembered and the
// play goes on; an error ends it.
func (s *stage) play(ctx context.Context, steps []step) error {
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

// await waits until the kubelet's state is as wanted, and says whether it came
// to be.
func (s *stage) await(ctx context.Context, wanted func(simkubelet.Snapshot) bool) (bool, error) {
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := s.kubelet.Await(limit, wanted); err != nil {
		return false, ctx.Err()
	}
	return true, nil
}

func (s *stage) showNode(context.Context) error {
	gpus, err := nvml.Scan(s.node)
	if err != nil {
		return err
	}
	for _, gpu := range gpus {
		s.say("   GPU %d  %s  %d GiB  NUMA %d  %s", gpu.Index, gpu.Model, gpu.Memory>>30, gpu.NUMANode, gpu.UUID)
	}
	s.check(len(gpus) == 8, "8 GPUs found")
	return nil
}

func (s *stage) showPlan(context.Context) error {
	config, err := (&policy.File{Path: s.profile}).Config()
	if err != nil {
		return err
	}
	gpus, err := nvml.Scan(s.node)
	if err != nil {
		return err
	}
	plan := sharing.NewPlan(gpus, config.Profile)
	for _, r := range plan.Summary().Resources {
		s.say("   %s  %s  %d units × %d replicas = %d devices", r.Name, r.Strategy, r.Units, r.Replicas, r.Devices)
	}
	s.check(len(plan.Resources) == 1 && len(plan.Resources[0].Devices) == 80, "80 devices of 8 GPUs × 10 planned")
	return nil
}

func (s *stage) showKubelet(ctx context.Context) error {
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool { return k.Resources[gpuResource].Allocatable == 80 })
	r := s.kubelet.Snapshot().Resources[gpuResource]
	s.say("   %s  capacity %d  allocatable %d  streams %d", gpuResource, r.Capacity, r.Allocatable, r.Streams)
	s.check(came, "the kubelet lists 80 devices")
	return err
}

func (s *stage) runPods(ctx context.Context) error {
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
		s.check(len(devices) == pod.count && len(units) == pod.count, "granted: %d, on as many GPUs", pod.count)
	}
	s.check(len(seen) == 4, "the least used GPU came first: 4 devices on 4 GPUs")
	return nil
}

func (s *stage) switchProfile(ctx context.Context) error {
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

// podsKeepDevices says that every device that a running pod holds is listed and
// Healthy.
func (s *stage) podsKeepDevices(k simkubelet.Snapshot) bool {
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

func (s *stage) breakAndHeal(ctx context.Context) error {
	if err := s.node.Do("xid", map[string]string{"gpu": "0", "code": "79"}); err != nil {
		return err
	}
	gpus, err := nvml.Scan(s.node)
	if err != nil {
		return err
	}
	ofGPU0 := func(d simkubelet.Device) bool { return strings.HasPrefix(d.ID, gpus[0].UUID+"::") }
	count := func(k simkubelet.Snapshot, healthy bool) int {
		n := 0
		for _, d := range k.Resources[gpuResource].Devices {
			if ofGPU0(d) && d.Healthy == healthy {
				n++
			}
		}
		return n
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Allocatable == 28 && count(k, true) == 0
	})
	if err != nil {
		return err
	}
	s.check(came, "all 4 replicas of GPU 0 are Unhealthy, the other 28 are not")
	if err := s.node.Do("heal", map[string]string{"gpu": "0"}); err != nil {
		return err
	}
	came, err = s.await(ctx, func(k simkubelet.Snapshot) bool { return count(k, true) == 4 })
	s.check(came, "after a reset of the board all 4 are back: allocatable %d", s.kubelet.Snapshot().Resources[gpuResource].Allocatable)
	return err
}

const brokenProfile = `version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicsa: 0
`

func (s *stage) breakProfile(ctx context.Context) error {
	if err := s.replace([]byte(brokenProfile)); err != nil {
		return err
	}
	_, err := (&policy.File{Path: s.profile}).Config()
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			s.say("   %s", line[strings.LastIndex(line, "/")+1:])
		}
	}
	s.check(err != nil, "refused, with file, line and field")
	before := s.kubelet.Snapshot().Resources[gpuResource]
	// A pod that comes afterwards proves that the program has gone on; one
	// second is twice the time in which it looks at the file.
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

func (s *stage) showVerdict(context.Context) error {
	violations := s.kubelet.Violations()
	for _, violation := range violations {
		s.say("   %s", violation)
	}
	s.check(len(violations) == 0, "breaches of the kubelet's contract: %d", len(violations))
	return nil
}
