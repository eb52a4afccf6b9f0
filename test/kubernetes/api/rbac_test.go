package api

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/virgate/virgate/configs"
)

// testRefused: who may read nothing gets no profile, and is told what is
// missing.
func testRefused(t *testing.T, s *server) {
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": document("2")})
	f := s.follow(t, "n1", strangerToken, nil)
	f.awaits(t, "", `node n1: not known yet: list node n1: nodes "n1" is forbidden: User "stranger" cannot list resource "nodes"`)
	if _, err := f.policy.Profile(); !errors.Is(err, configs.ErrPending) {
		t.Errorf("%v is not pending", err)
	}
}

// testAllowed: the chart's rights are those that are needed, and no more.
func testAllowed(t *testing.T, s *server) {
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": document("2")})
	virgate, err := kubernetes.NewForConfig(s.config(virgateToken))
	if err != nil {
		t.Fatal(err)
	}
	core, options := virgate.CoreV1(), metav1.ListOptions{}
	patch := []byte(`{"metadata":{"labels":{"nvidia.com/device-plugin.config.state":"applied"}}}`)
	status := []byte(`{"status":{"conditions":[{"type":"GPUSharingReady","status":"True"}]}}`)
	for _, test := range []struct {
		name    string
		allowed bool
		do      func(context.Context) error
	}{
		{"patch its node", true, func(ctx context.Context) error {
			_, err := core.Nodes().Patch(ctx, "n1", types.MergePatchType, patch, metav1.PatchOptions{})
			return err
		}},
		{"patch its node's status", true, func(ctx context.Context) error {
			_, err := core.Nodes().Patch(ctx, "n1", types.StrategicMergePatchType, status, metav1.PatchOptions{}, "status")
			return err
		}},
		{"create an event", true, func(ctx context.Context) error {
			_, err := core.Events("default").Create(ctx, &corev1.Event{
				ObjectMeta: metav1.ObjectMeta{Name: "n1.1"}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "n1"},
			}, metav1.CreateOptions{})
			return err
		}},
		{"update a node", false, func(ctx context.Context) error {
			_, err := core.Nodes().Update(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.UpdateOptions{})
			return err
		}},
		{"delete a node", false, func(ctx context.Context) error { return core.Nodes().Delete(ctx, "n1", metav1.DeleteOptions{}) }},
		{"list the namespace's ConfigMaps", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).List(ctx, options)
			return err
		}},
		{"read another ConfigMap", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps("kube-system").Get(ctx, "x", metav1.GetOptions{})
			return err
		}},
		{"write the ConfigMap", false, func(ctx context.Context) error {
			_, err := core.ConfigMaps(namespace).Patch(ctx, configMap, types.MergePatchType, []byte(`{"data":{"b":""}}`), metav1.PatchOptions{})
			return err
		}},
		{"list secrets", false, func(ctx context.Context) error { _, err := core.Secrets(namespace).List(ctx, options); return err }},
		{"list pods", false, func(ctx context.Context) error { _, err := core.Pods("").List(ctx, options); return err }},
	} {
		if err := test.do(t.Context()); (err == nil) != test.allowed || err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s: allowed %v, got %v", test.name, test.allowed, err)
		}
	}
}
