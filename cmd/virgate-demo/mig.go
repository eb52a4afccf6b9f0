package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// These are the resources of the MIG scenario, as an H100 with 80 GB has them.
const (
	small  = "nvidia.com/mig-1g.10gb"
	medium = "nvidia.com/mig-2g.20gb"
	large  = "nvidia.com/mig-3g.40gb"
)

// withLayout returns a profile that partitions the node's GPUs by that layout.
func withLayout(layout string) []byte {
	return fmt.Appendf(nil, `version: v1
flags:
  migStrategy: mixed
mig:
  manage: true
  config: %s
`, layout)
}

// migSteps repartition a GPU while pods run on it.
func (s *demoNode) migSteps() []step {
	return []step{
		{"The node: an H100, cut into seven small partitions", s.showSmall},
		{"Three pods take one each, and a fourth asks for a large one", s.runSmallPods},
		{"The profile asks for all-balanced: two small, one medium, one large", s.askBalanced},
		{"A container of a pod that stays restarts", s.restartStaying},
		{"The third pod ends, and the rest follows", s.endThird},
		{"The large partition has a pod at last", s.runLargePod},
		{"What the kubelet thinks of it", s.showVerdict},
	}
}

// draw prints the GPU's slices, with the pods that have them.
func (s *demoNode) draw(ctx context.Context) error {
	state, err := nvml.NewPartitioner(s.node, nil).State(ctx, s.gpus[0].UUID)
	if err != nil {
		return err
	}
	holders := s.holders()
	blocks := mig.Change{}.Before(state.Instances)
	for i := range blocks {
		for _, instance := range state.Instances {
			if instance.Placement == blocks[i].Placement && len(instance.Computes) > 0 {
				blocks[i].Note = holders[instance.Computes[0].UUID]
			}
		}
	}
	for line := range strings.Lines(mig.Draw(state.Geometry.Slots, 76, blocks)) {
		s.say("   %s", strings.TrimSuffix(line, "\n"))
	}
	return nil
}

// listed waits until the kubelet may allocate these numbers of each resource, including those held.
func (s *demoNode) listed(ctx context.Context, smalls, mediums, larges int) error {
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[small].Allocatable == smalls && k.Resources[medium].Allocatable == mediums &&
			k.Resources[large].Allocatable == larges
	})
	s.check(came, "the kubelet lists %d × 1g.10gb, %d × 2g.20gb, %d × 3g.40gb", smalls, mediums, larges)
	return err
}

func (s *demoNode) showSmall(ctx context.Context) error {
	if err := s.listed(ctx, 7, 0, 0); err != nil {
		return err
	}
	return s.draw(ctx)
}

// migPods are the pods on the GPU when it is repartitioned; the last one ends.
var migPods = []string{"search", "speech", "vision"}

func (s *demoNode) runSmallPods(ctx context.Context) error {
	for _, name := range migPods {
		_, err := s.kubelet.AddPod(ctx, podOf("demo", name, small, 1))
		s.check(err == nil, "pod %s runs on a small partition", name)
	}
	_, err := s.kubelet.AddPod(ctx, podOf("demo", "training", large, 1))
	s.check(err != nil, "pod training finds no large partition")
	return s.draw(ctx)
}

// askBalanced changes the profile. Two of the pods are on partitions that the new layout keeps. The
// third pod's partition is surplus and stays until the pod ends.
func (s *demoNode) askBalanced(ctx context.Context) error {
	before := s.partitionsOfPods()
	if err := s.replace(withLayout("all-balanced")); err != nil {
		return err
	}
	came, err := s.await(ctx, func(k simkubelet.Snapshot) bool {
		return k.Resources[small].Allocatable == 2 && k.Resources[large].Allocatable == 1
	})
	if err != nil {
		return err
	}
	s.check(came, "free partitions went, and what fits beside the pods is made: the medium one waits for a pod")
	s.check(slices.Equal(before, s.partitionsOfPods()), "every pod has the partition that it had")
	return s.draw(ctx)
}

// partitionsOfPods returns the partitions that pods hold and that exist.
func (s *demoNode) partitionsOfPods() []string {
	gpus, err := nvml.Scan(s.node)
	if err != nil || len(gpus) == 0 {
		return nil
	}
	held := slices.Sorted(maps.Keys(s.holders()))
	return slices.DeleteFunc(held, func(id string) bool {
		return !slices.ContainsFunc(gpus[0].Partitions, func(p sharing.Partition) bool { return p.UUID == id })
	})
}

// holders maps devices to the pods that hold them.
func (s *demoNode) holders() map[string]string {
	holders := map[string]string{}
	for _, pod := range s.kubelet.Snapshot().Pods {
		for _, container := range pod.Containers {
			for _, grant := range container.Grants {
				for _, id := range grant.Devices {
					holders[id] = pod.Name
				}
			}
		}
	}
	return holders
}

func (s *demoNode) restartStaying(ctx context.Context) error {
	_, err := s.kubelet.RestartContainer(ctx, "demo", migPods[0], "main")
	s.check(err == nil, "the container of pod %s runs again, on its partition", migPods[0])
	return ctx.Err()
}

func (s *demoNode) endThird(ctx context.Context) error {
	if err := s.kubelet.DeletePod("demo", migPods[2]); err != nil {
		return err
	}
	if err := s.listed(ctx, 2, 1, 1); err != nil {
		return err
	}
	return s.draw(ctx)
}

func (s *demoNode) runLargePod(ctx context.Context) error {
	if err := s.kubelet.DeletePod("demo", "training"); err != nil {
		return err
	}
	_, err := s.kubelet.AddPod(ctx, podOf("demo", "training", large, 1))
	s.check(err == nil, "pod training runs on the large partition")
	s.check(len(s.partitionsOfPods()) == 3, "pods %s and %s still have theirs", migPods[0], migPods[1])
	return s.draw(ctx)
}
