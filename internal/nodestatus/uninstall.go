package nodestatus

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// Removed is what Uninstall has taken from a Node, in words, and what is still there.
type Removed struct {
	Node string
	Done []string
	// Left are resources that the kubelet still has, with their number: "nvidia.com/gpu 8".
	Left []string
}

// removedNode is what Uninstall reads of a Node.
type removedNode struct {
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
}

// NodeNames are the names of all Nodes of the cluster, sorted.
func NodeNames(ctx context.Context, config *rest.Config) ([]string, error) {
	c, err := connect(config, "all", 15*time.Second)
	if err != nil {
		return nil, err
	}
	var names []string
	for next := ""; ; {
		var page struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []removedNode `json:"items"`
		}
		data, err := c.do(ctx, c.rest.Get().Resource("nodes").Param("limit", "500").Param("continue", next).
			SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"))
		if err == nil {
			err = json.Unmarshal(data, &page)
		}
		if err != nil {
			return nil, fmt.Errorf("list nodes: %w", err)
		}
		for _, n := range page.Items {
			names = append(names, n.Metadata.Name)
		}
		if next = page.Metadata.Continue; next == "" {
			slices.Sort(names)
			return names, nil
		}
	}
}

// Uninstall takes from the Node what Virgate wrote to it: the condition, its annotations and
// labels, and the resources of that domain of which there are 0. What others wrote stays.
// A resource that the kubelet still counts cannot be taken, and one that was taken
// within five minutes of Virgate's end comes back: then it is to be called again.
func Uninstall(ctx context.Context, config *rest.Config, name, domain string) (Removed, error) {
	removed := Removed{Node: name}
	c, err := connect(config, name, 15*time.Second)
	if err != nil {
		return removed, err
	}
	meta, err := c.metadata(ctx)
	if err != nil {
		return removed, err
	}
	patch := objectMeta{Annotations: map[string]*string{}, Labels: map[string]*string{}}
	for _, key := range slices.Sorted(maps.Keys(meta.Labels)) {
		if key == StateLabel || wrote(meta, "f:labels", key) {
			patch.Labels[key] = nil
			removed.Done = append(removed.Done, "label "+key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(meta.Annotations)) {
		if slices.Contains([]string{ProfileAnnotation, SourceAnnotation, GenerationAnnotation}, key) || wrote(meta, "f:annotations", key) {
			patch.Annotations[key] = nil
			removed.Done = append(removed.Done, "annotation "+key)
		}
	}
	if len(removed.Done) > 0 {
		if err := c.patchNode(ctx, types.StrategicMergePatchType, map[string]any{"metadata": patch}); err != nil {
			return Removed{Node: name}, err
		}
	}
	n, err := c.read(ctx)
	if err != nil {
		return removed, err
	}
	if slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == ConditionType }) {
		remove := map[string]any{"status": map[string]any{"conditions": []map[string]string{{"$patch": "delete", "type": ConditionType}}}}
		if err := c.patchNode(ctx, types.StrategicMergePatchType, remove, "status"); err != nil {
			return removed, err
		}
		removed.Done = append(removed.Done, "condition "+ConditionType)
	}
	for _, resource := range slices.Sorted(maps.Keys(n.Status.Capacity)) {
		if !strings.HasPrefix(resource, domain+"/") {
			continue
		}
		if count := n.Status.Capacity[resource]; count != "0" {
			removed.Left = append(removed.Left, resource+" "+count)
			continue
		}
		if err := (&staleResources{client: c}).remove(ctx, resource); err != nil {
			return removed, err
		}
		removed.Done = append(removed.Done, "resource "+resource)
	}
	return removed, nil
}
