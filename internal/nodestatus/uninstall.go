package nodestatus

import (
	"context"
	"encoding/json"
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
)

// Removed is what Uninstall has removed from a Node, in words, and what is still there.
type Removed struct {
	Node string
	Done []string
	// Left are the resources that the kubelet still has, with their number: "nvidia.com/gpu 8".
	Left []string
}

// listed has the fields that are read from an object in a list.
type listed struct {
	Metadata struct {
		Name, Namespace string
		UID             types.UID
		ManagedFields   []struct{ Manager string }
		OwnerReferences []metav1.OwnerReference
	}
	Spec struct{ NodeName string }
}

// metadataList requests only the metadata of a list's objects.
const metadataList = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

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
	err = c.list(ctx, "/api/v1/nodes", metadataList, func(node listed) { names = append(names, node.Metadata.Name) })
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	slices.Sort(names)
	return names, nil
}

// list reads all objects at the path, page by page.
func (c client) list(ctx context.Context, path, accept string, each func(listed)) error {
	for next := ""; ; {
		var page struct {
			Metadata struct{ Continue string }
			Items    []listed
		}
		data, err := c.do(ctx, c.rest.Get().AbsPath(path).Param("limit", "500").Param("continue", next).
			SetHeader("Accept", accept))
		if err == nil {
			err = json.Unmarshal(data, &page)
		}
		if err != nil {
			return err
		}
		for _, object := range page.Items {
			each(object)
		}
		next = page.Metadata.Continue
		if next == "" {
			return nil
		}
	}
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
	var found []listed
	err = c.list(ctx, nfdAPI+"/nodefeatures", metadataList, func(object listed) {
		if ours[object.Metadata.Name] &&
			slices.ContainsFunc(object.Metadata.ManagedFields,
				func(f struct{ Manager string }) bool { return f.Manager == fieldManager }) {
			found = append(found, object)
		}
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("list NodeFeatures: %w", err)
	}
	var errs []error
	for _, object := range found {
		meta := object.Metadata
		err := c.delete(ctx, meta.UID, nfdAPI, "namespaces", meta.Namespace, "nodefeatures", meta.Name)
		name := meta.Namespace + "/" + meta.Name
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("delete NodeFeature %s: %w", name, err))
			continue
		}
		removed = append(removed, name)
	}
	slices.Sort(removed)
	return removed, errors.Join(errs...)
}

// delete deletes the object at the path, but not an object that has replaced it.
func (c client) delete(ctx context.Context, uid types.UID, path ...string) error {
	body, err := json.Marshal(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if err == nil {
		_, err = c.do(ctx, c.rest.Delete().AbsPath(path...).SetHeader("Content-Type", "application/json").Body(body))
	}
	return err
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
