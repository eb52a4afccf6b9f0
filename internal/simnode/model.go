package simnode

import (
	_ "embed"
	"strings"
	"sync"

	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/mig"
)

// model is a GPU model.
type model struct {
	// Key is the model's name in node names and files. Name is NVML's product name.
	Key, Name string
	// Mebibytes is the total memory that NVML reports. PCI is the PCI device ID.
	Mebibytes    uint64
	PCI          uint16
	Architecture nvml.Architecture
	Compute      nvml.ComputeCapability
	// Links is the number of NVLinks from each GPU to the NVSwitches; 0 for none.
	Links int
	// Whole is the profile of the whole GPU. It is set if GPUs with different geometries have the
	// same PCI device ID.
	Whole string
}

// geometry returns how a GPU of the model can be partitioned; the zero value without MIG.
func (m model) geometry() mig.Geometry {
	g, _ := first(mig.GeometriesOf(m.PCI), func(g mig.Geometry) bool {
		return m.Whole == "" || g.Profiles[len(g.Profiles)-1].Profile.String() == m.Whole
	})
	return g
}

//go:embed nodes.yaml
var nodesFile []byte

// catalog has the models and the named nodes.
type catalog struct {
	Models []model
	Nodes  []description
}

var known = sync.OnceValue(func() (c catalog) {
	if err := yaml.UnmarshalStrict(nodesFile, &c); err != nil {
		panic(err)
	}
	return c
})

// nvidia is the PCI vendor ID, the lower half of NVML's PCI device ID.
const nvidia = 0x10DE

func modelOf(key string) (model, bool) {
	return first(known().Models, func(m model) bool { return m.Key == key })
}

func modelKeys() string {
	var keys []string
	for _, m := range known().Models {
		keys = append(keys, m.Key)
	}
	return strings.Join(keys, ", ")
}
