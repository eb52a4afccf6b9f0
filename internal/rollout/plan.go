package rollout

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

const (
	// planName is the prefix of a rollout's ConfigMap name; the ID follows.
	planName = "virgate-rollout-"
	// PlanLabel holds the ID, too.
	PlanLabel = "virgate.github.io/rollout"
	// Keys of the ConfigMap, for Params, State and the nodes.
	paramsKey, headKey, nodesKey = "rollout", "state", "nodes"
)

// plan is a rollout's ConfigMap: what to do and who drives it. Nodes cannot write it.
type plan struct {
	Params
	State
	// members are the chosen nodes, sorted by name.
	members []member
	// version is the ConfigMap's resourceVersion.
	version string
}

// member is a chosen node with its label's previous value.
type member struct {
	name string
	from *string
}

// group is how members are stored: 1,000 nodes with the same label need some 30 KB.
type group struct {
	From  *string  `json:"from,omitempty"`
	Nodes []string `json:"nodes"`
}

func (p plan) has(node string) bool {
	_, found := slices.BinarySearchFunc(p.members, node, func(m member, name string) int {
		return strings.Compare(m.name, name)
	})
	return found
}

// without returns the plan without the nodes of another plan.
func (p plan) without(other plan) plan {
	p.members = slices.DeleteFunc(slices.Clone(p.members), func(m member) bool { return other.has(m.name) })
	return p
}

// encodeNodes returns the members as JSON.
func (p plan) encodeNodes() string {
	var groups []group
	for _, m := range p.members {
		i := slices.IndexFunc(groups, func(g group) bool { return same(g.From, m.from) })
		if i < 0 {
			i = len(groups)
			groups = append(groups, group{From: m.from})
		}
		groups[i].Nodes = append(groups[i].Nodes, m.name)
	}
	return encode(groups)
}

func encode(value any) string {
	data, _ := json.Marshal(value)
	return string(data)
}

func (p plan) configMap(namespace string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{Kind: "ConfigMap", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Name:      planName + p.ID,
			Namespace: namespace,
			Labels:    map[string]string{PlanLabel: p.ID},
		},
		Data: map[string]string{
			paramsKey: encode(p.Params),
			headKey:   encode(p.State),
			nodesKey:  p.encodeNodes(),
		},
	}
}

// planOf reads the ConfigMap. An unreadable one is an error, because it could be about any nodes.
func planOf(object *corev1.ConfigMap) (plan, error) {
	p := plan{version: object.ResourceVersion}
	var groups []group
	for key, into := range map[string]any{
		paramsKey: &p.Params,
		headKey:   &p.State,
		nodesKey:  &groups,
	} {
		decoder := json.NewDecoder(bytes.NewBufferString(object.Data[key]))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(into); err != nil {
			return plan{}, fmt.Errorf("ConfigMap %s/%s: %s is not as kubectl virgate rollout writes it: %w",
				object.Namespace, object.Name, key, err)
		}
	}
	for _, g := range groups {
		for _, name := range g.Nodes {
			p.members = append(p.members, member{name, g.From})
		}
	}
	slices.SortFunc(p.members, func(a, b member) int { return cmp.Compare(a.name, b.name) })
	if err := p.check(object.Name); err != nil {
		return plan{}, fmt.Errorf("ConfigMap %s/%s is not as kubectl virgate rollout writes it: %w", object.Namespace,
			object.Name, err)
	}
	return p, nil
}

func (p plan) check(name string) error {
	phases := []Phase{Claiming, Running, Paused, Stopped, Finished, TakingBack, TakenBack}
	switch {
	case planName+p.ID != name:
		return fmt.Errorf("it is of rollout %q", p.ID)
	case len(validation.IsQualifiedName(p.Label)) > 0:
		return fmt.Errorf("%q cannot be a label's name", p.Label)
	case p.To == "" || len(validation.IsValidLabelValue(p.To)) > 0:
		return fmt.Errorf("%q cannot be a label's value", p.To)
	case p.Max < 1 || p.Timeout < 1:
		return fmt.Errorf("max and timeout must be 1 at least, got %d and %d", p.Max, p.Timeout)
	case !slices.Contains(phases, p.Phase):
		return fmt.Errorf("there is no phase %q", p.Phase)
	}
	return nil
}
