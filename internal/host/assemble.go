package host

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// entries are the CDI entries that a runtime finds now.
type entries struct {
	names map[string]bool
	// problem says why others are missing; empty when none are known to be.
	problem string
}

// assemble says what the node has for the units of its boards, and which of
// them cannot be granted as the profile wants. It is pure.
func assemble(grants sharing.Grants, devRoot string, gpus []sharing.GPU, f files, e entries) plugin.Host {
	host := plugin.Host{DevRoot: devRoot, ControlNodes: f.control, Nodes: map[string][]string{}, Obstacles: map[string]string{}}
	for _, class := range grants.Extras() {
		if name := plugin.CDIName(class, "all"); e.names[name] {
			host.Extras = append(host.Extras, name)
		}
	}
	add := func(unit, index string, nodes []string, lacks string) {
		host.Nodes[unit] = nodes
		if lacks == "" {
			lacks = missing(f.nodes, devRoot, nodes)
		}
		switch {
		case f.noDriver != "":
			host.Obstacles[unit] = f.noDriver
		case grants.Nodes() && lacks != "":
			host.Obstacles[unit] = lacks
		case grants.CDI() && (!e.has(unit) || !e.has(index)):
			host.Obstacles[unit] = "it has no CDI entry: " + cmp.Or(e.problem, "none is written yet")
		}
	}
	for _, g := range gpus {
		index, node, lacks := strconv.Itoa(g.Index), []string(nil), "the driver does not tell its device node"
		if g.Minor >= 0 {
			node, lacks = []string{"/dev/nvidia" + strconv.Itoa(g.Minor)}, ""
		}
		if !g.MIG {
			add(g.UUID, index, node, lacks)
			continue
		}
		// As a whole the board runs nothing, and has no CDI entry.
		host.Nodes[g.UUID] = node
		for _, p := range g.Partitions {
			nodes, lacks := partitionNodes(f, g, p, node, lacks)
			add(p.UUID, index+":"+strconv.Itoa(p.Index), nodes, lacks)
		}
	}
	return host
}

// partitionNodes are the nodes of the board and of the partition's
// capabilities; none where one of them is not known, and then lacks says so.
func partitionNodes(f files, g sharing.GPU, p sharing.Partition, board []string, lacks string) ([]string, string) {
	if lacks != "" {
		return nil, lacks
	}
	if f.minorsErr != "" {
		return nil, "the device nodes of partitions are not known: " + f.minorsErr
	}
	gi, ok := f.minors[capability{g.Minor, p.GI, -1}]
	ci, also := f.minors[capability{g.Minor, p.GI, p.CI}]
	if !ok || !also {
		return nil, fmt.Sprintf("the device nodes of GPU instance %d and compute instance %d are not known: %s does not list them",
			p.GI, p.CI, minorsPath)
	}
	const node = "/dev/nvidia-caps/nvidia-cap"
	return []string{board[0], node + strconv.Itoa(gi), node + strconv.Itoa(ci)}, ""
}

// missing says which of the nodes the host does not have: a runtime starts no
// container with one of those. Where made is nil, that cannot be told.
func missing(made map[string]bool, devRoot string, nodes []string) string {
	for _, node := range nodes {
		if made != nil && !made[node] {
			return "there is no " + filepath.Join("/", devRoot, node)
		}
	}
	return ""
}

func (e entries) has(unit string) bool { return e.names[plugin.CDIName(plugin.CDIClass, unit)] }
