package policy

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/configs"
)

func fakePod(uid, name string, ids map[string]string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name, UID: types.UID(uid)}}
	for container, id := range ids {
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, corev1.ContainerStatus{Name: container, ContainerID: id})
	}
	return pod
}

func TestPods(t *testing.T) {
	server := newFakeServer()
	pods := newPods("n1", func(what string, into sink) *feed {
		return server.feed(what, into, slog.New(slog.DiscardHandler))
	})
	server.setAway(errors.New("forbidden"))
	changes := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- pods.Watch(ctx, func() { changes <- struct{}{} }) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	await := func(want ...Container) {
		t.Helper()
		for {
			select {
			case <-changes:
			case <-time.After(30 * time.Second):
				got, err := pods.Containers()
				t.Fatalf("got %v, %v; want %v", got, err, want)
			}
			if got, err := pods.Containers(); err == nil && len(got) == len(want) && (len(want) == 0 || cmp.Equal(got, want)) {
				return
			}
		}
	}
	<-changes
	if _, err := pods.Containers(); !errors.Is(err, configs.ErrPending) || err.Error() != "pods of node n1: not known yet: list pods of node n1: forbidden" {
		t.Errorf("before the pods are known: %v", err)
	}
	server.setAway(nil)
	await()
	server.change("p", fakePod("1", "p", map[string]string{"waits": ""}))
	server.change("q", fakePod("2", "q", map[string]string{"y": "c://2y", "x": "c://2x"}))
	await(Container{"a", "q", "2", "x", "c://2x"}, Container{"a", "q", "2", "y", "c://2y"})
	server.change("p", fakePod("1", "p", map[string]string{"waits": "c://1"}))
	await(Container{"a", "p", "1", "waits", "c://1"}, Container{"a", "q", "2", "x", "c://2x"}, Container{"a", "q", "2", "y", "c://2y"})
	server.change("q", nil)
	await(Container{"a", "p", "1", "waits", "c://1"})

	// Another pod of the same name, while nobody watches.
	server.setAway(errors.New("refused"))
	server.change("p", nil)
	server.change("p", fakePod("3", "p", map[string]string{"waits": "c://3"}))
	server.expire()
	lost := func() bool {
		got, err := pods.Containers()
		return len(got) == 1 && got[0].ID == "c://1" && err != nil && strings.Contains(err.Error(), "as last seen: ") && strings.Contains(err.Error(), "refused")
	}
	for late := time.After(30 * time.Second); !lost(); {
		select {
		case <-changes:
		case <-late:
			got, err := pods.Containers()
			t.Fatalf("got %v, %v when the right to them is gone", got, err)
		}
	}
	server.setAway(nil)
	await(Container{"a", "p", "3", "waits", "c://3"})
}
