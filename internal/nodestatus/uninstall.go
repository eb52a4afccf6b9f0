package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/kube"
)

// Removed is what Uninstall has removed from a Node, in words, and what is still there.
type Removed struct {
	Node string
	Done []string
	// Left are the resources that the kubelet still has, with their number: "nvidia.com/gpu 8".
	Left []string
}

// NodeLabels returns the labels of the Node of that name.
func NodeLabels(ctx context.Context, config *rest.Config, node string) (map[string]string, error) {
	c, err := connect(config, node, 15*time.Second)
	if err != nil {
		return nil, err
	}
	object, err := c.metadata(ctx)
	return object.Labels, err
}

// NodeNames returns the names of all Nodes of the cluster, sorted.
func NodeNames(ctx context.Context, config *rest.Config) ([]string, error) {
	c, err := connect(config, "all", 15*time.Second)
	if err != nil {
		return nil, err
	}
	var names []string
	q := kube.Query{
		What:         "nodes",
		Resource:     "nodes",
		MetadataOnly: true,
	}
	err = kube.Pages(ctx, c.Client, q, func(page *metav1.PartialObjectMetadataList) {
		for _, node := range page.Items {
			names = append(names, node.Name)
		}
	})
	slices.Sort(names)
	return names, err
}

// RemoveNodeFeatures removes the NodeFeature objects that FeaturesToNFD created for the Nodes, in any
// namespace, and returns them as "NAMESPACE/NAME". Without node feature discovery there are none.
func RemoveNodeFeatures(ctx context.Context, config *rest.Config, nodes []string) (removed []string, err error) {
	c, err := connect(config, "all", 15*time.Second)
	if err != nil {
		return nil, err
	}
	ours := map[string]bool{}
	for _, node := range nodes {
		ours[NodeFeatureName(node)] = true
	}
	q := kube.Query{
		What:         "NodeFeatures",
		Path:         nfdAPI,
		Resource:     "nodefeatures",
		MetadataOnly: true,
	}
	byUs := func(f metav1.ManagedFieldsEntry) bool { return f.Manager == kube.FieldManager }
	var found []metav1.PartialObjectMetadata
	err = kube.Pages(ctx, c.Client, q, func(page *metav1.PartialObjectMetadataList) {
		for _, object := range page.Items {
			if ours[object.Name] && slices.ContainsFunc(object.ManagedFields, byUs) {
				found = append(found, object)
			}
		}
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	var errs []error
	for _, object := range found {
		err := c.Remove(ctx, metav1.Preconditions{UID: &object.UID}, nfdAPI, "namespaces", object.Namespace,
			"nodefeatures", object.Name)
		name := object.Namespace + "/" + object.Name
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("delete NodeFeature %s: %w", name, err))
			continue
		}
		removed = append(removed, name)
	}
	slices.Sort(removed)
	return removed, errors.Join(errs...)
}

// Uninstall removes from the Node what Virgate wrote to it: the condition, its annotations and
// labels, and the resources of domain whose number is 0. What others wrote stays. A resource that
// the kubelet still counts cannot be removed. One that is removed within five minutes of Virgate's
// end comes back; then Uninstall must be called again.
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
		if strings.HasPrefix(key, deployPrefix) { // It is the GPU Operator's, even if Virgate wrote it last.
			if meta.Labels[key] == pausedForChange && wrote(meta, "f:labels", key) {
				patch.Labels[key] = new(running)
				removed.Done = append(removed.Done, "pause of "+key)
			}
			continue
		}
		if key == StateLabel || wrote(meta, "f:labels", key) {
			patch.Labels[key] = nil
			removed.Done = append(removed.Done, "label "+key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(meta.Annotations)) {
		if slices.Contains([]string{
			ProfileAnnotation, SourceAnnotation, GenerationAnnotation, WantedAnnotation, WantedByAnnotation,
			RulesAnnotation,
		}, key) || wrote(meta, "f:annotations", key) {
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
		remove := map[string]any{"status": map[string]any{"conditions": []map[string]string{{
			"$patch": "delete",
			"type":   ConditionType,
		}}}}
		if err := c.patchNode(ctx, types.StrategicMergePatchType, remove, "status"); err != nil {
			return removed, err
		}
		removed.Done = append(removed.Done, "condition "+ConditionType)
	}
	for _, name := range slices.Sorted(maps.Keys(n.Status.Capacity)) {
		resource := string(name)
		if !strings.HasPrefix(resource, domain+"/") {
			continue
		}
		if count := n.Status.Capacity[name]; !count.IsZero() {
			removed.Left = append(removed.Left, resource+" "+count.String())
			continue
		}
		if err := (&staleResources{client: c}).remove(ctx, resource); err != nil {
			return removed, err
		}
		removed.Done = append(removed.Done, "resource "+resource)
	}
	return removed, nil
}
