package nodestatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// helmRelease is an annotation that Helm gives what it installs, and that the output of helm template lacks.
const helmRelease = "meta.helm.sh/release-name"

// ErrNotOfHelm says that Helm didn't install the DaemonSet, so that it stays: who applies the output of helm template
// applies the hook, too, and uninstalls nothing.
var ErrNotOfHelm = errors.New("not installed by Helm")

// endInterval is the time between two looks of EndDaemonSet.
const endInterval = 2 * time.Second

// EndDaemonSet deletes the DaemonSet, if it is there, and waits for at most that long until its pods have ended, each
// of which may still write that it has. left are the Nodes whose pods haven't.
func EndDaemonSet(
	ctx context.Context,
	config *rest.Config,
	namespace, name string,
	wait time.Duration,
) (left []string, err error) {
	c, err := connect(config, "all", 5*time.Second)
	if err != nil {
		return nil, err
	}
	waiting, stop := context.WithTimeout(ctx, wait)
	defer stop()
	for {
		err = c.deleteDaemonSet(ctx, namespace, name)
		if err == nil {
			left, err = c.nodesOf(ctx, namespace, name)
		}
		if errors.Is(err, ErrNotOfHelm) || err == nil && len(left) == 0 {
			return nil, err
		}
		select {
		case <-waiting.Done():
			return left, err
		case <-time.After(endInterval):
		}
	}
}

// deleteDaemonSet leaves its pods to the garbage collector, as is the default: the DaemonSet itself is
// gone at once, and no node that doesn't answer keeps it.
func (c client) deleteDaemonSet(ctx context.Context, namespace, name string) error {
	path := []string{"/apis/apps/v1/namespaces", namespace, "daemonsets", name}
	var set metav1.PartialObjectMetadata
	data, err := c.do(ctx, c.rest.Get().AbsPath(path...).SetHeader("Accept", metadataOnly))
	if err == nil {
		err = json.Unmarshal(data, &set)
	}
	if err == nil && set.Annotations[helmRelease] == "" {
		err = ErrNotOfHelm
	}
	if err == nil {
		err = c.delete(ctx, set.UID, path...)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete DaemonSet %s/%s: %w", namespace, name, err)
	}
	return nil
}

// nodesOf are the Nodes that have a pod of the DaemonSet, sorted. One without a Node has never run.
func (c client) nodesOf(ctx context.Context, namespace, name string) ([]string, error) {
	var nodes []string
	err := c.list(ctx, "/api/v1/namespaces/"+namespace+"/pods", "application/json", func(pod listed) {
		ours := func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" && o.Name == name }
		if pod.Spec.NodeName != "" && slices.ContainsFunc(pod.Metadata.OwnerReferences, ours) {
			nodes = append(nodes, pod.Spec.NodeName)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list pods in %s: %w", namespace, err)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), nil
}
