package policy

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
)

// Pods are the pods of one node as the API server has them. They cost a third
// watch, whose traffic grows with the node's pods, and a right of its own; so
// nothing uses them unasked.
type Pods struct {
	what    string
	feed    *feed
	changed func()
	// pods has the containers of each pod; only the feed touches it.
	pods map[types.UID][]Container
	seen atomic.Pointer[[]Container]
	// trouble says why they cannot be followed.
	trouble atomic.Pointer[error]
}

// Container is a container of a pod that runs, or has run.
type Container struct {
	Namespace, Pod string
	// UID is the pod's.
	UID string
	// Name is the container's in its pod, init containers included.
	Name string
	// ID is the runtime's: "containerd://5d41…".
	ID string
}

// NewPods makes the Pods of the named Node; Watch reads them.
func NewPods(api *API, node string, log *slog.Logger) *Pods {
	selector := fields.OneTermEqualSelector("spec.nodeName", node).String()
	return newPods(node, func(what string, into sink) *feed {
		return api.objects(what, "pods", "", selector, into, log)
	})
}

func newPods(node string, open func(what string, into sink) *feed) *Pods {
	p := &Pods{what: "pods of node " + node, pods: map[types.UID][]Container{}}
	p.feed = open(p.what, p)
	return p
}

// Watch follows the pods until ctx ends, and calls changed, from one goroutine,
// whenever Containers would return something else, be it another error.
func (p *Pods) Watch(ctx context.Context, changed func()) error {
	p.changed = changed
	p.feed.run(ctx)
	return nil
}

// Containers returns the containers that have an ID, by namespace, pod and name.
// The error is configs.ErrPending before the pods have been read, and they are
// nil then. Another error says why they are not followed now, as when the right
// to them was taken away; they are as last seen then.
func (p *Pods) Containers() ([]Container, error) {
	var trouble error
	if why := p.trouble.Load(); why != nil {
		trouble = *why
	}
	seen := p.seen.Load()
	switch {
	case seen != nil && trouble != nil:
		return *seen, fmt.Errorf("%s: as last seen: %w", p.what, trouble)
	case seen != nil:
		return *seen, nil
	case trouble != nil:
		return nil, fmt.Errorf("%s: %w: %w", p.what, configs.ErrPending, trouble)
	}
	return nil, fmt.Errorf("%s: %w", p.what, configs.ErrPending)
}

func (p *Pods) replace(objects []runtime.Object) {
	clear(p.pods)
	for _, object := range objects {
		p.take(object)
	}
	p.publish()
}

func (p *Pods) put(object runtime.Object) {
	p.take(object)
	p.publish()
}

func (p *Pods) remove(object runtime.Object) {
	if pod, ok := object.(*corev1.Pod); ok {
		delete(p.pods, pod.UID)
		p.publish()
	}
}

func (p *Pods) fail(err error) {
	if said := p.trouble.Swap(&err); message(err) != message(*cmp.Or(said, new(error))) {
		p.changed()
	}
}

// message is the error's text, "" of none.
func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// take keeps what is wanted of a pod and lets go of the rest.
func (p *Pods) take(object runtime.Object) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return
	}
	var containers []Container
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if status.ContainerID != "" {
			containers = append(containers, Container{
				Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID), Name: status.Name, ID: status.ContainerID,
			})
		}
	}
	p.pods[pod.UID] = containers
}

func (p *Pods) publish() {
	all := []Container{}
	for _, containers := range p.pods {
		all = append(all, containers...)
	}
	slices.SortFunc(all, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID), cmp.Compare(a.UID, b.UID))
	})
	if last := p.seen.Load(); last != nil && slices.Equal(*last, all) {
		return
	}
	p.seen.Store(&all)
	p.changed()
}
