package rollout

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/nodereport"
)

func resources(before, lowest, then, after int) nodereport.Forecast {
	return nodereport.Forecast{Resources: []nodereport.ForecastResource{{Name: "gpu", Before: before, Lowest: lowest, Then: then, After: after}}}
}

func TestCapacities(t *testing.T) {
	switches, held, grows, stays := resources(4, 0, 4, 4), resources(4, 0, 1, 4), resources(4, 4, 8, 8), resources(4, 4, 4, 4)
	other := nodereport.Forecast{Resources: []nodereport.ForecastResource{{Name: "share", Then: 8, After: 8}}}
	for _, test := range []struct {
		name  string
		nodes []nodereport.Forecast
		most  int
		want  []Capacity
	}{
		{"one at a time", []nodereport.Forecast{switches, switches, switches}, 1, []Capacity{{"gpu", 12, 8, 12, 0}}},
		{"two at a time", []nodereport.Forecast{switches, switches, switches}, 2, []Capacity{{"gpu", 12, 4, 12, 0}}},
		{"all at a time", []nodereport.Forecast{switches, switches, switches}, 3, []Capacity{{"gpu", 12, 0, 12, 0}}},
		{"more at a time than there are", []nodereport.Forecast{switches, switches}, 5, []Capacity{{"gpu", 8, 0, 8, 0}}},
		{"what is held adds up", []nodereport.Forecast{held, held, held}, 1, []Capacity{{"gpu", 12, 2, 12, 9}}},
		{"it does not fall below the end", []nodereport.Forecast{resources(4, 0, 0, 0), resources(4, 0, 0, 0)}, 1, []Capacity{{"gpu", 8, 0, 0, 0}}},
		{"it grows", []nodereport.Forecast{grows, grows}, 1, []Capacity{{"gpu", 8, 8, 16, 0}}},
		{"grown before it falls", []nodereport.Forecast{grows, switches}, 1, []Capacity{{"gpu", 8, 8, 12, 0}}},
		{"falls before it grows", []nodereport.Forecast{switches, grows}, 1, []Capacity{{"gpu", 8, 4, 12, 0}}},
		{"some stay", []nodereport.Forecast{stays, switches, {Unknown: "silent"}}, 1, []Capacity{{"gpu", 8, 4, 8, 0}}},
		{"two resources", []nodereport.Forecast{other, switches}, 1, []Capacity{{"gpu", 4, 0, 4, 0}, {"share", 0, 0, 8, 0}}},
		{"fewer at the end than with the pods", []nodereport.Forecast{resources(4, 4, 4, 1)}, 1, []Capacity{{"gpu", 4, 4, 1, 0}}},
		{"none", nil, 1, []Capacity{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, capacities(named(test.nodes), test.most)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func named(forecasts []nodereport.Forecast) (nodes []NodeForecast) {
	for i, f := range forecasts {
		nodes = append(nodes, NodeForecast{Name: string(rune('a' + i)), Forecast: f})
	}
	return nodes
}

// TestLowestIsThatOfAllMoments counts the devices at every moment anew.
func TestLowestIsThatOfAllMoments(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in each run
	for range 500 {
		most, forecasts := 1+random.IntN(4), make([]nodereport.Forecast, 1+random.IntN(7))
		for i := range forecasts {
			before, then := random.IntN(9), random.IntN(9)
			forecasts[i] = resources(before, random.IntN(1+min(before, then)), then, random.IntN(9))
		}
		want := int64(1 << 40)
		for first := -most; first <= len(forecasts); first++ { // The first node under way.
			var now int64
			for i, f := range forecasts {
				switch r := f.Resources[0]; {
				case i < first:
					now += int64(r.Then)
				case i < first+most:
					now += int64(r.Lowest)
				default:
					now += int64(r.Before)
				}
			}
			want = min(want, now)
		}
		if got := capacities(named(forecasts), most)[0].Lowest; got != want {
			t.Fatalf("lowest %d, want %d, of %+v, %d at once", got, want, forecasts, most)
		}
	}
}

// TestForecast checks that the nodes forecast the label and value that they would get, and that nothing is written.
func TestForecast(t *testing.T) {
	a := startAPI(t, "n1", "n2", "n3", "n4", "n5")
	a.edit("n4", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse })
	a.intercept(func(node, body string) bool {
		t.Errorf("%s is written: %s", node, body)
		return true
	})
	spec := Spec{To: "new", Selector: "pool=a", MaxUnavailable: "2", Timeout: time.Minute}
	says := map[string]nodereport.Forecast{
		"n1": resources(4, 0, 4, 4), "n2": {Unfit: []string{"no"}, Resources: resources(4, 4, 4, 4).Resources},
		"n3": {Unknown: "silent"}, "n5": {LeftTo: "mig-manager does it", Resources: resources(4, 0, 2, 4).Resources},
	}
	var asked string
	ask := func(_ context.Context, nodes []cluster.Node, label, value string) (map[string]nodereport.Forecast, error) {
		asked = label + "=" + value
		for _, n := range nodes {
			asked += " " + n.Name
		}
		return says, nil
	}
	c := a.client("x")
	if _, err := c.Forecast(t.Context(), spec, ask); err == nil || !strings.Contains(err.Error(), "1 of 5 nodes cannot follow now") || asked != "" {
		t.Errorf("with a node that is not ready: %v, asked %q", err, asked)
	}
	spec.SkipUnready = true
	f, err := c.Forecast(t.Context(), spec, ask)
	if err != nil {
		t.Fatal(err)
	}
	want := Forecast{
		Label: ProfileLabel, To: "new", Max: 2, LeftOut: []string{"n4: the node is not ready: "},
		Resources: []Capacity{{"gpu", 12, 8, 12, 2}},
		Nodes:     []NodeForecast{{"n1", 1, says["n1"]}, {"n2", 1, says["n2"]}, {"n3", 2, says["n3"]}, {"n5", 2, says["n5"]}},
	}
	if diff := cmp.Diff(want, f); diff != "" || asked != ProfileLabel+"=new n1 n2 n3 n5" || len(f.Unfit()) != 1 {
		t.Errorf("(-want +got):\n%s asked %q", diff, asked)
	}
	// Only the program that makes the layouts can forecast their result.
	spec.MIG = true
	if f, err = c.Forecast(t.Context(), spec, ask); err != nil || f.Nodes[3].Unknown != "mig-manager does it" || f.Nodes[3].Resources != nil || !strings.HasPrefix(asked, LayoutLabel+"=new ") {
		t.Errorf("%+v (%v), asked %q", f, err, asked)
	}
	failure := errors.New("no right")
	if _, err := c.Forecast(t.Context(), spec, func(context.Context, []cluster.Node, string, string) (map[string]nodereport.Forecast, error) {
		return nil, failure
	}); !errors.Is(err, failure) {
		t.Error(err)
	}
	// A node of another rollout blocks it, like a start.
	a.intercept(nil)
	if _, err := c.Start(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Forecast(t.Context(), spec, ask); err == nil || !strings.Contains(err.Error(), "belongs to rollout") {
		t.Error(err)
	}
}
