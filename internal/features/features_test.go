package features_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

// a100 are GPUs as the driver has them, from that index on.
func a100(first, count int) []sharing.GPU {
	var gpus []sharing.GPU
	for i := first; i < first+count; i++ {
		gpus = append(gpus, sharing.GPU{
			UUID: fmt.Sprintf("GPU-%d", i), Index: i, Model: "NVIDIA A100-SXM4-40GB", Memory: 40 << 30,
			Architecture: "ampere", ComputeCapability: "8.0", PCIClass: 0x030200, MIGCapable: true,
		})
	}
	return gpus
}

func t4(index int) sharing.GPU {
	return sharing.GPU{UUID: fmt.Sprintf("GPU-%d", index), Index: index, Model: "Tesla T4", Memory: 15 << 30, ComputeCapability: "7.5", PCIClass: 0x030200}
}

// cut enables MIG on the GPU, with partitions of these MIG profiles.
func cut(gpu sharing.GPU, profiles ...string) sharing.GPU {
	gpu.MIG, gpu.Memory = true, 0 // As without the right to monitor.
	for i, name := range profiles {
		profile, err := mig.ParseProfile(name)
		if err != nil {
			panic(err)
		}
		gpu.Partitions = append(gpu.Partitions, sharing.Partition{
			UUID: fmt.Sprintf("MIG-%d-%d", gpu.Index, i), Index: i, Profile: profile,
			Attributes: sharing.PartitionAttributes{
				MemoryMiB: uint64(1000 * profile.MemoryGB), Multiprocessors: 14 * profile.Compute, GPUSlices: profile.Slices, ComputeSlices: profile.Compute,
				CopyEngines: 1, Decoders: 2, JPEGEngines: 3, OFAEngines: 4,
			},
		})
	}
	return gpu
}

func share(name string, replicas int, rename string) sharing.Profile {
	return sharing.Profile{
		MIGStrategy: sharing.MIGMixed, GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		TimeSlicing: []sharing.ReplicatedResource{{Resource: "nvidia.com/" + name, Replicas: replicas, Rename: rename}},
	}
}

// selected are the labels whose name, without the domain and followed by =, begins with one of the prefixes.
func selected(labels map[string]string, prefixes []string) map[string]string {
	found := map[string]string{}
	for label, value := range labels {
		name := strings.TrimPrefix(label, "nvidia.com/")
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name+"=", p) }) {
			found[name] = value
		}
	}
	return found
}

func TestLabels(t *testing.T) {
	host := features.VGPU{HostVersion: "550.90.07", HostBranch: "r550_90"}
	named := sharing.Profile{GPUNames: []sharing.NamingRule{{Pattern: "A100", Name: "nvidia.com/a100"}, {Pattern: "T4", Name: "example.com/t4"}}}
	byMPS := share("gpu", 4, "")
	byMPS.TimeSlicing[0].MPS = true
	some := share("gpu", 8, "nvidia.com/gpu.shared")
	some.TimeSlicing[0].Select.Count = 1
	both := share("gpu", 8, "")
	both.TimeSlicing[0].Select.Count = 1
	uneven := func(shared int) sharing.Profile { // GPUs 0 and 1 in six, the others in another number.
		p := share("gpu", 6, "")
		rest := p.TimeSlicing[0]
		p.TimeSlicing[0].Select.Count, rest.Replicas = 2, shared
		p.TimeSlicing = append(p.TimeSlicing, rest)
		return p
	}
	twoWays := uneven(3)
	twoWays.TimeSlicing[0].MPS = true
	first, err := sharing.ParseSelector("0")
	if err != nil {
		t.Fatal(err)
	}
	single := share("gpu", 3, "")
	single.MIGStrategy = sharing.MIGSingle
	none := share("gpu", 3, "")
	none.MIGStrategy = sharing.MIGNone
	gone := a100(0, 3)
	gone[1].DriverIndex, gone[2].Health = sharing.NotListed, sharing.Faulty("XID 79")
	fabric := a100(0, 2)
	fabric[0].Clique, fabric[1].Clique = "c.1", "c.1"
	half := slices.Clone(fabric)
	half[1].Clique = ""
	apart := slices.Clone(fabric)
	apart[1].Clique = "c.2"
	display := a100(0, 1)
	display[0].PCIClass = 0x030000
	media := cut(a100(0, 1)[0], "1g.5gb+me", "1g.5gb")
	long := a100(0, 1)
	long[0].Model = "NVIDIA " + strings.Repeat("Very ", 12) + "Long (TM) GPU"
	bare := cut(a100(0, 1)[0], "1g.5gb")
	bare.Partitions[0].Attributes, bare.Partitions[0].Memory = sharing.PartitionAttributes{}, 5<<30

	for _, test := range []struct {
		name string
		node features.Node
		of   []string
		want map[string]string
	}{
		{"no GPU", features.Node{Timestamp: 7, Driver: "580.65.06", CUDA: 13000}, []string{""}, map[string]string{"gfd.timestamp": "7"}},
		{"versions", features.Node{GPUs: a100(0, 1), Driver: "580.65.06", CUDA: 12080, Timestamp: 7}, []string{"cuda", "gfd"}, map[string]string{
			"cuda.driver.major": "580", "cuda.driver.minor": "65", "cuda.driver.rev": "06",
			"cuda.driver-version.major": "580", "cuda.driver-version.minor": "65", "cuda.driver-version.revision": "06", "cuda.driver-version.full": "580.65.06",
			"cuda.runtime.major": "12", "cuda.runtime.minor": "8",
			"cuda.runtime-version.major": "12", "cuda.runtime-version.minor": "8", "cuda.runtime-version.full": "12.8",
			"gfd.timestamp": "7",
		}},
		{"two numbers", features.Node{GPUs: a100(0, 1), Driver: "580.65"}, []string{"cuda"}, map[string]string{
			"cuda.driver.major": "580", "cuda.driver.minor": "65", "cuda.driver-version.major": "580", "cuda.driver-version.minor": "65",
			"cuda.driver-version.full": "580.65",
		}},
		{"unknown versions, no time", features.Node{GPUs: a100(0, 1)}, []string{"cuda", "gfd"}, map[string]string{}},
		{"machine", features.Node{GPUs: a100(0, 1), Machine: " Standard PC (Q35 + ICH9, 2009)\n"}, []string{"gpu.machine"}, map[string]string{"gpu.machine": "Standard-PC-Q35-ICH9-2009"}},
		{"unknown machine", features.Node{GPUs: a100(0, 1), Machine: "\n"}, []string{"gpu.machine"}, map[string]string{"gpu.machine": "unknown"}},
		{"vGPUs", features.Node{GPUs: a100(0, 1), VGPUs: []features.VGPU{host, host}}, []string{"vgpu"}, map[string]string{
			"vgpu.present": "true", "vgpu.host-driver-version": "550.90.07", "vgpu.host-driver-branch": "r550_90",
		}},
		{"vGPUs that differ", features.Node{GPUs: a100(0, 1), VGPUs: []features.VGPU{host, {HostVersion: "550.90.07", HostBranch: "r535_00"}}}, []string{"vgpu"}, map[string]string{
			"vgpu.present": "true", "vgpu.host-driver-version": "550.90.07",
		}},
		{"vGPUs that say nothing", features.Node{GPUs: a100(0, 1), VGPUs: []features.VGPU{{}}}, []string{"vgpu"}, map[string]string{"vgpu.present": "true"}},
		{"whole GPUs", features.Node{GPUs: a100(0, 8)}, []string{"gpu.", "mig", "mps", "vgpu"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "8", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "gpu.memory": "40960",
			"gpu.family": "ampere", "gpu.compute.major": "8", "gpu.compute.minor": "0", "gpu.mode": "compute", "gpu.machine": "unknown",
			"mig.capable": "true", "mps.capable": "false",
		}},
		{"shared", features.Node{GPUs: a100(0, 2), Profile: share("gpu", 4, "")}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing", "mig.strategy"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.count": "2", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", "mig.strategy": "mixed",
		}},
		{"by MPS", features.Node{GPUs: a100(0, 2), Profile: byMPS}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing", "mps"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.count": "2", "gpu.replicas": "4", "gpu.sharing-strategy": "mps", "mps.capable": "true",
		}},
		{"renamed", features.Node{GPUs: a100(0, 2), Profile: share("gpu", 4, "nvidia.com/gpu.shared")}, []string{"gpu.product", "gpu.replicas", "gpu.sharing", "gpu.shared."}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing",
			"gpu.shared.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.shared.count": "2", "gpu.shared.replicas": "4", "gpu.shared.sharing-strategy": "time-slicing", "gpu.shared.memory": "40960",
		}},
		{"some renamed", features.Node{GPUs: a100(0, 2), Profile: some}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing", "gpu.shared.count", "gpu.shared.replicas"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
			"gpu.shared.count": "1", "gpu.shared.replicas": "8",
		}},
		{"some shared under one name", features.Node{GPUs: a100(0, 2), Profile: both}, []string{"gpu.product", "gpu.replicas", "gpu.sharing"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.sharing-strategy": "time-slicing",
		}},
		{"GPUs of one name in six and in three", features.Node{GPUs: a100(0, 4), Profile: uneven(3)}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.count": "4", "gpu.sharing-strategy": "time-slicing",
		}},
		{"GPUs of one name in six and in six", features.Node{GPUs: a100(0, 4), Profile: uneven(6)}, []string{"gpu.replicas"}, map[string]string{"gpu.replicas": "6"}},
		{"GPUs of one name by MPS and by time-slicing", features.Node{GPUs: a100(0, 4), Profile: twoWays}, []string{"gpu.product", "gpu.replicas", "gpu.sharing"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.sharing-strategy": "time-slicing",
		}},
		{"several models", features.Node{GPUs: append(a100(0, 3), t4(3))}, []string{"gpu.product", "gpu.count", "gpu.model"}, map[string]string{"gpu.count": "4"}},
		{"several models, with a label for each", features.Node{GPUs: append(a100(0, 3), t4(3)), Models: true}, []string{"gpu.product", "gpu.count", "gpu.memory", "gpu.family", "gpu.compute", "gpu.model", "mig.capable"}, map[string]string{
			"gpu.count": "4", "gpu.memory": "15360", "gpu.compute.major": "7", "gpu.compute.minor": "5",
			"gpu.model.NVIDIA-A100-SXM4-40GB": "3", "gpu.model.Tesla-T4": "1", "mig.capable": "true",
		}},
		{"several models, named", features.Node{GPUs: append(a100(0, 3), t4(3)), Profile: named}, []string{"a100", "t4", "example"}, map[string]string{
			"a100.product": "NVIDIA-A100-SXM4-40GB", "a100.count": "3", "a100.replicas": "1", "a100.sharing-strategy": "none", "a100.memory": "40960",
		}},
		{"excluded", features.Node{GPUs: append([]sharing.GPU{t4(0)}, a100(1, 2)...), Profile: sharing.Profile{Exclude: []sharing.Selector{first}}, Models: true}, []string{"gpu.count", "gpu.product", "gpu.model"}, map[string]string{
			"gpu.count": "2", "gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.model.NVIDIA-A100-SXM4-40GB": "2",
		}},
		{"gone and faulty", features.Node{GPUs: gone}, []string{"gpu.count"}, map[string]string{"gpu.count": "2"}},
		{"T4", features.Node{GPUs: []sharing.GPU{t4(0)}}, []string{"mig", "gpu.family"}, map[string]string{"mig.capable": "false", "gpu.family": "turing"}},
		{"MIG none", features.Node{GPUs: []sharing.GPU{cut(a100(0, 1)[0], "1g.5gb")}, Profile: none}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing", "gpu.memory", "mig"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "1", "gpu.replicas": "0", "gpu.sharing-strategy": "none", "mig.capable": "true",
		}},
		{"MIG mixed", features.Node{GPUs: append(a100(0, 1), cut(a100(1, 1)[0], "1g.5gb", "3g.20gb", "1g.5gb")), Profile: share("mig-1g.5gb", 2, "")}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.memory", "mig"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "2", "gpu.replicas": "1", "gpu.memory": "40960", "mig.capable": "true", "mig.strategy": "mixed",
			"mig-1g.5gb.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED", "mig-1g.5gb.count": "2", "mig-1g.5gb.replicas": "2", "mig-1g.5gb.sharing-strategy": "time-slicing",
			"mig-1g.5gb.memory": "5000", "mig-1g.5gb.multiprocessors": "14", "mig-1g.5gb.slices.gi": "1", "mig-1g.5gb.slices.ci": "1",
			"mig-1g.5gb.engines.copy": "1", "mig-1g.5gb.engines.decoder": "2", "mig-1g.5gb.engines.encoder": "0", "mig-1g.5gb.engines.jpeg": "3", "mig-1g.5gb.engines.ofa": "4",
			"mig-3g.20gb.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "mig-3g.20gb.count": "1", "mig-3g.20gb.replicas": "1", "mig-3g.20gb.sharing-strategy": "none",
			"mig-3g.20gb.memory": "20000", "mig-3g.20gb.multiprocessors": "42", "mig-3g.20gb.slices.gi": "3", "mig-3g.20gb.slices.ci": "3",
			"mig-3g.20gb.engines.copy": "1", "mig-3g.20gb.engines.decoder": "2", "mig-3g.20gb.engines.encoder": "0", "mig-3g.20gb.engines.jpeg": "3", "mig-3g.20gb.engines.ofa": "4",
		}},
		{"only MIG, mixed", features.Node{GPUs: []sharing.GPU{cut(a100(0, 1)[0], "1g.5gb")}, Profile: share("gpu", 4, "")}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "1", "gpu.replicas": "0", "gpu.sharing-strategy": "none",
		}},
		{"MIG media", features.Node{GPUs: []sharing.GPU{media}, Profile: share("gpu", 1, "")}, []string{"mig-1g.5gb.me.product", "mig-1g.5gb.me.count", "mig-1g.5gb.count"}, map[string]string{
			"mig-1g.5gb.me.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me", "mig-1g.5gb.me.count": "1", "mig-1g.5gb.count": "1",
		}},
		{"MIG single", features.Node{GPUs: []sharing.GPU{cut(a100(0, 1)[0], "3g.20gb", "3g.20gb"), cut(a100(1, 1)[0], "3g.20gb")}, Profile: single}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.sharing", "gpu.memory", "gpu.multi", "gpu.slices", "gpu.family", "mig"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb-SHARED", "gpu.count": "3", "gpu.replicas": "3", "gpu.sharing-strategy": "time-slicing", "gpu.memory": "20000",
			"gpu.multiprocessors": "42", "gpu.slices.gi": "3", "gpu.slices.ci": "3", "gpu.family": "ampere", "mig.capable": "true", "mig.strategy": "single",
		}},
		{"MIG single, several kinds", features.Node{GPUs: []sharing.GPU{cut(a100(0, 1)[0], "3g.20gb", "1g.5gb", "1g.5gb")}, Profile: single}, []string{"gpu.product", "gpu.count"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED", "gpu.count": "2",
		}},
		{"MIG single, no partition", features.Node{GPUs: []sharing.GPU{cut(a100(0, 1)[0])}, Profile: single}, []string{"gpu.product", "gpu.count", "gpu.replicas", "gpu.memory"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID", "gpu.count": "0", "gpu.replicas": "0", "gpu.memory": "0",
		}},
		{"MIG single, MIG off", features.Node{GPUs: a100(0, 1), Profile: single}, []string{"gpu.product", "gpu.count", "gpu.memory"}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.count": "1", "gpu.memory": "40960",
		}},
		{"attributes unknown", features.Node{GPUs: []sharing.GPU{bare}, Profile: share("gpu", 1, "")}, []string{"mig-"}, map[string]string{
			"mig-1g.5gb.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "mig-1g.5gb.count": "1", "mig-1g.5gb.replicas": "1", "mig-1g.5gb.sharing-strategy": "none", "mig-1g.5gb.memory": "5120",
		}},
		{"clique", features.Node{GPUs: fabric}, []string{"gpu.clique"}, map[string]string{"gpu.clique": "c.1"}},
		{"half a clique", features.Node{GPUs: half}, []string{"gpu.clique"}, map[string]string{}},
		{"two cliques", features.Node{GPUs: apart}, []string{"gpu.clique"}, map[string]string{}},
		{"display", features.Node{GPUs: display}, []string{"gpu.mode="}, map[string]string{"gpu.mode": "graphics"}},
		{"display and none", features.Node{GPUs: append(display, t4(1))}, []string{"gpu.mode="}, map[string]string{"gpu.mode": "unknown"}},
		{"long model", features.Node{GPUs: long, Profile: share("gpu", 2, ""), Models: true}, []string{"gpu.product", "gpu.model"}, map[string]string{
			"gpu.product": "NVIDIA-" + strings.Repeat("Very-", 9) + "Very-SHARED", "gpu.model.NVIDIA-" + strings.Repeat("Very-", 9) + "V": "1",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			labels := features.Labels(test.node)
			if diff := cmp.Diff(test.want, selected(labels, test.of)); diff != "" {
				t.Errorf("labels (-want +got):\n%s", diff)
			}
			for label := range maps.Keys(labels) {
				if !strings.HasPrefix(label, "nvidia.com/") {
					t.Errorf("label %s is of another domain", label)
				}
			}
		})
	}
}

// TestFamily checks that the names are those of GPU feature discovery.
func TestFamily(t *testing.T) {
	for capability, want := range map[string]string{
		"7.0": "volta", "7.5": "turing", "8.0": "ampere", "8.6": "ampere", "8.9": "ada-lovelace", "9.0": "hopper", "10.0": "blackwell", "12.0": "blackwell", "13.0": "rubin", "11.0": "undefined", "2.0": "fermi", "99.0": "undefined",
	} {
		gpus := a100(0, 1)
		gpus[0].ComputeCapability = capability
		if got := features.Labels(features.Node{GPUs: gpus})["nvidia.com/gpu.family"]; got != want {
			t.Errorf("family %q of compute capability %s, want %q", got, capability, want)
		}
	}
}
