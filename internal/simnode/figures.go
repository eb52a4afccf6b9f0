package simnode

import (
	"maps"
	"strconv"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// figures are the fields of Engines, in their order.
type figures mig.Engines

// generation determines the figures: the GPU's architecture and its number of slices.
type generation struct {
	architecture nvml.Architecture
	slices       int
}

// figuresOf has the figures of a generation's profiles, by slices and attributes; "1double" is the
// profile of one slice with twice the memory.
//
// Engines are from NVIDIA's MIG User Guide, "Supported MIG Profiles" (R615, read in November 2026).
// It does not list B300, GB200 and GB300; they get the figures of B200, as in NVIDIA's
// k8s-test-infra (pkg/gpu/mocknvml/configs/mock-nvml-config-gb300.mig.yaml). Multiprocessors are as
// nvidia-smi mig -lgip prints them: 14 per slice of A100 and A30, 16 of a GH100 with 132, 46 of the
// RTX PRO 6000, which has 188. The 18 of B200 are from k8s-test-infra.
var figuresOf = map[generation]map[string]figures{
	{nvml.Ampere, 7}: {
		"1":       {14, 1, 0, 0, 0, 0},
		"1+me":    {14, 1, 1, 0, 1, 1},
		"1double": {14, 1, 1, 0, 0, 0},
		"2":       {28, 2, 1, 0, 0, 0},
		"3":       {42, 3, 2, 0, 0, 0},
		"4":       {56, 4, 2, 0, 0, 0},
		"7":       {98, 7, 5, 0, 1, 1},
	},
	{nvml.Ampere, 4}: {
		"1":    {14, 1, 0, 0, 0, 0},
		"1+me": {14, 1, 1, 0, 1, 1},
		"2":    {28, 2, 2, 0, 0, 0},
		"2+me": {28, 2, 2, 0, 1, 1},
		"4":    {56, 4, 4, 0, 1, 1},
	},
	{nvml.Hopper, 7}: {
		"1":       {16, 1, 1, 0, 1, 0},
		"1+me":    {16, 1, 1, 0, 1, 1},
		"1double": {26, 1, 1, 0, 1, 0},
		"2":       {32, 2, 2, 0, 2, 0},
		"3":       {60, 3, 3, 0, 3, 0},
		"4":       {64, 4, 4, 0, 4, 0},
		"7":       {132, 8, 7, 0, 7, 1},
	},
	{nvml.Blackwell, 7}: {
		"1":       {18, 2, 1, 0, 1, 0},
		"1+me":    {18, 2, 1, 0, 1, 1},
		"1double": {18, 2, 1, 0, 1, 0},
		"2":       {36, 3, 1, 0, 1, 0},
		"3":       {54, 6, 1, 0, 1, 0},
		"4":       {72, 8, 1, 0, 1, 0},
		"7":       {126, 16, 1, 0, 1, 1},
	},
	{nvml.Blackwell, 4}: {
		"1":        {46, 1, 1, 1, 1, 0},
		"1+me":     {46, 1, 1, 1, 1, 1},
		"1+gfx":    {46, 1, 1, 1, 1, 0},
		"1+me.all": {46, 1, 4, 4, 4, 1},
		"1-me":     {46, 1, 0, 0, 0, 0},
		"2":        {94, 2, 2, 2, 2, 0},
		"2+gfx":    {94, 2, 2, 2, 2, 0},
		"2+me.all": {94, 2, 4, 4, 4, 1},
		"2-me":     {94, 2, 0, 0, 0, 0},
		"4":        {188, 4, 4, 4, 4, 1},
		"4+gfx":    {188, 4, 4, 4, 4, 1},
	},
}

// figuresOfModel has the figures of the models, by PCI device ID, that differ from their
// generation.
//
// Those of the H100 PCIe, which has 114 multiprocessors, are as nvidia-smi mig -lgip of driver
// 570.169 prints them. The engines of the RTX PRO 5000 and 4500 are from the MIG User Guide. NVIDIA
// has not published the multiprocessors of partitions of these two, which have 110 and 82, nor of
// H20, which has 78. These partitions get their share, in pairs, because two multiprocessors make a
// cluster that is not divided.
var figuresOfModel = func() map[uint16]map[string]figures {
	hopper := func(multiprocessors map[string]int) map[string]figures {
		all := maps.Clone(figuresOf[generation{nvml.Hopper, 7}])
		for name, f := range all {
			f.Multiprocessors = multiprocessors[name]
			all[name] = f
		}
		return all
	}
	h20 := hopper(map[string]int{
		"1":       10,
		"1+me":    10,
		"1double": 10,
		"2":       22,
		"3":       32,
		"4":       44,
		"7":       78,
	})
	rtxPro4500 := map[string]figures{
		"1":        {40, 1, 1, 1, 1, 0},
		"1+gfx":    {40, 1, 1, 1, 1, 0},
		"1+me.all": {40, 1, 3, 3, 2, 1},
		"1-me":     {40, 1, 0, 0, 0, 0},
		"2":        {82, 2, 3, 3, 2, 1},
		"2+gfx":    {82, 2, 3, 3, 2, 1},
	}
	return map[uint16]map[string]figures{
		0x2331: hopper(map[string]int{
			"1":       14,
			"1+me":    14,
			"1double": 14,
			"2":       30,
			"3":       46,
			"4":       62,
			"7":       114,
		}),
		0x2329: h20,
		0x232C: h20,
		0x2BB3: {
			"1":        {54, 1, 1, 1, 0, 0},
			"1+me":     {54, 1, 1, 1, 1, 1},
			"1+gfx":    {54, 1, 1, 1, 0, 0},
			"1+me.all": {54, 1, 3, 3, 1, 1},
			"1-me":     {54, 1, 0, 0, 0, 0},
			"2":        {110, 4, 3, 3, 1, 1},
			"2+gfx":    {110, 4, 3, 3, 1, 1},
		},
		0x2C31: rtxPro4500,
		0x2C3A: rtxPro4500,
	}
}()

// mebibytesOfModel has the memory of the models' instances, by PCI device ID and memory slots, as the
// recordings of such GPUs in internal/nvml/trace/testdata have it.
var mebibytesOfModel = map[uint16]map[int]uint64{
	0x2330: { // H100 80GB HBM3
		1: 9984,
		2: 20096,
		4: 40448,
		8: 81152,
	},
	0x2335: { // H200
		1: 16384,
		2: 33280,
		4: 71424,
		8: 143360,
	},
}

// figures returns the multiprocessors and engines of the GPU's instances with the profile.
func (g *simGPU) figures(info mig.ProfileInfo) mig.Engines {
	name := strconv.Itoa(info.Profile.Slices) + info.Profile.Attributes
	if info.Size == 2 && name == "1" {
		name = "1double"
	}
	if own, ok := figuresOfModel[g.PCI]; ok {
		return mig.Engines(own[name])
	}
	return mig.Engines(figuresOf[generation{g.Architecture, g.geometry.Slices}][name])
}
