package nodestatus

import (
	"context"
	"fmt"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/nodereport"
)

// Evictor evicts pods.
type Evictor struct{ client client }

// NewEvictor returns an evictor. It makes no request before Evict.
func NewEvictor(config *rest.Config, node string) (*Evictor, error) {
	client, err := connect(config, node, 15*time.Second)
	return &Evictor{client}, err
}

// Evict deletes the named pod, with the pod's grace period, if its UID is uid and PodDisruptionBudgets
// allow its eviction. Errors that nodereport defines are wrapped in the returned error.
//
// An eviction would do both at once, but an admission policy cannot see on which node the evicted
// pod runs. So Evict makes the eviction only as a dry run, and then deletes the pod. Another
// eviction between the two requests can use up the budget; then one more pod is gone than it allows.
func (e *Evictor) Evict(ctx context.Context, namespace, pod, uid string) error {
	same := metav1.Preconditions{UID: new(types.UID(uid))}
	eviction := policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"},
		ObjectMeta:    metav1.ObjectMeta{Namespace: namespace, Name: pod},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &same},
	}
	request := e.client.Post().Namespace(namespace).Resource("pods").Name(pod).SubResource("eviction").
		Param("dryRun", metav1.DryRunAll).SetHeader("Content-Type", runtime.ContentTypeJSON)
	err := e.client.Write(ctx, "ask to evict pod "+namespace+"/"+pod, request, eviction)
	if err == nil {
		err = e.client.Remove(ctx, same, "/api/v1/namespaces", namespace, "pods", pod)
		if err != nil {
			err = fmt.Errorf("delete pod %s/%s: %w", namespace, pod, err)
		}
	}
	for _, known := range []struct {
		is      func(error) bool
		meaning error
	}{
		{apierrors.IsTooManyRequests, nodereport.ErrDisruptionBudget},
		{apierrors.IsForbidden, nodereport.ErrMayNotEvict},
		{apierrors.IsInvalid, nodereport.ErrMayNotEvict}, // An admission policy.
		{apierrors.IsNotFound, nodereport.ErrPodGone}, {apierrors.IsConflict, nodereport.ErrPodGone},
	} {
		if err != nil && known.is(err) {
			return fmt.Errorf("%w: %w", known.meaning, err)
		}
	}
	return err
}
