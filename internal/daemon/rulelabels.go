package daemon

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/sharing"
)

// gpuFacts are what rules can depend on of a GPU. They are stored for a restart, because the driver
// does not always report all of them: for example, a program without the necessary right does not
// get the memory of a GPU with MIG. A rule that creates partitions must not stop matching because
// of that.
type gpuFacts struct {
	UUID string `json:"uuid"`
	// Boot is the machine's boot ID when the GPU was last in it; empty if unknown.
	Boot              string `json:"boot,omitempty"`
	Model             string `json:"model,omitempty"`
	Memory            uint64 `json:"memory,omitempty"`
	ComputeCapability string `json:"computeCapability,omitempty"`
	PCIClass          uint32 `json:"pciClass,omitempty"`
	Clique            string `json:"clique,omitempty"`
	MIGCapable        bool   `json:"migCapable,omitempty"`
}

// ruleLabels are feature discovery's labels as rules see them: of all GPUs that the machine had
// since its start, as if they were exclusive and not partitioned. So neither a profile nor a fault
// changes them.
type ruleLabels struct {
	// node has what does not change while the program runs.
	node features.Node
	// inventory, complete and versions are an nvml.Node's.
	inventory func() ([]sharing.GPU, error)
	complete  func() bool
	versions  func() nvml.Versions
	// boot is the machine's boot ID; empty if unknown.
	boot string
	// store is read when the GPUs are first known, which happens only in the program that serves
	// the node.
	store state.Section[gpuFacts]
	log   *slog.Logger

	mu sync.Mutex
	// facts are nil before that. labels are the last labels, nil while they are unknown.
	facts  map[string]gpuFacts
	labels map[string]string
}

// now returns the labels; nil until the GPUs have been read once.
func (l *ruleLabels) now() map[string]string {
	complete := l.complete() // Before the inventory, which may become complete meanwhile.
	gpus, err := l.inventory()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil { // GPUs that cannot be read now count as unchanged.
		return l.labels
	}
	gpus, news := l.remember(slices.Clone(gpus), complete)
	if news {
		kept := slices.SortedFunc(maps.Values(l.facts),
			func(a, b gpuFacts) int { return strings.Compare(a.UUID, b.UUID) })
		if err := l.store.Save(kept); err != nil {
			l.log.Warn("what rules need to know of the GPUs is not kept for a restart", "error", err)
		}
	}
	n, versions := l.node, l.versions()
	n.GPUs = gpus
	n.Driver = versions.Driver
	n.CUDA = versions.CUDA
	l.labels = RuleLabels(n)
	return l.labels
}

// RuleLabels returns feature discovery's labels as rules see them: as if the GPUs were exclusive
// and not partitioned.
func RuleLabels(n features.Node) map[string]string {
	n.GPUs = slices.Clone(n.GPUs)
	n.Models = true
	n.Profile = sharing.Profile{}
	for i := range n.GPUs {
		n.GPUs[i].MIG, n.GPUs[i].Partitions = false, nil
		if n.GPUs[i].DriverIndex == sharing.NotListed { // A lost GPU still belongs to the machine.
			n.GPUs[i].DriverIndex = ""
		}
	}
	labels := map[string]string{}
	for name, value := range features.Labels(n) {
		if configs.InventoryLabel(name) {
			labels[name] = value
		}
	}
	return labels
}

// remember fills in what the driver does not report now, and adds the GPUs of this boot that it has
// not identified yet. It forgets GPUs that a complete inventory does not have. It returns all GPUs,
// and whether there is something new to store.
func (l *ruleLabels) remember(gpus []sharing.GPU, complete bool) (all []sharing.GPU, news bool) {
	if l.facts == nil {
		l.facts = map[string]gpuFacts{}
		kept, err := l.store.Load()
		if err != nil {
			l.log.Warn("what rules need to know of the GPUs was not kept", "error", err)
		}
		for _, facts := range kept {
			l.facts[facts.UUID] = facts
		}
	}
	there := map[string]bool{}
	for i := range gpus {
		gpu, known := &gpus[i], l.facts[gpus[i].UUID]
		facts := gpuFacts{
			UUID:              gpu.UUID,
			Boot:              l.boot,
			Model:             cmp.Or(gpu.Model, known.Model),
			Memory:            cmp.Or(gpu.Memory, known.Memory),
			ComputeCapability: cmp.Or(gpu.ComputeCapability, known.ComputeCapability),
			PCIClass:          cmp.Or(gpu.PCIClass, known.PCIClass),
			Clique:            cmp.Or(gpu.Clique, known.Clique),
			MIGCapable:        gpu.MIGCapable || known.MIGCapable,
		}
		gpu.Model = facts.Model
		gpu.Memory = facts.Memory
		gpu.ComputeCapability = facts.ComputeCapability
		gpu.PCIClass = facts.PCIClass
		gpu.Clique = facts.Clique
		gpu.MIGCapable = facts.MIGCapable
		there[gpu.UUID] = true
		if facts != known {
			l.facts[gpu.UUID], news = facts, true
		}
	}
	for uuid, facts := range l.facts {
		switch {
		case there[uuid]:
		case complete:
			delete(l.facts, uuid)
			news = true
		case l.boot != "" && facts.Boot == l.boot:
			gpus = append(gpus, sharing.GPU{
				UUID:              uuid,
				Model:             facts.Model,
				Memory:            facts.Memory,
				ComputeCapability: facts.ComputeCapability,
				PCIClass:          facts.PCIClass,
				Clique:            facts.Clique,
				MIGCapable:        facts.MIGCapable,
			})
		}
	}
	return gpus, news
}
