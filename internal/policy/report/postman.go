package report

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// postman writes the events of the queue.
type postman struct {
	queue  *queue
	client client
	log    *slog.Logger
}

// forget keeps events: they are about a name, not about an object that is gone.
func (*postman) forget() {}

func (p *postman) write(ctx context.Context) (again time.Duration, err error) {
	if dropped := p.queue.takeDropped(); dropped > 0 {
		p.log.Warn("events never written", "count", dropped)
	}
	for {
		s, after, ok := p.queue.take(time.Now())
		if !ok {
			return after, nil
		}
		if s.created {
			err = p.client.patchEvent(ctx, s.name, map[string]any{"count": s.count, "lastTimestamp": metav1.NewTime(s.last)})
		} else {
			err = p.client.createEvent(ctx, eventOf(s, p.client.node))
		}
		lost := s.created && apierrors.IsNotFound(err)
		switch {
		case err == nil, lost:
		case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			// It will be refused each time, and others wait behind it.
			p.log.Error("event refused", "error", err)
		default:
			return 0, err
		}
		p.queue.written(s, time.Now(), lost)
	}
}

// eventOf is the Event of a series. Events about a Node lie in the namespace
// "default", and name it as the kubelet does, by its name also where a UID
// belongs: kubectl describe looks for both.
func eventOf(s series, node string) *corev1.Event {
	return &corev1.Event{
		TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta:     metav1.ObjectMeta{Name: s.name, Namespace: metav1.NamespaceDefault},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)},
		Type:           s.kind, Reason: s.reason, Message: s.message,
		Count: s.count, FirstTimestamp: metav1.NewTime(s.first), LastTimestamp: metav1.NewTime(s.last),
		Source:              corev1.EventSource{Component: manager, Host: node},
		ReportingController: manager, ReportingInstance: node,
	}
}

// eventName makes a name that no other event has: by the time, and by chance
// for nodes that do so at the same time.
func eventName(now time.Time) string {
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails, says its documentation
	return manager + "." + strconv.FormatInt(now.UnixNano(), 16) + "." + hex.EncodeToString(random[:])
}
