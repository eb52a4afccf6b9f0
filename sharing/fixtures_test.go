package sharing

import (
	"fmt"
	"strings"
	"testing"

	"github.com/virgate/virgate/mig"
)

const (
	a100 = "NVIDIA A100-SXM4-40GB"
	t4   = "Tesla T4"
)

// The profiles that the tests cut GPUs into.
func oneG() mig.Profile   { return mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5} }
func oneGME() mig.Profile { return mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5, Attributes: "+me"} }
func twoG() mig.Profile   { return mig.Profile{Compute: 2, Slices: 2, MemoryGB: 10} }
func halfG() mig.Profile  { return mig.Profile{Compute: 1, Slices: 2, MemoryGB: 10} }
func threeG() mig.Profile { return mig.Profile{Compute: 3, Slices: 3, MemoryGB: 20} }

// whole returns a GPU with MIG off. Its UUID and bus ID end in its index.
func whole(index int, model string) GPU {
	return GPU{
		UUID:     fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", index),
		Index:    index,
		Minor:    index + 10,
		PCIBusID: fmt.Sprintf("00000000:%02X:00.0", index),
		Model:    model,
		NUMANode: index / 4,
	}
}

// node returns so many GPUs with MIG off.
func node(count int) []GPU {
	gpus := make([]GPU, count)
	for i := range gpus {
		gpus[i] = whole(i, a100)
	}
	return gpus
}

// cut returns a GPU with MIG on and these partitions. Their UUIDs end in the
// GPU's and their own index.
func cut(index int, profiles ...mig.Profile) GPU {
	gpu := whole(index, a100)
	gpu.MIG = true
	for i, profile := range profiles {
		gpu.Partitions = append(gpu.Partitions, Partition{
			UUID:    fmt.Sprintf("MIG-00000000-0000-0000-0000-%06d%06d", index, i),
			Index:   i,
			Profile: profile,
			GI:      i + 7,
		})
	}
	return gpu
}

// defaults is the profile of an empty document, but with MIG strategy mixed.
func defaults(shares ...ReplicatedResource) Profile {
	for i := range shares {
		shares[i].Path = fmt.Sprintf("resources[%d]", i)
		if shares[i].Policy == "" {
			shares[i].Policy = Distributed
		}
	}
	return Profile{
		MIGStrategy: MIGMixed,
		GPUNames:    []NamingRule{{"*", "nvidia.com/gpu"}},
		TimeSlicing: shares,
		Policy:      Distributed,
		DeviceIDs:   ByUUID,
	}
}

// list is a Selection of these selectors.
func list(t testing.TB, texts ...string) Selection {
	t.Helper()
	return Selection{List: selectors(t, texts...)}
}

// show writes a plan's resources as lines "name: index×replicas …", sick units
// with an exclamation mark.
func show(plan Plan) []string {
	var lines []string
	for _, resource := range plan.Resources {
		var line strings.Builder
		line.WriteString(resource.Name + ":")
		for _, unit := range resource.Units {
			fmt.Fprintf(&line, " %s×%d", unit.Index, unit.Replicas)
			if !unit.Health.Healthy() {
				line.WriteString("!")
			}
		}
		lines = append(lines, line.String())
	}
	return lines
}
