package api

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testRightsTaken: a node whose rights are taken while it watches keeps its
// profile, says why, and follows when it has them again.
func testRightsTaken(t *testing.T, s *server) {
	two, four := document("2"), document("4")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")

	bindings := s.admin.RbacV1().RoleBindings(namespace)
	binding, err := bindings.Get(t.Context(), "virgate", metav1.GetOptions{})
	s.must(err)
	s.must(bindings.Delete(t.Context(), "virgate", metav1.DeleteOptions{}))
	f.setCut(true) // The server asks for rights when a watch begins.
	f.setCut(false)
	s.await(startTimeout, "the refusal", func() bool { return f.answered(403) > 0 })
	s.setProfiles(map[string]string{"a": four})
	s.setNode("n1", "b") // Of the Node it may still hear.
	f.awaits(t, is(t, "a", two), `wants "b": it holds a`)
	s.setNode("n1", "a")
	binding.ResourceVersion, binding.UID = "", ""
	_, err = bindings.Create(t.Context(), binding, metav1.CreateOptions{})
	s.must(err)
	f.awaits(t, is(t, "a", four), "")
	if history := f.history(); len(history) != 2 {
		t.Errorf("applied %q", history)
	}
}
