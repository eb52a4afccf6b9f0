package kubelet

import (
	"fmt"
	"slices"

	"github.com/virgate/virgate/sharing"
)

// The resource that most tests have, and what it may be renamed to.
const (
	gpu    = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
)

// profile is the little of a profile that these tests change.
type profile struct {
	// resource is the name of the GPUs, gpu when empty.
	resource string
	replicas int
	policy   sharing.Policy
	// faulty and excluded are indexes of GPUs.
	faulty, excluded []int
}

// boards are GPUs of one model, alternately next to one NUMA node and the
// other. first is the index of the first one.
func boards(model string, first, count int) []sharing.GPU {
	gpus := make([]sharing.GPU, count)
	for i := range gpus {
		gpus[i] = sharing.GPU{
			UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", first+i), Index: first + i, Minor: first + i,
			Model: model, NUMANode: i % 2,
		}
	}
	return gpus
}

// plan plans so many GPUs under one profile.
func plan(count int, p profile) sharing.Plan {
	return planAll([]string{"GPU"}, count, map[string]profile{"GPU": p})
}

// planAll plans so many GPUs of each model under the model's profile.
func planAll(models []string, count int, profiles map[string]profile) sharing.Plan {
	whole := sharing.Profile{MIGStrategy: sharing.MIGNone, Policy: sharing.Distributed, DeviceIDs: sharing.ByUUID}
	var gpus []sharing.GPU
	for m, model := range models {
		p := profiles[model]
		if p.resource == "" {
			p.resource = gpu
		}
		if p.policy == "" {
			p.policy = sharing.Distributed
		}
		whole.GPUNames = append(whole.GPUNames, sharing.Naming{Pattern: sharing.Pattern(model), Name: p.resource})
		whole.Shares = append(whole.Shares, sharing.Share{Resource: p.resource, Replicas: p.replicas, Policy: p.policy})
		for i, board := range boards(model, m*count, count) {
			if slices.Contains(p.faulty, i) {
				board.Fault = "XID 79"
			}
			if slices.Contains(p.excluded, i) {
				whole.Exclude = append(whole.Exclude, mustSelect(board.UUID))
			}
			gpus = append(gpus, board)
		}
	}
	return sharing.NewPlan(gpus, whole)
}

func mustSelect(uuid string) sharing.Selector {
	selector, err := sharing.ParseSelector(uuid)
	if err != nil {
		panic(err) // boards makes no such UUID
	}
	return selector
}

// unitsOf are the units of the pod's devices, sorted, each once.
func unitsOf(p *pod) []string {
	var units []string
	for _, id := range p.devices {
		unit, _, _ := sharing.ParseDeviceID(id)
		units = append(units, unit)
	}
	slices.Sort(units)
	return slices.Compact(units)
}
