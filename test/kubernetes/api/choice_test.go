package api

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/repeat"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// testChoice makes an operator's changes to a node, one after another.
func testChoice(t *testing.T, s *server) {
	two, four, ten := document("2"), document("4"), document("10")
	f := s.follow(t, "n1", virgateToken, func(n *configsource.NodeSource) { n.Default = "two" })

	// Neither the Node nor the ConfigMap exists.
	f.awaits(t, "", "node n1: not there")
	s.setNode("n1", "four")
	f.awaits(t, "", "ConfigMap gpu/profiles: not there")
	s.setProfiles(map[string]string{"two": two, "four": four, "broken": document("0")})
	f.awaits(t, is(t, "four", four), "")
	if first := f.history(); !slices.Equal(first, []string{is(t, "four", four)}) {
		t.Errorf("applied %q, want what the label says and never the default", first)
	}

	// The label changes, is removed, and names a missing profile.
	s.setNode("n1", "two")
	f.awaits(t, is(t, "two", two), "")
	s.setNode("n1", "four")
	f.awaits(t, is(t, "four", four), "")
	s.setNode("n1", "")
	f.awaits(t, is(t, "two", two), "")
	s.setNode("n1", "gone")
	f.awaits(t, is(t, "two", two), `ConfigMap gpu/profiles: the node label nvidia.com/device-plugin.config names "gone", which does not exist: the profiles are broken, four, two`)

	// Edits: the missing name is added, content changes, one is broken.
	s.setProfiles(map[string]string{"two": two, "four": four, "gone": ten})
	f.awaits(t, is(t, "gone", ten), "")
	s.setProfiles(map[string]string{"two": two, "four": four, "gone": four})
	f.awaits(t, is(t, "gone", four), "")
	s.setProfiles(map[string]string{"two": two, "gone": document("0")})
	f.awaits(t, is(t, "gone", four), "ConfigMap gpu/profiles[gone]:2: sharing.timeSlicing.resources[0].replicas: expected 1 or more (got 0)")
	s.setProfiles(map[string]string{"two": two, "gone": "flags: {nvidiaDriverRoot: /other}\n"})
	f.awaits(t, is(t, "gone", four), "ConfigMap gpu/profiles[gone]: flags.nvidiaDriverRoot: cannot change while the program runs (is /, wanted /other)")

	// The key in use is removed from the ConfigMap, then the Node gets another label.
	s.setProfiles(map[string]string{"two": two, "four": four})
	f.awaits(t, is(t, "gone", four), `names "gone"`)
	s.setNode("n1", "two")
	f.awaits(t, is(t, "two", two), "")

	// The ConfigMap and the Node go and come back.
	s.removeProfiles()
	f.awaits(t, is(t, "two", two), "ConfigMap gpu/profiles: not there")
	s.setProfiles(map[string]string{"two": ten, "four": four})
	f.awaits(t, is(t, "two", ten), "")
	s.removeNode("n1")
	f.awaits(t, is(t, "two", ten), "node n1: not there")
	s.setNode("n1", "four")
	f.awaits(t, is(t, "four", four), "")

	// All of this took one list and one watch of each object.
	f.expectReasons(t)
	requests := f.seen()
	if answers := len(f.answers()); answers != 4 {
		t.Errorf("%d answers, want 4: %q", answers, requests)
	}
	for _, request := range requests {
		if !strings.Contains(request, "fieldSelector=metadata.name%3Dn1") && !strings.Contains(request, "fieldSelector=metadata.name%3Dprofiles") {
			t.Errorf("%s is for more than one object", request)
		}
	}
	t.Logf("%d changes of the profile cost %d requests, %d bytes read, %d written", len(f.history()), len(requests), f.read.Load(), f.written.Load())
}

// testNoLabel checks that without a node name the label is ignored.
func testNoLabel(t *testing.T, s *server) {
	s.setProfiles(map[string]string{"default": document("4")})
	f := s.follow(t, "n1", virgateToken, func(n *configsource.NodeSource) {
		n.Labels, n.Fallbacks = nil, []configsource.Fallback{configsource.FallbackNamed}
	})
	f.awaits(t, is(t, "default", document("4")), "")
	f.awaitWatches(t, 1)
	if answers := len(f.answers()); answers != 2 {
		t.Errorf("%d answers without a label, want 2: %q", answers, f.seen())
	}
}

// writeKey makes the key that an API server signs service-account tokens with.
func writeKey(t *testing.T, path string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	data, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: data})))
}

// testListLimit checks that the largest number of devices that a profile can ask for is served. One replica
// more is refused before anything changes: the kubelet would drop the list and show no device at all.
func testListLimit(t *testing.T, s *server) {
	const gpus, most = 16, 2457
	s.setNode("limit", "a")
	s.setProfiles(map[string]string{"a": document(strconv.Itoa(most))})
	p := s.run(t, "limit", "t4x16", nil)
	const gpu = "nvidia.com/gpu"
	s.await("the longest list", func() bool {
		return p.offers(gpu, gpus*most) && s.node("limit").Labels[nodestatus.StateLabel] == "applied"
	})
	generation := s.node("limit").Annotations[nodestatus.GenerationAnnotation]
	before := p.kubelet.Snapshot().Resources[gpu]

	s.setProfiles(map[string]string{"a": document(strconv.Itoa(most + 1))})
	s.await("the refusal", func() bool {
		return s.says("limit", generation, "rejected", "ProfileRejected") && len(s.told("limit", nodestatus.ReasonProfileRejected)) == 1
	})
	told := s.told("limit", nodestatus.ReasonProfileRejected)[0]
	for _, part := range []string{"ConfigMap gpu/profiles[a]", "sharing.timeSlicing.resources[0].replicas", "4 MiB", "write at most 2457", "(got 2458)"} {
		if !strings.Contains(told, part) {
			t.Errorf("%q does not say %s", told, part)
		}
	}
	after := p.kubelet.Snapshot().Resources[gpu]
	if after.StreamsOpened != 1 || after.Registrations != 1 || !reflect.DeepEqual(before.Devices, after.Devices) {
		t.Errorf("%d streams, %d registrations, %d devices; want nothing changed", after.StreamsOpened, after.Registrations, len(after.Devices))
	}
	if violations := p.kubelet.Violations(); len(violations) > 0 {
		t.Error(violations)
	}
}

// setLayout puts mig-manager's label on the Node.
func (s *server) setLayout(name, layout string) {
	s.t.Helper()
	_, err := s.admin.CoreV1().Nodes().Patch(s.t.Context(), name, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+configsource.MIGLabel+`":"`+layout+`"}}}`), metav1.PatchOptions{})
	s.must(err)
}

// testMIGLabel has mig-manager's label choose the node's MIG layout, and its other label report the result.
// At rest the program sends no requests to the API server. A Node that was created anew gets all that the
// old one had.
func testMIGLabel(t *testing.T, s *server) {
	const small, big = "nvidia.com/mig-1g.6gb", "nvidia.com/mig-2g.12gb"
	s.setProfiles(map[string]string{"a": "flags: {migStrategy: mixed}\nmig: {manage: true, config: all-1g.6gb}\n"})
	s.setNode("cut", "a")
	p := s.run(t, "cut", "a30+all-2g.12gb", nil)
	defer func() {
		if t.Failed() {
			t.Logf("labels %v, requests %q, events %q", s.node("cut").Labels, p.seen(), s.told("cut", ""))
		}
	}()
	says := func(state, layout string) bool {
		labels := s.node("cut").Labels
		return labels[nodestatus.StateLabel] == state && labels[nodestatus.MIGStateLabel] == layout
	}
	s.await("the profile's layout", func() bool { return says("applied", "success") && p.offers(small, 4) })
	generation := func() string { return s.node("cut").Annotations[nodestatus.GenerationAnnotation] }
	first := generation()

	s.setLayout("cut", "all-2g.12gb")
	s.await("the label's layout", func() bool {
		return says("applied", "success") && p.offers(big, 2) && p.offers(small, 0) && generation() != first
	})
	s.await("its event", func() bool {
		return slices.ContainsFunc(s.told("cut", nodestatus.ReasonMIGApplied), func(m string) bool { return strings.Contains(m, "layout all-2g.12gb") })
	})

	// A pod is in the way: nothing is taken from it.
	pod, err := p.kubelet.AddPod(t.Context(), simkubelet.Pod{
		Namespace: "default", Name: "holder", Containers: []simkubelet.Container{{Name: "c", Requests: map[string]int{big: 1}}},
	})
	if err != nil {
		t.Fatal(pod, err)
	}
	s.setLayout("cut", "all-1g.6gb")
	s.await("the label's layout to wait", func() bool {
		return says("switching", "pending") && len(s.told("cut", nodestatus.ReasonMIGBlocked)) == 1 && p.offers(small, 2)
	})
	s.must(p.kubelet.DeletePod("default", "holder"))
	s.await("the label's layout", func() bool { return says("applied", "success") && p.offers(small, 4) })

	// A name that does not exist.
	s.setLayout("cut", "all-thirds")
	s.await("the refusal", func() bool {
		return says("rejected", "failed") && len(s.told("cut", nodestatus.ReasonProfileRejected)) == 1
	})
	for _, part := range []string{"ConfigMap gpu/profiles[a]", configsource.MIGLabel, `"all-thirds"`} {
		if got := s.told("cut", nodestatus.ReasonProfileRejected)[0]; !strings.Contains(got, part) {
			t.Errorf("%q does not name %s", got, part)
		}
	}
	if !p.offers(small, 4) {
		t.Error("the last good layout is gone")
	}
	// The node's GPU cannot have this layout, so it stays as it is.
	s.setLayout("cut", "all-3g.1gb")
	s.await("the layout to fail", func() bool {
		return says("applied", "failed") && slices.ContainsFunc(s.told("cut", nodestatus.ReasonMIGFailed), func(m string) bool { return strings.Contains(m, "3g.1gb") })
	})
	if !p.offers(small, 4) {
		t.Error("the GPU is not as it was")
	}
	s.setLayout("cut", "all-1g.6gb")
	s.await("the label's layout", func() bool { return says("applied", "success") })

	p.rests(t)
	s.removeNode("cut")
	s.must(func() error {
		_, err := s.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "cut", Labels: map[string]string{label: "a", configsource.MIGLabel: "all-1g.6gb"}},
		}, metav1.CreateOptions{})
		return err
	}())
	began := time.Now()
	s.await("the new Node to say it", func() bool {
		return says("applied", "success") && s.says("cut", first, "applied", "Serving")
	})
	t.Logf("a Node made anew had everything after %s", since(began))
	p.rests(t)

	p.expectReasons(t)
	if watched := len(p.answers()); watched != 4 {
		t.Errorf("%d lists and watches, want those of the start: %q", watched, p.seen())
	}
	if found := p.kubelet.Violations(); found != nil {
		t.Errorf("the kubelet could have died: %q", found)
	}
}

// rests waits until the program has reported everything, and then checks that it sends no requests and gets
// no more answers for this many looks in a row. A slow machine only makes this take longer.
func (p *program) rests(t *testing.T) {
	t.Helper()
	looks := repeat.Times(40, 200) // 50 ms apart: 2 s, or 10 s
	last, quiet := 0, 0
	await.True(t, "a rest", func() bool {
		requests := p.made()
		now := len(requests)
		for _, r := range requests {
			if r.answer != 0 {
				now++
			}
		}
		if quiet++; now != last {
			last, quiet = now, 0
		}
		return quiet >= looks
	})
}

// firstSecond is how old a watch must be to resume after a cut: client-go's Reflector takes a watch that
// has brought nothing in its first second for broken, and lists again.
const firstSecond = 1100 * time.Millisecond

// awaitWatches waits until this many watches have been answered and are older than firstSecond.
func (c *counter) awaitWatches(t *testing.T, count int) {
	t.Helper()
	await.True(t, "the watches to begin", func() bool { return watches(c.answers()) >= count })
	pass(firstSecond)
}

// watches counts the watches among the requests.
func watches(requests []request) int {
	count := 0
	for _, r := range requests {
		if r.watch() {
			count++
		}
	}
	return count
}

// testCutOff checks that a node without a network keeps its profile, and then resumes where it was: with
// one more watch of each object, and no list. (It sees the changes in their order, so an intermediate
// choice can be in force for a moment.)
func testCutOff(t *testing.T, s *server) {
	two, four := document("2"), document("4")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two, "b": four})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")
	f.awaitWatches(t, 2)

	f.setCut(true)
	s.setProfiles(map[string]string{"a": four, "b": two})
	f.setCut(false)
	f.awaits(t, is(t, "a", four), "")
	f.expectReasons(t)
	if history := f.history(); !slices.Equal(history, []string{is(t, "a", two), is(t, "a", four)}) {
		t.Errorf("applied %q", history)
	}
}

// testServerRestarts checks that nothing changes without an API server. A new server has forgotten the
// versions that the node knows, so the node lists once more each time that the server says so. While it
// gets no answer, it asks less and less often.
func testServerRestarts(t *testing.T, s *server) {
	two, four := document("2"), document("4")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two})
	f := s.follow(t, "n1", virgateToken, nil)
	f.awaits(t, is(t, "a", two), "")
	f.awaitWatches(t, 2)

	s.stop()
	f.setCut(true) // It must not see the new server before all has changed.
	s.start()
	for i := range 5 { // Other clients write as well.
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
	f.expectReasons(t)
	forgotten := map[string]int{}
	for _, r := range f.made() {
		if r.forgotten {
			forgotten[r.object()]++
		}
	}
	t.Logf("%d requests, %d answered; versions forgotten: %v", len(f.made()), len(f.answers()), forgotten)
	if len(forgotten) != 2 {
		t.Errorf("forgotten were only %v: this test proves nothing", forgotten)
	}
}
