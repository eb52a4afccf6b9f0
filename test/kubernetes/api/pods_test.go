package api

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/internal/policy"
)

// testPods: the pods of the node are seen, with the right of their own, and no
// others.
func testPods(t *testing.T, s *server) {
	s.createRole("virgate-pods", "clusterrole-pods.yaml")
	s.bind("virgate-pods", "virgate-pods", user("virgate"))
	t.Cleanup(func() {
		_ = s.admin.RbacV1().ClusterRoleBindings().Delete(context.Background(), "virgate-pods", metav1.DeleteOptions{})
	})

	count := &counter{}
	api, err := policy.NewAPI(count.into(s.config(virgateToken)))
	s.must(err)
	pods := policy.NewPods(api, "n1", slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- pods.Watch(ctx, func() {}) }()
	defer func() {
		cancel()
		s.must(<-ended)
	}()
	for _, node := range []string{"n1", "n2"} {
		pod, err := s.admin.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "on-" + node},
			Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{})
		s.must(err)
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", ContainerID: "containerd://" + node}}
		_, err = s.admin.CoreV1().Pods("default").UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
		s.must(err)
	}
	await(t, 30*time.Second, "the pod's container", func() bool {
		containers, err := pods.Containers()
		return err == nil && len(containers) == 1 && containers[0].Pod == "on-n1" && containers[0].ID == "containerd://n1"
	})
	for _, request := range count.seen() {
		if !strings.Contains(request, "fieldSelector=spec.nodeName%3Dn1") {
			t.Errorf("%s is for pods of other nodes", request)
		}
	}
}
