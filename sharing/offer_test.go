package sharing

import (
	"testing"

	"github.com/virgate/virgate/mig"
)

// strategy is the default profile with this MIG strategy.
func strategy(s MIGStrategy, exclude ...Selector) Profile {
	profile := defaults()
	profile.MIGStrategy = s
	profile.Exclude = exclude
	return profile
}

func TestPlanMIGStrategy(t *testing.T) {
	sick := cut(0, oneG(), oneG(), twoG())
	sick.Fault = "lost"
	for _, test := range []planCase{
		{
			name:    "none offers whole boards",
			gpus:    node(2),
			profile: strategy(MIGNone),
			want:    []string{"nvidia.com/gpu: 0×1 1×1"},
		}, {
			name:    "none withholds boards with MIG",
			gpus:    []GPU{whole(0, a100), cut(1, oneG()), cut(2)},
			profile: strategy(MIGNone),
			want:    []string{"nvidia.com/gpu: 0×1"},
			warnings: []string{
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): not offered: MIG is enabled, and MIG strategy "none" offers whole GPUs only`,
				`GPU 2 (GPU-00000000-0000-0000-0000-000000000002): not offered: MIG is enabled, and MIG strategy "none" offers whole GPUs only`,
			},
		}, {
			name:    "no strategy is none",
			gpus:    []GPU{cut(0, oneG())},
			profile: strategy(""),
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is enabled, and MIG strategy "none" offers whole GPUs only`,
			},
		}, {
			name:    "mixed offers everything under its own name",
			gpus:    []GPU{whole(0, a100), cut(1, oneG(), twoG(), oneG()), cut(2, oneG())},
			profile: strategy(MIGMixed),
			want: []string{
				"nvidia.com/gpu: 0×1", "nvidia.com/mig-1g.5gb: 1:0×1 1:2×1 2:0×1", "nvidia.com/mig-2g.10gb: 1:1×1",
			},
		}, {
			name:    "mixed mentions an empty board",
			gpus:    []GPU{cut(0), cut(1, oneG())},
			profile: strategy(MIGMixed),
			want:    []string{"nvidia.com/mig-1g.5gb: 1:0×1"},
			warnings: []string{
				"GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is enabled, and there are no partitions",
			},
		}, {
			name:    "mixed mentions a partition it cannot name",
			gpus:    []GPU{cut(0, mig.Profile{}, oneG())},
			profile: strategy(MIGMixed),
			want:    []string{"nvidia.com/mig-1g.5gb: 0:1×1"},
			warnings: []string{
				"GPU 0 (GPU-00000000-0000-0000-0000-000000000000): partition 0 (MIG-00000000-0000-0000-0000-000000000000) not offered: its MIG profile is unknown",
			},
		}, {
			name:    "single without MIG offers whole boards",
			gpus:    node(2),
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 0×1 1×1"},
		}, {
			name:    "single calls partitions as their boards",
			gpus:    []GPU{cut(0, twoG(), twoG()), cut(1, twoG())},
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 0:0×1 0:1×1 1:0×1"},
		}, {
			name:    "single offers one kind",
			gpus:    []GPU{whole(0, a100), cut(1, twoG(), oneG(), oneG()), cut(2), cut(3, twoG(), threeG(), oneG())},
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 1:1×1 1:2×1 3:2×1"},
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is off, while MIG strategy "single" offers partitions only on this node`,
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
				`GPU 2 (GPU-00000000-0000-0000-0000-000000000002): not offered: MIG is enabled, and there are no partitions`,
				`GPU 3 (GPU-00000000-0000-0000-0000-000000000003): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
				`GPU 3 (GPU-00000000-0000-0000-0000-000000000003): 1 × 3g.20gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
			},
		}, {
			name:    "single does not fall back to whole boards while MIG is being cut",
			gpus:    []GPU{whole(0, a100), cut(1)},
			profile: strategy(MIGSingle),
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): not offered: MIG is off, while MIG strategy "single" offers partitions only on this node`,
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): not offered: MIG is enabled, and there are no partitions`,
			},
		}, {
			name:    "single does not let a fault change the kind",
			gpus:    []GPU{sick, cut(1, twoG(), oneG())},
			profile: strategy(MIGSingle),
			want:    []string{"nvidia.com/gpu: 0:0×1! 0:1×1! 1:1×1"},
			warnings: []string{
				`GPU 0 (GPU-00000000-0000-0000-0000-000000000000): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
				`GPU 1 (GPU-00000000-0000-0000-0000-000000000001): 1 × 2g.10gb not offered: MIG strategy "single" offers one kind of partition, on this node 1g.5gb`,
			},
		}, {
			name:    "single looks at what is not excluded",
			gpus:    []GPU{whole(0, a100), cut(1, oneG())},
			profile: strategy(MIGSingle, selectors(t, "1")...),
			want:    []string{"nvidia.com/gpu: 0×1"},
		},
	} {
		test.run(t)
	}
}

func TestPlanExclude(t *testing.T) {
	for _, test := range []planCase{
		{
			name:    "by index, UUID and bus ID",
			gpus:    node(5),
			profile: strategy(MIGMixed, selectors(t, "0", node(5)[2].UUID, "0000:04:00.0")...),
			want:    []string{"nvidia.com/gpu: 1×1 3×1"},
		}, {
			name:    "a board with all of its partitions",
			gpus:    []GPU{cut(0, oneG(), oneG()), cut(1, oneG())},
			profile: strategy(MIGMixed, selectors(t, "0")...),
			want:    []string{"nvidia.com/mig-1g.5gb: 1:0×1"},
		}, {
			name:    "single partitions",
			gpus:    []GPU{cut(0, oneG(), oneG(), twoG())},
			profile: strategy(MIGMixed, selectors(t, "0:0", cut(0, oneG(), oneG(), twoG()).Partitions[2].UUID)...),
			want:    []string{"nvidia.com/mig-1g.5gb: 0:1×1"},
		}, {
			name:    "every partition one by one is not an empty board",
			gpus:    []GPU{cut(0, oneG(), twoG())},
			profile: strategy(MIGMixed, selectors(t, "0:0", "0:1")...),
		}, {
			name:    "everything",
			gpus:    node(1),
			profile: strategy(MIGMixed, selectors(t, "0")...),
		}, {
			name:    "what is not there",
			gpus:    []GPU{whole(0, a100), cut(1, oneG())},
			profile: strategy(MIGMixed, selectors(t, "7", "0:0", "1:3", "0000:3b:00.0")...),
			want:    []string{"nvidia.com/gpu: 0×1", "nvidia.com/mig-1g.5gb: 1:0×1"},
			warnings: []string{
				`exclude[0]: "7" names nothing on this node`,
				`exclude[1]: "0:0" names nothing on this node`,
				`exclude[2]: "1:3" names nothing on this node`,
				`exclude[3]: "00000000:3B:00.0" names nothing on this node`,
			},
		}, {
			name:    "twice",
			gpus:    []GPU{whole(0, a100), cut(1, oneG())},
			profile: strategy(MIGMixed, selectors(t, "1", "0", "1:0", whole(0, a100).UUID)...),
		},
	} {
		test.run(t)
	}
}
