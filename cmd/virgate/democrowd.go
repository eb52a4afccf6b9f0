package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
)

// The node that --serve leaves to be looked at: crowded enough that there is an
// answer to every question of docs/monitoring.md.
const (
	crowdReplicas = 6
	gibibyte      = 1 << 30
	// firstPID is of the first simulated process.
	firstPID = 4000
	// freeGPU has a process of the host on it, sickGPU breaks.
	freeGPU, sickGPU = 7, 6
	// memoryError is the XID of an uncorrectable error that was not contained.
	memoryError = 95
)

// crowdPods come after the pods of the play, each with one device, and are put
// beside them.
var crowdPods = []struct{ namespace, name string }{
	{"team-a", "search"}, {"team-a", "ranking"}, {"team-a", "speech"}, {"team-b", "training"}, {"team-b", "vision"},
}

// work is what a container's process does on each of its units.
type work struct {
	memory  uint64
	percent int
}

// works are the containers that do other than usualWork, by pod.
var (
	usualWork = work{memory: 4 * gibibyte, percent: 25}
	works     = map[string]work{
		"training": {memory: 12 * gibibyte, percent: 70}, // More than its share, and loud.
		"notebook": {memory: 1 * gibibyte},
	}
)

// crowd lets more pods come to the node, all of them work, one ask for too much,
// and a GPU break.
func (s *stage) crowd(ctx context.Context) error {
	s.say("\nMore pods come, and all of them work.")
	profile := append(timesSlicedBy(crowdReplicas), "    failRequestsGreaterThanOne: true\n"...)
	if err := s.replace(profile); err != nil {
		return err
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[gpuResource].Allocatable == 8*crowdReplicas
	})
	if err != nil {
		return err
	}
	s.check(came, "6 replicas a GPU, and one for each container")
	for _, pod := range crowdPods {
		_, err := s.kubelet.AddPod(ctx, podOf(pod.namespace, pod.name, gpuResource, 1))
		s.check(err == nil, "pod %s/%s runs", pod.namespace, pod.name)
	}
	_, err = s.kubelet.AddPod(ctx, podOf("team-b", "greedy", gpuResource, 2))
	s.check(err != nil, "pod team-b/greedy asks for 2, and is refused")
	if err := s.startProcesses(); err != nil {
		return err
	}
	return s.node.Do("xid", map[string]string{"gpu": strconv.Itoa(sickGPU), "code": strconv.Itoa(memoryError)})
}

// startProcesses starts one on each unit that a container holds, and one on the
// host itself.
func (s *stage) startProcesses() error {
	gpus, err := nvml.Scan(s.node)
	if err != nil {
		return err
	}
	index := map[string]int{}
	for _, gpu := range gpus {
		index[gpu.UUID] = gpu.Index
	}
	pid := firstPID
	start := func(gpu int, does work, container string) error {
		pid++
		return s.node.Do("process-add", map[string]string{
			"gpu": strconv.Itoa(gpu), "pid": strconv.Itoa(pid), "bytes": strconv.FormatUint(does.memory, 10),
			"sm": strconv.Itoa(does.percent), "container": container,
		})
	}
	for _, pod := range s.kubelet.Snapshot().Pods {
		does, special := works[pod.Name]
		if !special {
			does = usualWork
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
	return start(freeGPU, work{memory: 2 * gibibyte}, "")
}
