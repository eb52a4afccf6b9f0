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

// NewEvictor makes an evictor, which asks nothing of the API before Evict.
func NewEvictor(config *rest.Config, node string) (*Evictor, error) {
	client, err := connect(config, node, 15*time.Second)
	return &Evictor{client}, err
}

// Evict deletes the pod of that name, if its UID is that and PodDisruptionBudgets let it be evicted, with the pod's
// grace period. An error is one of nodereport's where it is one of those.
//
// An eviction does both at once, but an admission policy cannot see on which node its pod runs. So it is a dry run
// here, and an eviction between the two requests can use the budget up: one pod more than it allows.
func (e *Evictor) Evict(ctx context.Context, namespace, pod, uid string) error {
	eviction := policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"},
		ObjectMeta:    metav1.ObjectMeta{Namespace: namespace, Name: pod},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: new(types.UID(uid))}},
	}
	request := e.client.rest.Post().Namespace(namespace).Resource("pods").Name(pod).SubResource("eviction").
		Param("dryRun", metav1.DryRunAll).SetHeader("Content-Type", runtime.ContentTypeJSON)
	err := e.client.send(ctx, "ask to evict pod "+namespace+"/"+pod, request, eviction)
	if err == nil {
		err = e.client.delete(ctx, types.UID(uid), "/api/v1/namespaces", namespace, "pods", pod)
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
		{apierrors.IsNotFound, nodereport.ErrPodGone}, {apierrors.IsConflict, nodereport.ErrPodGone},
	} {
		if err != nil && known.is(err) {
			return fmt.Errorf("%w: %w", known.meaning, err)
		}
	}
	return err
}
