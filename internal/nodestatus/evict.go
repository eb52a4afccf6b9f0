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

// Evict asks the API server to evict the pod of that name, if its UID is that. PodDisruptionBudgets
// are the API server's to keep. An error is one of nodereport's where it is one of those.
func (e *Evictor) Evict(ctx context.Context, namespace, pod, uid string) error {
	eviction := policyv1.Eviction{
		TypeMeta:      metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"},
		ObjectMeta:    metav1.ObjectMeta{Namespace: namespace, Name: pod},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: new(types.UID(uid))}},
	}
	request := e.client.rest.Post().Namespace(namespace).Resource("pods").Name(pod).SubResource("eviction").SetHeader("Content-Type", runtime.ContentTypeJSON)
	err := e.client.send(ctx, "evict pod "+namespace+"/"+pod, request, eviction)
	for _, known := range []struct {
		is      func(error) bool
		meaning error
	}{
		{apierrors.IsTooManyRequests, nodereport.ErrDisruptionBudget}, {apierrors.IsForbidden, nodereport.ErrMayNotEvict},
		{apierrors.IsNotFound, nodereport.ErrPodGone}, {apierrors.IsConflict, nodereport.ErrPodGone},
	} {
		if err != nil && known.is(err) {
			return fmt.Errorf("%w: %w", known.meaning, err)
		}
	}
	return err
}
