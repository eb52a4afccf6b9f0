package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/mps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// demoNode is the real program between a simulated node and a simulated kubelet.
type demoNode struct {
	node *simnode.Node
	// gpus are the node's GPUs at the start.
	gpus    []sharing.GPU
	kubelet *simkubelet.Kubelet
	// profile is the path of the profile that the program watches.
	profile string
	out     io.Writer
	api     *demoAPI
	// mps is the directory of virgate mps. mpsGPU is the GPU that pods share by MPS.
	mps, mpsGPU string
	// dra serves claims; nil if the device plugin serves everything.
	dra *demoDRA
	// broken has the messages of failed checks.
	broken []string
}

// scenario is a node, its first profile, and the steps of the demo.
type scenario struct {
	node    string
	profile []byte
	steps   func(*demoNode) []step
	// afterwards runs if the demo keeps serving; nil disables it.
	afterwards func(*demoNode, context.Context) error
	// claims makes the program serve claims too.
	claims bool
}

func scenarios() map[string]scenario {
	return map[string]scenario{
		"main": {
			node:       "dgx-a100",
			profile:    timesSlicedBy(10),
			steps:      (*demoNode).mainSteps,
			afterwards: (*demoNode).fillNode,
		},
		"mig": {
			node:    "h100+all-1g.10gb",
			profile: withLayout("all-1g.10gb"),
			steps:   (*demoNode).migSteps,
		},
		"mps": {
			node:       "t4x2",
			profile:    timesSlicedBy(4),
			steps:      (*demoNode).mpsSteps,
			afterwards: (*demoNode).serveMPS,
		},
		"guard": {
			node:    "t4",
			profile: []byte(guardedProfile),
			steps:   (*demoNode).guardSteps,
		},
		"dra": {
			node:    "h100x2",
			profile: []byte(byPlugin),
			steps:   (*demoNode).draSteps,
			claims:  true,
		},
	}
}

// demo starts everything, plays the steps, and cleans up.
func demo(
	ctx context.Context,
	out io.Writer,
	log *slog.Logger,
	listen string,
	node *simnode.Node,
	scenario scenario,
) error {
	dir, err := demoDir()
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()

	gpus, err := nvml.Scan(node)
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	s := &demoNode{
		node:    node,
		gpus:    gpus,
		out:     out,
		profile: filepath.Join(dir, "profile.yaml"),
		kubelet: simkubelet.New(simkubelet.Options{
			Dir:                filepath.Join(dir, "dp"),
			PodResourcesSocket: filepath.Join(dir, "pr.sock"),
			Logger:             log.With("component", "kubelet"),
		}),
	}
	s.api = &demoAPI{kubelet: s.kubelet}
	s.mps = filepath.Join(dir, "mps")
	if err := s.replace(scenario.profile); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	options := daemon.Options{
		GPUs: func(configs.StartupSettings) (daemon.GPUs, error) {
			return daemon.Simulated(node, node), nil
		},
		Profile: daemon.ProfileOptions{
			Path:      s.profile,
			Overrides: configs.Overrides{"flags.mpsRoot": {Value: s.mps}},
		},
		MPSSocket:          filepath.Join(s.mps, mps.SocketName),
		Guard:              s.api.pods(),
		PluginDir:          filepath.Join(dir, "dp"),
		PodResourcesSocket: filepath.Join(dir, "pr.sock"),
		Timing:             plugin.Timing{RemovalDelay: time.Second},
		Rescan:             300 * time.Millisecond,
		Probe:              300 * time.Millisecond,
		Settings: agent.Settings{
			SampleInterval: time.Second,
			Listen:         listen,
			Logger:         log,
			Version:        version,
		},
	}
	if scenario.claims {
		s.dra, err = newDemoDRA(ctx, dir, log)
		if err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		options.DRA, options.NodeName = s.dra.options, demoNodeName
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.kubelet.Run(ctx) })
	group.Go(func() error { return s.runMPS(ctx, log) })
	group.Go(func() error { return daemon.Run(ctx, options) })
	group.Go(func() error {
		defer cancel()
		if err := s.playSteps(ctx, scenario.steps(s)); err != nil {
			return err
		}
		if listen != "" && len(s.broken) == 0 {
			if scenario.afterwards != nil {
				if err := scenario.afterwards(s, ctx); err != nil {
					return err
				}
			}
			s.say("\nServing on http://%s (/status, /metrics, /plan, /readyz). Ctrl-C ends it.", listen)
			return s.serveCluster(ctx, listen)
		}
		return nil
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("demo: %w", err)
	}
	if len(s.broken) > 0 {
		return fmt.Errorf("demo: %d steps did not come true: %v", len(s.broken), s.broken)
	}
	return nil
}

// demoDir returns a new temporary directory. It is in /tmp if TMPDIR is too long for the paths of
// Unix sockets, as on macOS, or if other users cannot enter TMPDIR: the user of an MPS server must
// be able to.
func demoDir() (string, error) {
	dir, err := os.MkdirTemp("", "virgate")
	if err != nil {
		return "", err
	}
	if mps.CheckRoot(filepath.Join(dir, "mps")) == nil && mps.CheckParents(filepath.Dir(dir)) == nil {
		return dir, nil
	}
	if err := os.Remove(dir); err != nil {
		return "", err
	}
	return os.MkdirTemp("/tmp", "virgate")
}

func (s *demoNode) say(format string, arguments ...any) {
	_, _ = fmt.Fprintf(s.out, format+"\n", arguments...)
}

// check prints whether a check passed, and records a failed one.
func (s *demoNode) check(ok bool, format string, arguments ...any) {
	mark := "✓"
	message := fmt.Sprintf(format, arguments...)
	if !ok {
		mark = "✗"
		s.broken = append(s.broken, message)
	}
	s.say("   %s %s", mark, message)
}

// timesSlicedBy returns a profile in the format of NVIDIA's device plugin.
func timesSlicedBy(replicas int) []byte {
	return fmt.Appendf(nil, `version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: %d
`, replicas)
}

// replace replaces the profile atomically, as an operator's editor does.
func (s *demoNode) replace(data []byte) error {
	next := s.profile + ".new"
	if err := os.WriteFile(next, data, 0o600); err != nil {
		return err
	}
	return os.Rename(next, s.profile)
}

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

// playSteps plays the steps. A failed check does not stop it; an error does.
func (s *demoNode) playSteps(ctx context.Context, steps []step) error {
	for i, step := range steps {
		s.say("\n%d. %s", i+1, step.title)
		if err := step.play(ctx); err != nil {
			return err
		}
	}
	return nil
}

// podOf returns a pod with one container that requests count devices of the resource.
func podOf(namespace, name, resource string, count int) simkubelet.Pod {
	return simkubelet.Pod{
		Namespace: namespace,
		Name:      name,
		Containers: []simkubelet.Container{
			{Name: "main", Requests: map[string]int{resource: count}},
		},
	}
}

// await waits for the wanted state of the kubelet, and reports whether the kubelet reached it.
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

// switchModes changes the mode in which GPUs are offered that no pod holds, and restores it at the
// end.
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
		s.check(came, "%s: %d × %s after %d ms%s", to.name, to.count, to.resource, time.Since(start).Milliseconds(),
			note)
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
		s.check(len(devices) == pod.count && len(units) == pod.count, "devices granted: %d, each on another GPU",
			pod.count)
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
		"streams closed: %d, new registrations: %d", r.StreamsClosed-before.StreamsClosed,
		r.Registrations-before.Registrations)
	s.check(s.podsKeepDevices(after), "every pod still holds its devices")
	return err
}

// podsKeepDevices reports whether every device of a running pod is listed and Healthy.
func (s *demoNode) podsKeepDevices(k simkubelet.Snapshot) bool {
	running := 0
	for _, pod := range k.Pods {
		if pod.Phase != simkubelet.Running {
			return false
		}
		running++
		for _, id := range pod.Containers[0].Devices(gpuResource) {
			if !slices.ContainsFunc(k.Resources[gpuResource].Devices,
				func(d simkubelet.Device) bool { return d.ID == id && d.Healthy }) {
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
			if unit, _, _ := sharing.ParseDeviceID(d.ID); d.Healthy && unit == s.gpus[0].UUID {
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
	s.check(came, "after a reset of the GPU all 4 are back: allocatable %d",
		s.kubelet.Snapshot().Resources[gpuResource].Allocatable)
	return err
}

func (s *demoNode) breakProfile(ctx context.Context) error {
	if err := s.replace(bytes.Replace(timesSlicedBy(0), []byte("replicas"), []byte("replicsa"), 1)); err != nil {
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
	// The program checks the file every 200 ms. If a pod is admitted after a second, the program
	// still serves.
	if !wake.Sleep(ctx, time.Second) {
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

// The node that --serve leaves running has answers to all questions of docs/reference/queries.md.
const (
	fillReplicas = 6
	gibibyte     = 1 << 30
	// firstPID is the process ID of the first simulated process.
	firstPID = 4000
	// freeGPU has a process of the host on it. faultyGPU fails.
	freeGPU, faultyGPU = 7, 6
	// memoryError is the XID of an uncorrectable error that was not contained.
	memoryError = 95
)

// fillPods are added after the pods of the steps. They share GPUs with them; each has one device.
var fillPods = []struct{ namespace, name string }{
	{"team-a", "search"}, {"team-a", "ranking"}, {"team-a", "speech"}, {"team-b", "training"}, {"team-b", "vision"},
}

// load is how much a container's process uses of each of its units.
type load struct {
	memory  uint64
	percent int
}

// loads are the loads that differ from usualLoad, by pod.
var (
	usualLoad = load{memory: 4 * gibibyte, percent: 25}
	loads     = map[string]load{
		"training": {memory: 12 * gibibyte, percent: 70}, // More than its share, and busy.
		"notebook": {memory: 1 * gibibyte},
	}
)

// fillNode adds pods that use their GPUs, one pod that requests too many, and a failing GPU.
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

// startProcesses starts a process on each unit that a container holds, and one process that is in
// no container.
func (s *demoNode) startProcesses() error {
	index := map[string]int{}
	for _, gpu := range s.gpus {
		index[gpu.UUID] = gpu.Index
	}
	pid := firstPID
	start := func(gpu int, does load, container string) error {
		pid++
		return s.node.Do("process-add", map[string]string{
			"gpu":       strconv.Itoa(gpu),
			"pid":       strconv.Itoa(pid),
			"bytes":     strconv.FormatUint(does.memory, 10),
			"sm":        strconv.Itoa(does.percent),
			"container": container,
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
				if err := start(index[unit], does,
					fmt.Sprintf("%s/%s/%s", pod.Namespace, pod.Name, container.Name)); err != nil {
					return err
				}
			}
		}
	}
	return start(freeGPU, load{memory: 2 * gibibyte}, "")
}
