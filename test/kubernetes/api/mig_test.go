package api

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
	"github.com/virgate/virgate/internal/simkubelet"
)

// setLayout puts mig-manager's label on the Node.
func (s *server) setLayout(name, layout string) {
	s.t.Helper()
	_, err := s.admin.CoreV1().Nodes().Patch(s.t.Context(), name, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+policy.MIGLabel+`":"`+layout+`"}}}`), metav1.PatchOptions{})
	s.must(err)
}

// testMIGLabel has mig-manager's label choose how the node's board is cut, and
// its other label say how that went. At rest the program asks nothing of the API
// server, and a Node that was made anew has all that the old one had.
func testMIGLabel(t *testing.T, s *server) {
	const small, big = "nvidia.com/mig-1g.6gb", "nvidia.com/mig-2g.12gb"
	s.setProfiles(map[string]string{"a": "flags: {migStrategy: mixed}\nmig: {manage: true, config: all-1g.6gb}\n"})
	s.setNode("cut", "a")
	p := s.run(t, "cut", "a30+all-2g.12gb")
	defer func() {
		if t.Failed() {
			t.Logf("labels %v, requests %q, events %q", s.node("cut").Labels, p.seen(), s.told("cut", ""))
		}
	}()
	says := func(state, layout string) bool {
		labels := s.node("cut").Labels
		return labels[report.StateLabel] == state && labels[report.MIGStateLabel] == layout
	}
	s.await(startTimeout, "the profile's layout", func() bool { return says("applied", "success") && p.offers(small, 4) })
	generation := func() string { return s.node("cut").Annotations[report.GenerationAnnotation] }
	first := generation()

	s.setLayout("cut", "all-2g.12gb")
	s.await(startTimeout, "the label's layout", func() bool {
		return says("applied", "success") && p.offers(big, 2) && p.offers(small, 0) && generation() != first
	})
	s.await(startTimeout, "its event", func() bool {
		return slices.ContainsFunc(s.told("cut", report.MIGApplied), func(m string) bool { return strings.Contains(m, "layout all-2g.12gb") })
	})

	// A pod is in the way: nothing is taken from it.
	pod, err := p.kubelet.AddPod(t.Context(), simkubelet.Pod{
		Namespace: "default", Name: "holder", Containers: []simkubelet.Container{{Name: "c", Requests: map[string]int{big: 1}}},
	})
	if err != nil {
		t.Fatal(pod, err)
	}
	s.setLayout("cut", "all-1g.6gb")
	s.await(startTimeout, "the label's layout to wait", func() bool {
		return says("applied", "pending") && len(s.told("cut", report.MIGBlocked)) == 1 && p.offers(small, 2)
	})
	s.must(p.kubelet.DeletePod("default", "holder"))
	s.await(startTimeout, "the label's layout", func() bool { return says("applied", "success") && p.offers(small, 4) })

	// A name that is none.
	s.setLayout("cut", "all-3g.1gb")
	s.await(startTimeout, "the refusal", func() bool { return says("rejected", "failed") && len(s.told("cut", report.ProfileRejected)) == 1 })
	for _, part := range []string{"ConfigMap gpu/profiles[a]", policy.MIGLabel, `"all-3g.1gb"`} {
		if got := s.told("cut", report.ProfileRejected)[0]; !strings.Contains(got, part) {
			t.Errorf("%q does not name %s", got, part)
		}
	}
	if !p.offers(small, 4) {
		t.Error("the last good layout is gone")
	}
	s.setLayout("cut", "all-1g.6gb")
	s.await(startTimeout, "the label's layout", func() bool { return says("applied", "success") })

	p.rests(t)
	s.removeNode("cut")
	s.must(func() error {
		_, err := s.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "cut", Labels: map[string]string{label: "a", policy.MIGLabel: "all-1g.6gb"}},
		}, metav1.CreateOptions{})
		return err
	}())
	began := time.Now()
	s.await(startTimeout, "the new Node to say it", func() bool {
		return says("applied", "success") && s.says("cut", first, "applied", "Serving")
	})
	t.Logf("a Node made anew had everything after %s", time.Since(began).Round(time.Millisecond))
	p.rests(t)

	watched := 0
	for _, request := range p.seen() {
		if strings.HasPrefix(request, "GET") && strings.Contains(request, "fieldSelector") {
			watched++
		}
	}
	if watched != 4 {
		t.Errorf("%d lists and watches, want those of the start: %q", watched, p.seen())
	}
	if found := p.kubelet.Violations(); found != nil {
		t.Errorf("the kubelet could have died: %q", found)
	}
}

// rests waits until the program has told everything, and then that it asks
// nothing any more.
func (p *program) rests(t *testing.T) {
	t.Helper()
	const rest = 10 * time.Second
	last, since := len(p.seen()), time.Now()
	await(t, startTimeout, "a rest", func() bool {
		if now := len(p.seen()); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > rest
	})
}
