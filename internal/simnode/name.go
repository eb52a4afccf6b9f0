package simnode

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// named are the nodes that have a name of their own.
var named = []description{
	{Name: "dgx-a100", Boards: boards("a100-40", 8)},
	{Name: "dgx-a100-80", Boards: boards("a100-80", 8)},
	{Name: "dgx-h100", Boards: boards("h100", 8)},
	{Name: "dgx-h200", Boards: boards("h200", 8)},
	{Name: "dgx-b200", Boards: boards("b200", 8)},
	{Name: "mixed", Boards: []group{
		boards("a100-40", 2)[0],
		{Model: "a100-40", Layout: "all-balanced"},
		{Model: "a100-40", Layout: "all-1g.5gb"},
		boards("t4", 2)[0],
	}},
	{Name: "empty"},
}

func boards(model string, count int) []group { return []group{{Model: model, Count: &count}} }

// Names are node names that New takes, sorted: those that have a name of their
// own, and the usual among the MODELxN ones.
func Names() []string {
	names := []string{"a30x4", "h100x1", "l40sx8", "t4"}
	for _, d := range named {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}

// New makes the node of that name:
//
//	dgx-a100, …      as Names lists them; dgx-* have 8 equal boards
//	MODEL, MODELxN   one board, or N, of a model, for example t4 or a30x4
//	NAME+LAYOUT      with every board that has MIG cut by the mig.NamedLayout,
//	                 for example dgx-a100+all-1g.5gb
//
// "mixed" has unlike boards: two A100 as they are, one cut all-balanced, one
// cut all-1g.5gb, two T4. "empty" has none. Boards that cannot be cut in the
// way of LAYOUT stay as they are, unless none can, which is an error. An
// unknown name is an error that lists the names.
//
// UUIDs follow from NAME alone: a node keeps its boards when it is cut.
func New(name string) (*Node, error) {
	base, layout, cut := strings.Cut(name, "+")
	d, ok := describe(base)
	if !ok {
		return nil, fmt.Errorf("no simulated node %q: there are %s, MODEL and MODELxN with MODEL one of %s; each with +LAYOUT",
			base, strings.Join(Names(), ", "), modelKeys())
	}
	if cut {
		d.Boards = uncut(d.Boards)
	}
	n, err := d.build()
	if err == nil && cut {
		err = n.cutAll(layout)
	}
	if err != nil {
		return nil, fmt.Errorf("simulated node %q: %w", name, err)
	}
	return n, nil
}

func describe(name string) (description, bool) {
	for _, d := range named {
		if d.Name == name {
			return d, true
		}
	}
	if _, ok := modelOf(name); ok {
		return description{Name: name, Boards: boards(name, 1)}, true
	}
	at := strings.LastIndex(name, "x")
	if at < 0 {
		return description{}, false
	}
	count, err := strconv.Atoi(name[at+1:])
	if _, ok := modelOf(name[:at]); !ok || err != nil {
		return description{}, false
	}
	return description{Name: name, Boards: boards(name[:at], count)}, true
}

func uncut(groups []group) []group {
	groups = slices.Clone(groups)
	for i := range groups {
		groups[i].Layout = ""
	}
	return groups
}

// cutAll cuts every board that the layout fits.
func (n *Node) cutAll(layout string) error {
	fitted := false
	var misfits []error
	for _, b := range n.boards {
		if err := n.cut(b, layout); err != nil {
			misfits = append(misfits, err)
			continue
		}
		fitted = true
	}
	switch {
	case fitted:
		return nil
	case len(misfits) == 0:
		return errors.New("there is no board to cut")
	}
	// Equal boards would say the same again.
	return misfits[0]
}
