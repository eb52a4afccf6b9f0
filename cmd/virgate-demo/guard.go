package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/virgate/virgate/internal/memoryguard"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
)

// guardedProfile has short time slices. It evicts pods that use more than their share of the memory
// for two seconds.
const guardedProfile = `version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
      timeSlice: short
      memory: {limit: share, grace: 2s, action: evict}
`

// demoAPI is the API server for evictions: it knows the pods and enforces one PodDisruptionBudget.
type demoAPI struct {
	kubelet *simkubelet.Kubelet
	// refused counts the evictions that the budget did not allow. The budget applies until lifted
	// is set.
	refused atomic.Int32
	lifted  atomic.Bool

	mu      sync.Mutex
	evicted []string
}

// keptPod is the pod that the budget protects from eviction.
const keptPod = "training"

func (d *demoAPI) pods() memoryguard.Pods {
	return memoryguard.Pods{
		UID: func(namespace, pod string) string { return "uid of " + namespace + "/" + pod },
		Evict: func(_ context.Context, namespace, pod, _ string) error {
			if pod == keptPod && !d.lifted.Load() {
				d.refused.Add(1)
				return nodereport.ErrDisruptionBudget
			}
			d.mu.Lock()
			d.evicted = append(d.evicted, pod)
			d.mu.Unlock()
			return d.kubelet.DeletePod(namespace, pod)
		},
	}
}

func (d *demoAPI) evictions() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.evicted)
}

// guardSteps make pods use more than their share of a shared GPU's memory.
func (s *demoNode) guardSteps() []step {
	return []step{
		{"The node: a T4 of 15 GiB in four shares, each with a quarter of the memory", func(ctx context.Context) error {
			came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
				return k.Resources[gpuResource].Allocatable == 4
			})
			s.check(came, "the kubelet lists 4 devices")
			return err
		}},
		{"Three pods: one within its share, two beyond it, of which a PodDisruptionBudget keeps one", s.runGuarded},
		{"The guard evicts the one that it may, and asks for the other again", func(ctx context.Context) error {
			if err := s.awaitEviction(ctx, "notebook", "inference", keptPod); err != nil {
				return err
			}
			s.check(s.api.refused.Load() > 0,
				"%s, which uses most, was to be first: its PodDisruptionBudget does not allow it", keptPod)
			return s.node.Do("process-remove", map[string]string{"gpu": "0", "pid": strconv.Itoa(firstPID + 2)})
		}},
		{"The budget goes", func(ctx context.Context) error {
			s.api.lifted.Store(true)
			if err := s.awaitEviction(ctx, keptPod, "inference"); err != nil {
				return err
			}
			return s.node.Do("process-remove", map[string]string{"gpu": "0", "pid": strconv.Itoa(firstPID + 1)})
		}},
		{"What the kubelet thinks of it", s.showVerdict},
	}
}

func (s *demoNode) runGuarded(ctx context.Context) error {
	for i, pod := range []struct {
		name string
		gib  int
	}{{"inference", 2}, {keptPod, 6}, {"notebook", 5}} {
		if _, err := s.kubelet.AddPod(ctx, podOf("demo", pod.name, gpuResource, 1)); err != nil {
			return fmt.Errorf("demo: %w", err)
		}
		if err := s.node.Do("process-add", map[string]string{
			"gpu":       "0",
			"pid":       strconv.Itoa(firstPID + i),
			"bytes":     strconv.Itoa(pod.gib * gibibyte),
			"container": "demo/" + pod.name + "/main",
		}); err != nil {
			return err
		}
		s.say("   pod %-9s  uses %d GiB", pod.name, pod.gib)
	}
	return nil
}

// awaitEviction waits until the pod is gone, and checks that the others are not.
func (s *demoNode) awaitEviction(ctx context.Context, pod string, others ...string) error {
	names := func(k simkubelet.Snapshot) (names []string) {
		for _, p := range k.Pods {
			names = append(names, p.Name)
		}
		slices.Sort(names)
		return names
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool { return !slices.Contains(names(k), pod) })
	s.check(came && slices.Equal(names(s.kubelet.Snapshot()), others),
		"%s is evicted; still there: %v; evicted so far: %v", pod, names(s.kubelet.Snapshot()), s.api.evictions())
	return err
}
