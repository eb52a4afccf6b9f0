package rollout

import (
	"cmp"
	"context"
	"slices"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/nodereport"
)

// Forecast is the expected result of a rollout, from what its nodes report.
type Forecast struct {
	Label string `json:"label"`
	To    string `json:"to"`
	MIG   bool   `json:"mig,omitempty"`
	// Max is how many nodes would be under way at once.
	Max int `json:"max"`
	// Resources count devices over all nodes with a known result, sorted by name.
	Resources []Capacity `json:"resources"`
	// Nodes are the rollout's nodes, in its order.
	Nodes []NodeForecast `json:"nodes"`
	// LeftOut lists the nodes that cannot follow now, with the reasons.
	LeftOut []string `json:"leftOut,omitempty"`
}

// Capacity counts healthy devices of a resource.
type Capacity struct {
	Name   string `json:"name"`
	Before int64  `json:"before"`
	// Lowest is the fewest at any moment if no pod ends, with as many nodes under way as allowed.
	// Such a node counts with what is not being switched.
	Lowest int64 `json:"lowest"`
	After  int64 `json:"after"`
	// Waiting is how many devices of After become available only when pods end.
	Waiting int64 `json:"waiting"`
}

// NodeForecast is the expected result on one node.
type NodeForecast struct {
	Name string `json:"name"`
	Wave int    `json:"wave"`
	nodereport.Forecast
}

// Unfit returns the nodes that would refuse, or have nothing to offer.
func (f Forecast) Unfit() []NodeForecast {
	return slices.DeleteFunc(slices.Clone(f.Nodes), func(n NodeForecast) bool { return len(n.Unfit) == 0 })
}

// Forecast plans the rollout and writes nothing. Pass cluster.Client.Forecasts as ask.
func (c *Client) Forecast(
	ctx context.Context,
	spec Spec,
	ask func(ctx context.Context, nodes []cluster.Node, label, value string) (map[string]nodereport.Forecast, error),
) (Forecast, error) {
	chosen, err := c.choose(ctx, spec)
	if err != nil {
		return Forecast{}, err
	}
	nodes := make([]cluster.Node, len(chosen.nodes))
	for i, n := range chosen.nodes {
		nodes[i] = n.Node
	}
	reported, err := ask(ctx, nodes, chosen.Label, chosen.To)
	if err != nil {
		return Forecast{}, err
	}
	f := Forecast{
		Label:   chosen.Label,
		To:      chosen.To,
		MIG:     chosen.MIG,
		Max:     chosen.Max,
		Nodes:   []NodeForecast{},
		LeftOut: chosen.unready,
	}
	for i, n := range nodes {
		node := NodeForecast{n.Name, i/f.Max + 1, reported[n.Name]}
		if f.MIG && node.LeftTo != "" {
			node.Forecast = nodereport.Forecast{Unknown: node.LeftTo}
		}
		f.Nodes = append(f.Nodes, node)
	}
	f.Resources = capacities(f.Nodes, f.Max)
	return f, nil
}

// capacities adds up the nodes. Nodes before the first one under way count as done, as far as
// possible without waiting for pods. Nodes after the last one under way have not begun.
func capacities(nodes []NodeForecast, most int) []Capacity {
	byName := map[string]*Capacity{}
	names := map[string][]nodereport.ForecastResource{} // By resource, then by node.
	for i, n := range nodes {
		for _, r := range n.Resources {
			if names[r.Name] == nil {
				names[r.Name], byName[r.Name] = make([]nodereport.ForecastResource, len(nodes)), &Capacity{Name: r.Name}
			}
			names[r.Name][i] = r
			c := byName[r.Name]
			c.Before += int64(r.Before)
			c.After += int64(r.After)
			c.Waiting += int64(max(0, r.After-r.Then))
		}
	}
	list := []Capacity{}
	for name, ofNodes := range names {
		c := byName[name]
		now := c.Before
		c.Lowest = now
		for i := range len(ofNodes) + most { // One step: the next node begins, then the oldest one is done.
			if i < len(ofNodes) {
				now -= int64(ofNodes[i].Before - ofNodes[i].Lowest)
			}
			c.Lowest = min(c.Lowest, now)
			if done := i - most + 1; done >= 0 && done < len(ofNodes) {
				now += int64(ofNodes[done].Then - ofNodes[done].Lowest)
			}
		}
		list = append(list, *c)
	}
	slices.SortFunc(list, func(a, b Capacity) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
