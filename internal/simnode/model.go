package simnode

import (
	"slices"
	"strings"

	"github.com/virgate/virgate/internal/nvml"
)

// model is a kind of board.
type model struct {
	// key is what node names and files call it.
	key string
	// name is NVML's product name.
	name string
	// mebibytes is the total memory that NVML reports.
	mebibytes uint64
	// deviceID is the PCI device ID.
	deviceID     uint16
	architecture nvml.Architecture
	// major and minor are the CUDA compute capability.
	major, minor int
	// links is the number of NVLinks of each board into the NVSwitch fabric of
	// a node with several; 0 without.
	links int
}

// models are the known boards. Names and memory are as nvidia-smi prints them
// on such boards, with ECC on, in public logs. The device IDs of boards with MIG
// are those of mig-parted's config-default.yaml, of the others those of the PCI
// ID repository. Compute capabilities are from NVIDIA's list of CUDA GPUs,
// links from the DGX data sheets (12 per A100, 18 per H100 and later).
var models = []model{
	{"a100-40", "NVIDIA A100-SXM4-40GB", 40960, 0x20B0, nvml.Ampere, 8, 0, 12},
	{"a100-80", "NVIDIA A100-SXM4-80GB", 81920, 0x20B2, nvml.Ampere, 8, 0, 12},
	{"a30", "NVIDIA A30", 24576, 0x20B7, nvml.Ampere, 8, 0, 0},
	{"b200", "NVIDIA B200", 183359, 0x2901, nvml.Blackwell, 10, 0, 18},
	{"h100", "NVIDIA H100 80GB HBM3", 81559, 0x2330, nvml.Hopper, 9, 0, 18},
	{"h200", "NVIDIA H200", 143771, 0x2335, nvml.Hopper, 9, 0, 18},
	{"l40s", "NVIDIA L40S", 46068, 0x26B9, nvml.Ada, 8, 9, 0},
	{"rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 0x2BB5, nvml.Blackwell, 12, 0, 0},
	{"t4", "Tesla T4", 15360, 0x1EB8, nvml.Turing, 7, 5, 0},
}

// nvidia is the PCI vendor ID, the lower half of NVML's PCI device ID.
const nvidia = 0x10DE

func modelOf(key string) (model, bool) {
	i := slices.IndexFunc(models, func(m model) bool { return m.key == key })
	if i < 0 {
		return model{}, false
	}
	return models[i], true
}

func modelKeys() string {
	keys := make([]string, len(models))
	for i, m := range models {
		keys[i] = m.key
	}
	return strings.Join(keys, ", ")
}
