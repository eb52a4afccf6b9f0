package sharing

import (
	"fmt"
	"strings"
)

// fabric is how the boards of a kind of node are linked.
type fabric struct {
	name   string
	boards int
	// nvlinks and level are those between boards a and b, a < b.
	nvlinks func(a, b int) int
	level   func(a, b int) string
}

// fabrics are nodes whose links are published: the DGX-1 and RTX 8000 ones as
// NVIDIA's own tests have them (go-gpuallocator, gpuallocator/common_test.go),
// the others after the user guides of the DGX systems and the data sheets of the
// boards, with simple PCIe trees. NVLinks through switches are the same between
// all boards.
func fabrics() []fabric {
	return []fabric{
		{"DGX-1 P100", 8, cube(""), quads(2, "single", "hostbridge")},
		{"DGX-1 V100", 8, cube("03 04 12 15 23 47 56 67"), quads(1, "single", "hostbridge")},
		{"4 × Quadro RTX 8000", 4, bridges("03 12", 2), pairs("node")},
		{"DGX-2", 16, switched(6), tree("single", "multiple", "node")},
		{"DGX A100", 8, switched(12), tree("multiple", "node", "system")},
		{"DGX H100", 8, switched(18), tree("node", "node", "system")},
		{"8 × H100 NVL", 8, bridges("01 23 45 67", 12), tree("node", "node", "system")},
		{"8 × L40S", 8, switched(0), tree("single", "node", "system")},
	}
}

// fabricOf returns the fabric of that name.
func fabricOf(name string) fabric {
	for _, f := range fabrics() {
		if f.name == name {
			return f
		}
	}
	panic("no fabric " + name)
}

// cube is the hybrid cube mesh: two groups of four, each board linked to its
// group and to its counterpart in the other one, by one NVLink or, for the pairs
// in the text, by two.
func cube(double string) func(a, b int) int {
	return func(a, b int) int {
		switch {
		case strings.Contains(double, fmt.Sprintf("%d%d", a, b)):
			return 2
		case a/4 == b/4 || b-a == 4:
			return 1
		}
		return 0
	}
}

// bridges are NVLinks between the pairs in the text.
func bridges(text string, count int) func(a, b int) int {
	return func(a, b int) int {
		if strings.Contains(text, fmt.Sprintf("%d%d", a, b)) {
			return count
		}
		return 0
	}
}

// switched are NVLinks between all boards.
func switched(count int) func(a, b int) int { return func(int, int) int { return count } }

// quads are two groups of four; boards apart by distance are near in a group.
func quads(distance int, near, group string) func(a, b int) string {
	return func(a, b int) string {
		switch {
		case a/4 != b/4:
			return "system"
		case a/distance/2 == b/distance/2 && b-a == distance:
			return near
		}
		return group
	}
}

// pairs are groups of two.
func pairs(near string) func(a, b int) string {
	return func(a, b int) string {
		if a/2 == b/2 {
			return near
		}
		return "system"
	}
}

// tree are levels within groups of two, four and eight.
func tree(two, four, eight string) func(a, b int) string {
	return func(a, b int) string {
		switch {
		case a/2 == b/2:
			return two
		case a/4 == b/4:
			return four
		case a/8 == b/8:
			return eight
		}
		return "system"
	}
}

// node returns the fabric's boards.
func (f fabric) node() []GPU {
	boards := node(f.boards)
	for b := range boards {
		for a := range b {
			link := Link{NVLinks: f.nvlinks(a, b), Level: f.level(a, b)}
			link.Peer = boards[b].UUID
			boards[a].Links = append(boards[a].Links, link)
			link.Peer = boards[a].UUID
			boards[b].Links = append(boards[b].Links, link)
		}
	}
	return boards
}

// score is what NVIDIA's best-effort policy gives the pair.
func (f fabric) score(a, b int) int {
	places := map[string]int{"system": 10, "node": 20, "hostbridge": 30, "multiple": 40, "single": 50, "internal": 60}
	return 100*f.nvlinks(min(a, b), max(a, b)) + places[f.level(min(a, b), max(a, b))]
}
