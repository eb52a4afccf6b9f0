package nodestatus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/wake"
)

// helmRelease is an annotation that Helm adds to what it installs. The output of helm template lacks it.
const helmRelease = "meta.helm.sh/release-name"

// ErrNotOfHelm is returned for a DaemonSet that Helm did not install. The DaemonSet stays: a user who
// applies the output of helm template applies the uninstall hook with it, and uninstalls nothing.
var ErrNotOfHelm = errors.New("not installed by Helm")

// endInterval is the time between two checks of EndDaemonSet.
const endInterval = 2 * time.Second

// EndDaemonSet deletes the DaemonSet, if it exists, and waits until its pods have ended, but no
// longer than wait. Each of the pods may still write to its Node that it has ended. left are the
// Nodes whose pods have not ended.
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
		if !wake.Sleep(waiting, endInterval) {
			return left, err
		}
	}
}

// deleteDaemonSet leaves the pods to the garbage collector, as is the default. So the DaemonSet
// itself is gone at once, even if a node does not answer.
func (c client) deleteDaemonSet(ctx context.Context, namespace, name string) error {
	path := []string{"/apis/apps/v1/namespaces", namespace, "daemonsets", name}
	var set metav1.PartialObjectMetadata
	err := c.Do(ctx, kube.MetadataOnly(c.Get().AbsPath(path...))).Into(&set)
	if err == nil && set.Annotations[helmRelease] == "" {
		err = ErrNotOfHelm
	}
	if err == nil {
		err = c.Remove(ctx, metav1.Preconditions{UID: &set.UID}, path...)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete DaemonSet %s/%s: %w", namespace, name, err)
	}
	return nil
}

// nodesOf returns the Nodes that have a pod of the DaemonSet, sorted. It ignores a pod without a
// Node, which has never run.
func (c client) nodesOf(ctx context.Context, namespace, name string) ([]string, error) {
	var nodes []string
	q := kube.Query{
		What:      "pods in " + namespace,
		Resource:  "pods",
		Namespace: namespace,
	}
	ours := func(o metav1.OwnerReference) bool { return o.Kind == "DaemonSet" && o.Name == name }
	err := kube.Pages(ctx, c.Client, q, func(page *corev1.PodList) {
		for _, pod := range page.Items {
			if pod.Spec.NodeName != "" && slices.ContainsFunc(pod.OwnerReferences, ours) {
				nodes = append(nodes, pod.Spec.NodeName)
			}
		}
	})
	slices.Sort(nodes)
	return slices.Compact(nodes), err
}
