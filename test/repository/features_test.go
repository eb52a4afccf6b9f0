package repository

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// TestFeatureLabelNames checks that the chart's policy allows the feature labels, but none that other
// programs use to decide what runs on a node, and that docs/reference/feature-labels.md lists all of them.
func TestFeatureLabelNames(t *testing.T) {
	template, err := os.ReadFile(filepath.Join(repository, "charts/virgate/templates/admission-own-node.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	quoted := regexp.MustCompile("`\"(\\^nvidia.*)\"`").FindSubmatch(template)
	if quoted == nil {
		t.Fatal("the policy has no feature labels")
	}
	allowed, page := regexp.MustCompile(string(quoted[1])), documents(t)["docs/reference/feature-labels.md"]
	vgpus := []features.VGPU{{HostVersion: "1.2", HostBranch: "r1"}}
	names := map[string]bool{"nvidia.com/gpu.clique": true}
	for _, node := range slices.Concat(simnode.Names(), []string{"mixed", "dgx-a100+all-1g.5gb", "dgx-h100+all-balanced"}) {
		simulated, err := simnode.New(node)
		if err != nil {
			t.Fatal(err)
		}
		gpus, err := nvml.Scan(simulated)
		if err != nil {
			t.Fatal(err)
		}
		for _, strategy := range []sharing.MIGStrategy{sharing.MIGNone, sharing.MIGSingle, sharing.MIGMixed} {
			profile := sharing.Profile{MIGStrategy: strategy, GPUNames: []sharing.NamingRule{{Pattern: "T4", Name: "nvidia.com/t4"}}}
			for name := range features.Labels(features.Node{GPUs: gpus, Profile: profile, Driver: "1.2.3", CUDA: 13000, VGPUs: vgpus, Models: true, Timestamp: 1}) {
				names[name] = true
			}
		}
	}
	kind := regexp.MustCompile(`^(mig-[^A-Z]*g\.[0-9]+gb(\.me)?|gpu|t4)\.`)
	for name := range names {
		if !allowed.MatchString(name) {
			t.Errorf("the policy does not allow %s", name)
		}
		short := strings.TrimPrefix(name, "nvidia.com/")
		own := "`" + kind.ReplaceAllString(short, ".") + "`"
		if strings.HasPrefix(short, "gpu.model.") {
			own = "`gpu.model.MODEL`"
		}
		if !strings.Contains(page, "`"+short+"`") && !strings.Contains(page, own) {
			t.Errorf("docs/reference/feature-labels.md has neither %s nor %s", short, own)
		}
	}
	for _, name := range []string{
		"nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.present", "nvidia.com/device-plugin.config", "nvidia.com/mig.config", "nvidia.com/gpu-driver-upgrade-state",
		"nvidia.com/vgpu.config", "example.com/gpu.count", "node-role.kubernetes.io/gpu.count", "xnvidia.com/gpu.count",
	} {
		if allowed.MatchString(name) {
			t.Errorf("the policy allows %s", name)
		}
	}
}
