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

// The profiles that the tests cut boards into.
func oneG() mig.Profile   { return mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5} }
func oneGME() mig.Profile { return mig.Profile{Compute: 1, Slices: 1, MemoryGB: 5, Attributes: "+me"} }
func twoG() mig.Profile   { return mig.Profile{Compute: 2, Slices: 2, MemoryGB: 10} }
func halfG() mig.Profile  { return mig.Profile{Compute: 1, Slices: 2, MemoryGB: 10} }
func threeG() mig.Profile { return mig.Profile{Compute: 3, Slices: 3, MemoryGB: 20} }

// whole returns a board with MIG off. Its UUID and bus ID end in its index.
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

// node returns so many boards with MIG off.
func node(count int) []GPU {
	boards := make([]GPU, count)
	for i := range boards {
		boards[i] = whole(i, a100)
	}
	return boards
}

// cut returns a board with MIG on and these partitions. Their UUIDs end in the
// board's and their own index.
func cut(index int, profiles ...mig.Profile) GPU {
	board := whole(index, a100)
	board.MIG = true
	for i, profile := range profiles {
		board.Partitions = append(board.Partitions, Partition{
			UUID:    fmt.Sprintf("MIG-00000000-0000-0000-0000-%06d%06d", index, i),
			Index:   i,
			Profile: profile,
			GI:      i + 7,
		})
	}
	return board
}

// defaults is the profile of an empty document, but with MIG strategy mixed.
func defaults(shares ...Share) Profile {
	for i := range shares {
		shares[i].Path = fmt.Sprintf("resources[%d]", i)
		if shares[i].Policy == "" {
			shares[i].Policy = Distributed
		}
	}
	return Profile{
		MIGStrategy: MIGMixed,
		GPUNames:    []Naming{{"*", "nvidia.com/gpu"}},
		Shares:      shares,
		Policy:      Distributed,
		DeviceIDs:   ByUUID,
	}
}

// list selects what the texts name.
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
			if unit.Fault != "" {
				line.WriteString("!")
			}
		}
		lines = append(lines, line.String())
	}
	return lines
}
