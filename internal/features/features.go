// Package features computes the node labels that NVIDIA's GPU feature discovery writes: how many
// GPUs of which kind there are, and how they are shared. docs/reference/feature-labels.md lists
// them.
//
// The package is pure: the caller collects what is in Node, and writes the labels.
package features

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// Node is the input for the labels.
type Node struct {
	GPUs    []sharing.GPU
	Profile sharing.Profile
	// Driver is the driver's version, for example "580.65.06"; empty when unknown. CUDA is the
	// newest CUDA version that the driver runs, 12080 for 12.8; 0 when unknown.
	Driver string
	CUDA   int
	// Machine is the machine's name from its firmware; empty when unknown.
	Machine string
	// VGPUs are the vGPUs of a virtual machine.
	VGPUs []VGPU
	// Models adds a label for each model.
	Models bool
	// Timestamp is in seconds since 1970; 0 for none.
	Timestamp int64
}

// domain is the prefix of every label.
const domain = "nvidia.com/"

// Labels returns the node's labels. They do not depend on the health of the GPUs. GPUs that the
// profile excludes, or that the driver no longer lists, do not count. Without any GPU, the
// timestamp is the only label.
//
// A label is true of every GPU that it is about. If the GPUs differ, a product is left out, and an
// amount is the smallest. A differing number of replicas is left out too: as "at most so many share
// a GPU", the smallest would be wrong.
func Labels(n Node) map[string]string {
	labels := set{}
	if n.Timestamp != 0 {
		labels.put("gfd.timestamp", n.Timestamp)
	}
	gpus := slices.DeleteFunc(slices.Clone(n.GPUs), func(g sharing.GPU) bool {
		excluded := slices.ContainsFunc(n.Profile.Exclude, func(s sharing.Selector) bool { return s.MatchGPU(g) })
		return excluded || g.DriverIndex == sharing.NotListed
	})
	if len(gpus) == 0 {
		return labels
	}
	labels.versions(n.Driver, n.CUDA)
	labels.put("gpu.machine", cmp.Or(value(n.Machine), "unknown"))
	labels.put("mig.capable", slices.ContainsFunc(gpus, func(g sharing.GPU) bool { return g.MIGCapable }))
	labels.put("gpu.mode", mode(gpus))
	if cliques := distinct(gpus, func(g sharing.GPU) string { return g.Clique }); len(cliques) == 1 {
		labels.put("gpu.clique", cliques[0])
	}
	labels.vgpus(n.VGPUs)
	strategy := n.Profile.MIGStrategy
	if strategy == sharing.MIGSingle || strategy == sharing.MIGMixed {
		labels.put("mig.strategy", strategy)
	}

	plan := sharing.NewPlan(gpus, n.Profile)
	labels.put("mps.capable", slices.ContainsFunc(plan.Resources, func(r sharing.Resource) bool {
		return slices.ContainsFunc(r.Units, func(u sharing.Unit) bool { return u.MPS.Shares > 0 })
	}))
	kinds := kindsOf(plan, gpus, strategy)
	for name, k := range kinds {
		if name != wholeGPU {
			labels.kind(name, k)
		}
	}
	labels.gpus(gpus, kinds[wholeGPU])
	if n.Models {
		labels.models(gpus)
	}
	if strategy == sharing.MIGSingle && slices.ContainsFunc(gpus, func(g sharing.GPU) bool { return g.MIG }) {
		labels.single(gpus, kinds[wholeGPU])
	}
	return labels
}

// wholeGPU is the resource of whole GPUs, and of partitions with MIG strategy single.
const wholeGPU = "gpu"

// set holds labels by their full names.
type set map[string]string

// put adds a label if Kubernetes accepts its name and its value is not empty.
func (s set) put(name string, v any) {
	if text := fmt.Sprint(v); len(name) <= maxLength && text != "" {
		s[domain+name] = text
	}
}

// maxLength limits a label's name and its value (Kubernetes, apimachinery
// validation.IsQualifiedName and IsValidLabelValue).
const maxLength = 63

// value makes a label's value from the words in the text. It drops characters that a label cannot
// have.
func value(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', strings.ContainsRune("-_. ", r):
			return r
		case r == '\t', r == '\n':
			return ' '
		}
		return -1
	}, text)
	text = strings.Join(strings.Fields(text), "-")
	return strings.Trim(text[:min(len(text), maxLength)], "-_.")
}

// versions adds each version under two names; the older names are deprecated.
func (s set) versions(driver string, cuda int) {
	if parts := strings.Split(driver, "."); len(parts) >= 2 {
		parts = append(parts, "")
		for i, names := range [][2]string{{"major", "major"}, {"minor", "minor"}, {"rev", "revision"}} {
			s.put("cuda.driver."+names[0], parts[i])
			s.put("cuda.driver-version."+names[1], parts[i])
		}
		s.put("cuda.driver-version.full", driver)
	}
	if cuda != 0 {
		major, minor := cuda/1000, cuda%1000/10
		for _, name := range []string{"cuda.runtime", "cuda.runtime-version"} {
			s.put(name+".major", major)
			s.put(name+".minor", minor)
		}
		s.put("cuda.runtime-version.full", fmt.Sprintf("%d.%d", major, minor))
	}
}

// mode returns the mode for the PCI class that all GPUs have.
func mode(gpus []sharing.GPU) string {
	classes := distinct(gpus, func(g sharing.GPU) string { return fmt.Sprintf("%06x", g.PCIClass) })
	return cmp.Or(map[string]string{"030000": "graphics", "030200": "compute"}[strings.Join(classes, ",")], "unknown")
}

// gpus adds the labels about all GPUs; whole are those offered as whole GPUs.
func (s set) gpus(gpus []sharing.GPU, whole kind) {
	s.put("gpu.count", len(gpus))
	s.share("gpu", distinct(gpus, func(g sharing.GPU) string { return value(g.Model) }), whole)
	if len(whole.units) == 0 {
		s.put("gpu.replicas", 0)
	}
	s.put("gpu.memory", least(gpus, func(g sharing.GPU) uint64 { return g.Memory >> 20 }))
	if families := distinct(gpus, func(g sharing.GPU) string { return family(g.ComputeCapability) }); len(
		families) == 1 {
		s.put("gpu.family", families[0])
	}
	lowest := slices.MinFunc(gpus,
		func(a, b sharing.GPU) int { return compareVersions(a.ComputeCapability, b.ComputeCapability) })
	if major, minor, known := strings.Cut(lowest.ComputeCapability, "."); known {
		s.put("gpu.compute.major", major)
		s.put("gpu.compute.minor", minor)
	}
}

// models adds the number of GPUs of each model, which GPU feature discovery does not have.
func (s set) models(gpus []sharing.GPU) {
	models := map[string]int{}
	for _, g := range gpus {
		models[value("gpu.model."+value(g.Model))]++
	}
	for name, count := range models {
		s.put(name, count)
	}
}

// single adds the labels of all partitions that are offered as GPUs, in place of the GPUs' own
// labels. Without any such partition, the product says that no GPU is available.
func (s set) single(gpus []sharing.GPU, k kind) {
	if len(k.units) > 0 {
		s.kind(wholeGPU, k)
		return
	}
	delete(s, domain+"gpu.product")
	if models := distinct(gpus, func(g sharing.GPU) string { return value(g.Model) }); len(models) == 1 {
		s.put("gpu.product", value(models[0]+"-MIG-INVALID"))
	}
	for _, name := range []string{"gpu.count", "gpu.replicas", "gpu.memory"} {
		s.put(name, 0)
	}
}

// kind are the units of a resource.
type kind struct {
	units []unit
	// renamed is true if the units are offered under another name.
	renamed bool
}

// unit is a GPU or a partition that is offered.
type unit struct {
	sharing.Unit
	product    string
	memory     uint64
	attributes sharing.PartitionAttributes
}

// kindsOf returns the offered units by resource name without the domain. GPU feature discovery has
// a name for whole GPUs and one for each MIG profile, and each unit is listed under the one that it
// belongs to. If a unit is offered under another name of the domain, it is listed under that too.
// If some units of a kind are offered under the kind's own name, only those are listed there.
func kindsOf(plan sharing.Plan, gpus []sharing.GPU, strategy sharing.MIGStrategy) map[string]kind {
	own, others := map[string]kind{}, map[string]kind{}
	for _, r := range plan.Resources {
		offered, ours := strings.CutPrefix(r.Name, domain)
		for _, u := range r.Units {
			known := wholeGPU
			if u.Partition() && strategy == sharing.MIGMixed {
				known = u.Profile.ResourceName()
			}
			described := describe(u, gpus)
			if ours && offered == known {
				own[known] = kind{units: append(own[known].units, described)}
				continue
			}
			others[known] = kind{units: append(others[known].units, described), renamed: true}
			if ours {
				own[offered] = kind{units: append(own[offered].units, described)}
			}
		}
	}
	for name, k := range others {
		if _, known := own[name]; !known {
			own[name] = k
		}
	}
	return own
}

func describe(u sharing.Unit, gpus []sharing.GPU) unit {
	d := unit{Unit: u, product: value(u.Model)}
	gpu := gpus[slices.IndexFunc(gpus, func(g sharing.GPU) bool { return g.UUID == u.GPU })]
	d.memory = gpu.Memory >> 20
	if u.Partition() {
		d.product += "-MIG-" + strings.TrimPrefix(u.Profile.ResourceName(), "mig-")
		p := gpu.Partitions[slices.IndexFunc(gpu.Partitions, func(p sharing.Partition) bool { return p.UUID == u.ID })]
		d.attributes, d.memory = p.Attributes, cmp.Or(p.Attributes.MemoryMiB, p.Memory>>20)
	}
	return d
}

// kind adds the labels of a resource.
func (s set) kind(name string, k kind) {
	s.put(name+".count", len(k.units))
	s.share(name, distinct(k.units, func(u unit) string { return u.product }), k)
	s.put(name+".memory", least(k.units, func(u unit) uint64 { return u.memory }))
	for _, a := range []struct {
		name string
		of   func(sharing.PartitionAttributes) int
	}{
		{"multiprocessors", func(a sharing.PartitionAttributes) int { return a.Multiprocessors }},
		{"slices.gi", func(a sharing.PartitionAttributes) int { return a.GPUSlices }},
		{"slices.ci", func(a sharing.PartitionAttributes) int { return a.ComputeSlices }},
		{"engines.copy", func(a sharing.PartitionAttributes) int { return a.CopyEngines }},
		{"engines.decoder", func(a sharing.PartitionAttributes) int { return a.Decoders }},
		{"engines.encoder", func(a sharing.PartitionAttributes) int { return a.Encoders }},
		{"engines.jpeg", func(a sharing.PartitionAttributes) int { return a.JPEGEngines }},
		{"engines.ofa", func(a sharing.PartitionAttributes) int { return a.OFAEngines }},
	} {
		known := !slices.ContainsFunc(k.units,
			func(u unit) bool { return u.attributes == sharing.PartitionAttributes{} })
		if known {
			s.put(name+"."+a.name, slices.Min(mapped(k.units, func(u unit) int { return a.of(u.attributes) })))
		}
	}
}

// share adds the labels for the product of the units, and for the number of containers that may
// share each.
func (s set) share(name string, products []string, k kind) {
	replicas, strategy := 1, "none"
	if len(k.units) > 0 {
		replicas = k.units[0].Replicas
	}
	for _, u := range k.units {
		if u.Replicas != replicas {
			replicas = 0
		}
		switch { // The least isolated units decide: promise no limits that some unit lacks.
		case u.MPS.Shares == 0 && u.Replicas > 1:
			strategy = "time-slicing"
		case u.MPS.Shares > 0 && strategy == "none":
			strategy = "mps"
		}
	}
	suffix := ""
	if strategy != "none" && !k.renamed {
		suffix = "-SHARED"
	}
	if delete(s, domain+name+".product"); len(products) == 1 {
		s.put(name+".product", value(products[0][:min(len(products[0]), maxLength-len(suffix))]+suffix))
	}
	if replicas > 0 {
		s.put(name+".replicas", replicas)
	}
	s.put(name+".sharing-strategy", strategy)
}

// family returns NVIDIA's name for GPUs of the compute capability (k8s-device-plugin, getArchFamily
// in internal/lm/resource.go).
func family(capability string) string {
	major, minor, _ := strings.Cut(capability, ".")
	switch {
	case major == "7" && compareVersions(capability, "7.5") < 0:
		return "volta"
	case major == "8" && minor == "9":
		return "ada-lovelace"
	}
	known := map[string]string{
		"1":  "tesla",
		"2":  "fermi",
		"3":  "kepler",
		"5":  "maxwell",
		"6":  "pascal",
		"7":  "turing",
		"8":  "ampere",
		"9":  "hopper",
		"10": "blackwell",
		"12": "blackwell",
		"13": "rubin",
	}
	return cmp.Or(known[major], "undefined")
}

// compareVersions compares versions that consist of two numbers.
func compareVersions(a, b string) int {
	number := func(text string) int { n, _ := strconv.Atoi(text); return n }
	majorA, minorA, _ := strings.Cut(a, ".")
	majorB, minorB, _ := strings.Cut(b, ".")
	return cmp.Or(cmp.Compare(number(majorA), number(majorB)), cmp.Compare(number(minorA), number(minorB)))
}

// least returns the smallest known amount; "" when none is known.
func least[T any](all []T, of func(T) uint64) string {
	amounts := slices.DeleteFunc(mapped(all, of), func(n uint64) bool { return n == 0 })
	if len(amounts) == 0 {
		return ""
	}
	return fmt.Sprint(slices.Min(amounts))
}

// distinct returns the different texts, sorted; an empty text counts as one.
func distinct[T any](all []T, of func(T) string) []string {
	texts := mapped(all, of)
	slices.Sort(texts)
	return slices.Compact(texts)
}

func mapped[T, U any](all []T, of func(T) U) []U {
	var results []U
	for _, one := range all {
		results = append(results, of(one))
	}
	return results
}
