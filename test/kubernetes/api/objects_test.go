package api

import (
	"encoding/json"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

func (s *server) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// setNode makes or labels a Node; "" takes the label away.
func (s *server) setNode(name, profile string) {
	s.t.Helper()
	nodes := s.admin.CoreV1().Nodes()
	if _, err := nodes.Get(s.t.Context(), name, metav1.GetOptions{}); err != nil {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
		if profile != "" {
			node.Labels[label] = profile
		}
		_, err := nodes.Create(s.t.Context(), node, metav1.CreateOptions{})
		s.must(err)
		return
	}
	var value any
	if profile != "" {
		value = profile
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{label: value}}})
	s.must(err)
	_, err = nodes.Patch(s.t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	s.must(err)
}

func (s *server) removeNode(name string) {
	s.t.Helper()
	s.must(s.admin.CoreV1().Nodes().Delete(s.t.Context(), name, metav1.DeleteOptions{}))
}

// setProfiles makes the ConfigMap hold exactly the documents.
func (s *server) setProfiles(documents map[string]string) {
	s.t.Helper()
	maps := s.admin.CoreV1().ConfigMaps(namespace)
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: configMap}, Data: documents}
	if _, err := maps.Update(s.t.Context(), object, metav1.UpdateOptions{}); err != nil {
		_, err = maps.Create(s.t.Context(), object, metav1.CreateOptions{})
		s.must(err)
	}
}

func (s *server) removeProfiles() {
	s.t.Helper()
	s.must(s.admin.CoreV1().ConfigMaps(namespace).Delete(s.t.Context(), configMap, metav1.DeleteOptions{}))
}

// allow gives the user virgate what the chart gives it.
func (s *server) allow() {
	s.t.Helper()
	_, err := s.admin.CoreV1().Namespaces().Create(s.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	s.must(err)
	s.createRole("virgate", "clusterrole.yaml")
	s.bind("virgate", "virgate", user("virgate"))
	access := s.admin.RbacV1()
	_, err = access.Roles(namespace).Create(s.t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "virgate"},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{configMap},
			Verbs: []string{"get", "list", "watch"},
		}},
	}, metav1.CreateOptions{})
	s.must(err)
	_, err = access.RoleBindings(namespace).Create(s.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "virgate"}, Subjects: []rbacv1.Subject{user("virgate")},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "virgate"},
	}, metav1.CreateOptions{})
	s.must(err)
}

// createRole creates the ClusterRole that a file of the chart has.
func (s *server) createRole(name, file string) {
	s.t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}}
	data, err := os.ReadFile("../../../charts/virgate/files/" + file)
	s.must(err)
	s.must(yaml.UnmarshalStrict(data, role))
	_, err = s.admin.RbacV1().ClusterRoles().Create(s.t.Context(), role, metav1.CreateOptions{})
	s.must(err)
}

// bind gives the ClusterRole to somebody, by a binding of that name.
func (s *server) bind(name, role string, subject rbacv1.Subject) {
	s.t.Helper()
	_, err := s.admin.RbacV1().ClusterRoleBindings().Create(s.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Subjects: []rbacv1.Subject{subject},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
	}, metav1.CreateOptions{})
	s.must(err)
}

func user(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: name}
}

// reset takes away what tests made.
func (s *server) reset() {
	s.t.Helper()
	all := metav1.ListOptions{}
	s.must(s.admin.CoreV1().Nodes().DeleteCollection(s.t.Context(), metav1.DeleteOptions{}, all))
	s.must(s.admin.CoreV1().ConfigMaps(namespace).DeleteCollection(s.t.Context(), metav1.DeleteOptions{}, all))
}

// cluster starts a server where the user virgate may do what it may.
func cluster(t *testing.T) *server {
	t.Helper()
	s := startServer(t)
	s.allow()
	return s
}
