package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/sharing"
)

// TestRuleLabels checks that rules see the same labels whatever the GPUs' current layout, even if the driver does
// not answer or something is broken, and after a restart.
func TestRuleLabels(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	file := state.NewFile(t.TempDir(), log)
	file.Load()
	var gpus []sharing.GPU
	unread := sharing.ErrNotRead
	start := func() *ruleLabels {
		return &ruleLabels{
			node:      features.Node{Machine: "DGX A100"},
			inventory: func() ([]sharing.GPU, error) { return gpus, unread },
			complete:  func() bool { return true },
			versions:  func() nvml.Versions { return nvml.Versions{Driver: "580.65.06", CUDA: 13000} },
			store:     state.Section[gpuFacts]{File: file, Name: state.FactSection},
			log:       log,
		}
	}
	labels := start()
	if got := labels.now(); got != nil {
		t.Errorf("before the GPUs were read: %v", got)
	}
	whole := []sharing.GPU{
		{UUID: "GPU-0", Model: "NVIDIA A100-SXM4-40GB", Memory: 40 << 30, ComputeCapability: "8.0", PCIClass: 0x030200, Clique: "c.1", MIGCapable: true},
		{UUID: "GPU-1", Index: 1, Model: "NVIDIA A100-SXM4-40GB", Memory: 40 << 30, ComputeCapability: "8.0", PCIClass: 0x030200, Clique: "c.1", MIGCapable: true},
	}
	gpus, unread = whole, nil
	want := labels.now()
	for name, value := range map[string]string{
		"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.memory": "40960", "gpu.family": "ampere", "gpu.machine": "DGX-A100", "mig.capable": "true", "cuda.driver.major": "580", "gpu.clique": "c.1",
		"gpu.model.NVIDIA-A100-SXM4-40GB": "2",
	} {
		if got := want["nvidia.com/"+name]; got != value {
			t.Errorf("%s is %q, want %q", name, got, value)
		}
	}
	for name := range want {
		if !configs.InventoryLabel(name) {
			t.Errorf("%s is none that rules may use", name)
		}
	}
	divided := slices.Clone(whole)
	for i := range divided {
		divided[i].MIG, divided[i].Memory, divided[i].Clique = true, 0, ""
		divided[i].Partitions = []sharing.Partition{{UUID: fmt.Sprint("MIG-", i)}}
	}
	mute := slices.Clone(whole)
	mute[1] = sharing.GPU{UUID: "GPU-1", Index: 1, Model: mute[1].Model, Health: sharing.Faulty("lost"), DriverIndex: sharing.NotListed}
	for _, test := range []struct {
		name    string
		gpus    []sharing.GPU
		unread  error
		restart bool
	}{
		{"with partitions, without a right", divided, nil, false},
		{"the same after a restart", divided, nil, true},
		{"a lost GPU", mute, nil, false},
		{"a lost GPU after a restart", mute, nil, true},
		{"not read", nil, errors.New("no driver"), false},
	} {
		if gpus, unread = test.gpus, test.unread; test.restart {
			labels = start()
		}
		if diff := cmp.Diff(want, labels.now()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
	if divided[0].Partitions == nil {
		t.Error("the inventory was changed")
	}
}

// TestRuleLabelsOfUnidentifiedGPU checks that a GPU that cannot be identified after a restart counts as before,
// until the machine has rebooted or is known to lack it.
func TestRuleLabelsOfUnidentifiedGPU(t *testing.T) {
	t4 := sharing.GPU{
		UUID:              "GPU-0",
		Model:             "Tesla T4",
		Memory:            16 << 30,
		ComputeCapability: "7.5",
		PCIClass:          0x030200,
	}
	a30 := sharing.GPU{
		UUID:              "GPU-1",
		Index:             1,
		Model:             "NVIDIA A30",
		Memory:            24 << 30,
		ComputeCapability: "8.0",
		MIGCapable:        true,
	}
	type step struct {
		name     string
		boot     string
		gpus     []sharing.GPU
		complete bool
		both     bool
	}
	for _, test := range []struct {
		name  string
		steps []step
	}{
		{"it is identified later", []step{
			{"restart", "first", []sharing.GPU{t4}, false, true},
			{"restart", "first", nil, false, true},
			{"later", "", []sharing.GPU{a30, t4}, true, true},
		}},
		{"it is gone", []step{
			{"restart", "first", []sharing.GPU{t4}, false, true},
			{"later", "", []sharing.GPU{t4}, true, false},
			{"restart", "first", []sharing.GPU{t4}, false, false},
		}},
		{"reboot", []step{
			{"reboot", "second", []sharing.GPU{t4}, false, false},
			{"later", "", []sharing.GPU{t4, a30}, true, true},
			{"restart", "second", []sharing.GPU{t4}, false, true},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			log := slog.New(slog.DiscardHandler)
			file := state.NewFile(t.TempDir(), log)
			file.Load()
			now := step{"first start", "first", []sharing.GPU{t4, a30}, true, true}
			var labels *ruleLabels
			start := func() {
				labels = &ruleLabels{
					inventory: func() ([]sharing.GPU, error) { return now.gpus, nil },
					complete:  func() bool { return now.complete },
					versions:  func() nvml.Versions { return nvml.Versions{} },
					boot:      now.boot,
					store:     state.Section[gpuFacts]{File: file, Name: state.FactSection},
					log:       log,
				}
			}
			start()
			want := labels.now()
			for _, now = range test.steps {
				if now.boot != "" {
					start()
				}
				if diff := cmp.Diff(want, labels.now()); (diff == "") != now.both {
					t.Errorf("%s (-before +after):\n%s", now.name, diff)
				}
			}
		})
	}
}

// TestFeatureLabelsInRules checks that each label that feature discovery makes for any simulated node is either in
// the inventory, which is the same under every profile, or refused in rules.
func TestFeatureLabelsInRules(t *testing.T) {
	profiles := []sharing.Profile{{}, {MIGStrategy: sharing.MIGMixed}, {MIGStrategy: sharing.MIGSingle}}
	for _, strategy := range []sharing.MIGStrategy{sharing.MIGNone, sharing.MIGMixed, sharing.MIGSingle} {
		for _, rename := range []string{"", "nvidia.com/gpu.shared"} {
			profiles = append(profiles, sharing.Profile{
				MIGStrategy: strategy, GPUNames: []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
				TimeSlicing: []sharing.ReplicatedResource{{Resource: "nvidia.com/gpu", Replicas: 4, Rename: rename}},
			})
		}
	}
	seen := map[string]bool{}
	for _, name := range simnode.Names() {
		for _, layout := range []string{"", "+all-balanced"} {
			node, err := simnode.New(name + layout)
			if err != nil {
				continue // It has no such layout.
			}
			gpus, err := nvml.Scan(node)
			if err != nil {
				t.Fatal(err)
			}
			for _, profile := range profiles {
				for label := range features.Labels(features.Node{
					GPUs: gpus, Profile: profile, Driver: "580.65.06", CUDA: 13000, Machine: "m", Models: true, Timestamp: 1,
					VGPUs: []features.VGPU{{HostVersion: "550.90", HostBranch: "r550_90"}},
				}) {
					if seen[label] = true; configs.RuleLabel(label) {
						t.Errorf("%s: rules take %s from the Node, which feature discovery writes", name, label)
					}
				}
			}
		}
	}
	if len(seen) < 40 {
		t.Errorf("only %d labels: %v", len(seen), slices.Sorted(maps.Keys(seen)))
	}
	for _, plain := range []string{"nvidia.com/gpu.present", "nvidia.com/mig.config", "node.kubernetes.io/instance-type", "karpenter.sh/nodepool", "example.com/gpu.count"} {
		if !configs.RuleLabel(plain) {
			t.Errorf("%s is refused", plain)
		}
	}
}
