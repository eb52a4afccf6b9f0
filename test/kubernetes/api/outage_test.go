package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testCutOff: a node without a network keeps its profile, and catches up from
// where it was: with one watch more of each object, and no list. (It sees what
// happened meanwhile in its order, so a choice that was right for a while can be
// in force for a moment.)
func testCutOff(t *testing.T, s *server) {
	two, four := document("2"), document("4")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two, "b": four})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")

	f.setCut(true)
	s.setProfiles(map[string]string{"a": four, "b": two})
	f.setCut(false)
	f.awaits(t, is(t, "a", four), "")
	if lists := lists(f.seen()); lists != 2 {
		t.Errorf("%d lists, want 2: %q", lists, f.seen())
	}
	if history := f.history(); !slices.Equal(history, []string{is(t, "a", two), is(t, "a", four)}) {
		t.Errorf("applied %q", history)
	}
}

// testServerRestarts: without an API server nothing changes. One that starts
// anew has forgotten the versions that the node knows (410), so the node lists
// once more; it never asks in vain at a rate that grows with time.
func testServerRestarts(t *testing.T, s *server) {
	two, four := document("2"), document("4")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")

	s.stop()
	f.setCut(true) // It must not see the new server before all has changed.
	s.start()
	for i := range 5 { // Others write as well.
		_, err := s.admin.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("other-", i)}}, metav1.CreateOptions{})
		s.must(err)
	}
	s.removeNode("n1")
	s.setNode("n1", "b")
	s.setProfiles(map[string]string{"b": four})
	s.stop()
	s.start()
	if history := f.history(); len(history) != 1 {
		t.Errorf("applied %q while there was no server", history)
	}
	f.setCut(false)
	f.awaits(t, is(t, "b", four), "")
	if history := f.history(); len(history) != 2 {
		t.Errorf("applied %q, want what was and what is", history)
	}
	t.Logf("%d requests, %d of them lists, %d answered with 410", len(f.seen()), lists(f.seen()), f.answered(http.StatusGone))
	if lists := lists(f.seen()); lists < 3 || lists > 6 {
		t.Errorf("%d lists, want those of the start and one more of each object whose versions are forgotten: %q", lists, f.seen())
	}
}

func lists(requests []string) int {
	count := 0
	for _, request := range requests {
		if !strings.Contains(request, "watch=true") {
			count++
		}
	}
	return count
}
