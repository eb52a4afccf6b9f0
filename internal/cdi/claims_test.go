package cdi

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

const (
	uuidA    = "GPU-11111111-2222-3333-4444-555555555555"
	uuidB    = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
	uuidC    = "GPU-cccccccc-bbbb-cccc-dddd-eeeeeeeeeeee"
	firstMIG = "MIG-aaaaaaaa-0000-0000-0000-000000000001"
	lastMIG  = "MIG-aaaaaaaa-0000-0000-0000-000000000002"
	// hiddenMIG has a placement that the driver does not report.
	hiddenMIG = "MIG-cccccccc-0000-0000-0000-000000000001"
)

// claimed is a node whose minor numbers are not its indexes.
func claimed() ([]sharing.GPU, error) {
	return []sharing.GPU{
		{UUID: uuidA, Index: 0, Minor: 1},
		{UUID: uuidB, Index: 1, Minor: 0, MIG: true, Partitions: []sharing.Partition{
			{UUID: firstMIG, Placement: mig.Placement{Start: 0, Size: 4}}, {UUID: lastMIG, Placement: mig.Placement{Start: 4, Size: 4}},
		}},
		{UUID: uuidC, Index: 2, Minor: 2, MIG: true, Partitions: []sharing.Partition{{UUID: hiddenMIG}}},
	}, nil
}

const claimSpec = `cdiVersion: 0.5.0
kind: k8s.gpu.nvidia.com/claim
containerEdits: {deviceNodes: [{path: /dev/nvidiactl}, {path: /dev/nvidia-uvm}], env: [NVIDIA_VISIBLE_DEVICES=void]}
devices:
- name: c1-gpu-1
  containerEdits: {deviceNodes: [{path: /dev/nvidia1}, {path: /dev/dri/card1}]}
- name: c1-gpu-0-mig-3g20gb-9-4
  containerEdits: {deviceNodes: [{path: /dev/nvidia0}, {path: /dev/nvidia-caps/nvidia-cap30}]}
- name: c1-gpu-vfio-0
  containerEdits: {deviceNodes: [{path: /dev/vfio/9}]}
- name: c1-gpu-7
  containerEdits: {deviceNodes: [{path: /dev/nvidia7}]}
`

const otherSpec = `cdiVersion: 0.5.0
kind: shares.example.com/device
devices:
- name: moved
  containerEdits: {deviceNodes: [{path: /dev/nvidia0, hostPath: /run/nvidia/driver/dev/nvidia1}]}
- name: env
  containerEdits: {env: [NVIDIA_VISIBLE_DEVICES=` + uuidB + `]}
- name: all
  containerEdits: {env: [NVIDIA_VISIBLE_DEVICES=all]}
- name: nic
  containerEdits: {deviceNodes: [{path: /dev/infiniband/uverbs0}]}
`

func TestClaims(t *testing.T) {
	dir, empty := t.TempDir(), t.TempDir()
	for name, text := range map[string]string{"k8s.gpu.nvidia.com-claim_c1.yaml": claimSpec, "other.yaml": otherSpec} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all := []string{uuidA, uuidB, uuidC}
	const claim, other = "k8s.gpu.nvidia.com/claim=c1-", "shares.example.com/device="
	for _, test := range []struct {
		name, driver   string
		devices, names []string
		want           []string
		guessed        bool
	}{
		{"a GPU by its node", nvidiaDriver, []string{"gpu-1"}, []string{claim + "gpu-1"}, []string{uuidA}, false},
		{"the node counts, not the name", nvidiaDriver, []string{"gpu-0"}, []string{claim + "gpu-1"}, []string{uuidA}, false},
		{"a partition", nvidiaDriver, []string{"gpu-0-mig-3g20gb-9-4"}, []string{claim + "gpu-0-mig-3g20gb-9-4"}, []string{lastMIG}, false},
		{"a GPU and a partition, each with the entries before it", nvidiaDriver, []string{"gpu-1", "gpu-0-mig-3g20gb-9-4"},
			[]string{claim + "gpu-1", claim + "gpu-1", claim + "gpu-0-mig-3g20gb-9-4"}, []string{uuidA, lastMIG}, false},
		{"a partition that is not known", nvidiaDriver, []string{"gpu-0-mig-1g5gb-19-2"}, []string{claim + "gpu-0-mig-3g20gb-9-4"}, []string{uuidB}, false},
		{"a partition that is known and one that is not", nvidiaDriver, []string{"gpu-0-mig-3g20gb-9-0", "gpu-0-mig-1g5gb-19-4", "gpu-0-mig-1g5gb-19-6"},
			nil, []string{uuidB, firstMIG, lastMIG}, false},
		{"a partition whose place is not known", nvidiaDriver, []string{"gpu-2-mig-1g5gb-19-0"}, nil, []string{uuidC}, false},
		{"a partition of another driver", "shares.example.com", []string{"gpu-0-mig-3g20gb-9-4"}, []string{claim + "gpu-0-mig-3g20gb-9-4"}, []string{uuidB}, false},
		{"a GPU that a virtual machine has", nvidiaDriver, []string{"gpu-vfio-0"}, []string{claim + "gpu-vfio-0"}, nil, false},
		{"a node that no GPU has", nvidiaDriver, []string{"gpu-7"}, []string{claim + "gpu-7"}, all, true},
		{"no spec: the name", nvidiaDriver, []string{"gpu-1"}, []string{claim + "gone"}, []string{uuidA}, false},
		{"no entry: the name", nvidiaDriver, []string{"gpu-0-mig-3g20gb-9-0"}, nil, []string{firstMIG}, false},
		{"no spec, and a name that tells nothing", nvidiaDriver, []string{"board"}, []string{claim + "gone"}, all, true},
		{"no spec, another driver for GPUs", "gpu.example.com", []string{"gpu-1"}, []string{"example.com/x=1"}, all, true},
		{"no spec, named after GPUs", "shares.example.com", []string{"x"}, []string{"example.com/gpu=1"}, all, true},
		{"no spec, a UUID in the entry's name", "shares.example.com", []string{"x"}, []string{"nvidia.com/gpu=" + uuidB}, []string{uuidB}, false},
		{"the host's node", "shares.example.com", []string{"x"}, []string{other + "moved"}, []string{uuidA}, false},
		{"the environment", "shares.example.com", []string{"x"}, []string{other + "env"}, []string{uuidB}, false},
		{"all, for NVIDIA's runtime", "shares.example.com", []string{"x"}, []string{other + "all"}, all, true},
		{"a network device", "shares.example.com", []string{"x"}, []string{other + "nic"}, nil, false},
		{"a network device without an entry", "dra.net", []string{"eth1"}, nil, nil, false},
		{"a network device whose spec is gone", "dra.net", []string{"eth1"}, []string{"dra.net/nic=eth1"}, nil, false},
		{"another maker's GPU", "gpu.intel.com", []string{"0000-03-00-0"}, nil, nil, false},
		{"a domain of NVIDIA's other driver", "compute-domain.nvidia.com", []string{"channel-0"}, []string{"k8s.compute-domain.nvidia.com/claim=c2-channel-0"}, nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			units, guessed := NewClaims(claimed, empty, dir).Units(test.driver, test.devices, test.names)
			if diff := cmp.Diff(test.want, units); diff != "" || guessed != test.guessed {
				t.Errorf("guessed %v; units (-want +got):\n%s", guessed, diff)
			}
		})
	}
}
