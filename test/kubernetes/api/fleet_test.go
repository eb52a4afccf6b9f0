package api

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/test/await"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// scaleVariable has the number of nodes of TestScale.
const scaleVariable = "VIRGATE_SCALE_NODES"

// TestScale measures what the Virgates of a large cluster cost an API server: the tables of
// docs/internals/scale.md. It checks no bound, and takes six minutes and both cores at 1,000 nodes, so it
// runs only on request. The part "200 nodes" of TestAPI checks the bounds.
func TestScale(t *testing.T) {
	nodes, err := strconv.Atoi(os.Getenv(scaleVariable))
	if err != nil {
		t.Skipf("set %s to a number of nodes, and -timeout 30m: it takes minutes and both cores", scaleVariable)
	}
	s := cluster(t)
	m := &study{t: t, s: s, count: nodes}
	m.begin()
	m.follow()
	m.changes()
	m.outages()
	m.fleet.stop()
	m.report()
	t.Logf("per node:\n%s", strings.Join(m.rows, "\n"))
	t.Logf("the server:\n%s", strings.Join(m.server, "\n"))
}

// study measures step by step.
type study struct {
	t     *testing.T
	s     *server
	count int
	fleet *fleet
	// idle is the part of a core that the server uses without clients.
	idle float64
	// rows and server are the lines of two tables.
	rows, server []string
}

// quietTime is how long an idle server is measured.
const quietTime = 30 * time.Second

// step measures what do costs each node and the server. do returns when the last node had its effect, or
// zero.
func (m *study) step(name string, do func() time.Time) {
	m.t.Helper()
	var before cost
	if m.fleet != nil {
		before = m.fleet.cost()
	}
	began, cpu := time.Now(), m.s.cpu()
	took := "–"
	if last := do(); !last.IsZero() {
		took = fmt.Sprintf("%.1f s", last.Sub(began).Seconds())
	}
	pass(3 * time.Second) // for what the server does afterwards
	used := (m.s.cpu() - cpu).Seconds() - m.idle*since(began).Seconds()
	var spent cost
	if m.fleet != nil {
		spent = m.fleet.cost().minus(before)
	}
	n := float64(m.count)
	m.rows = append(m.rows, fmt.Sprintf("| %s | %.2f | %.2f | %.0f | %.0f | %.2f | %.0f | %.2f ms | %s |", name,
		spent.requests/n, spent.writes/n, spent.read/n, spent.written/n, spent.connections/n, spent.refused, 1000*used/n, took))
	m.t.Log(m.rows[len(m.rows)-1])
}

// pass waits for a time that belongs to a measurement.
func pass(span time.Duration) { <-time.NewTimer(span).C }

// look notes the server's memory.
func (m *study) look(when string) {
	m.t.Helper()
	memory := m.s.memory()
	const mebi = 1 << 20
	m.server = append(m.server, fmt.Sprintf("| %s | %.0f | %.0f | %.0f |", when, memory.resident/mebi, memory.heap/mebi, memory.goroutines))
	m.t.Log(m.server[len(m.server)-1])
}

// begin makes Nodes and profiles, and measures the server without Virgate.
func (m *study) begin() {
	m.s.makeNodes(m.t, m.count, "a")
	m.s.setProfiles(shelf(document("2")))
	m.look("Nodes without Virgate")
	cpu := m.s.cpu()
	pass(quietTime)
	m.idle = (m.s.cpu() - cpu).Seconds() / quietTime.Seconds()
	m.server = append(m.server, fmt.Sprintf("idle: %.3f of a core", m.idle))
	m.step("nobody there: all labels change", func() time.Time { m.s.labelNodes(m.t, m.count, "b"); return time.Time{} })
	m.step("nobody there: all kubelets beat", func() time.Time { m.s.beatNodes(m.t, m.count, "2026-01-01T00:00:00Z"); return time.Time{} })
}

// follow starts all nodes at once.
func (m *study) follow() {
	m.fleet = &fleet{}
	m.step("start", func() time.Time {
		m.fleet = m.s.startFleet(m.t, m.count, nil)
		return m.fleet.awaits(is(m.t, "b", document("4")))
	})
	m.look("all follow")
	const minutes = 2
	m.step(fmt.Sprintf("at rest, %d min", minutes), func() time.Time { pass(minutes * time.Minute); return time.Time{} })
}

// changes makes the changes that people and kubelets make.
func (m *study) changes() {
	m.step("one label changes", func() time.Time {
		m.s.setNode(nodeName(7), "c")
		m.fleet.nodes[7].awaits(m.t, is(m.t, "c", document("10")), "")
		return m.fleet.nodes[7].since()
	})
	m.step("all labels change", func() time.Time {
		m.s.labelNodes(m.t, m.count, "a")
		return m.fleet.awaits(is(m.t, "a", document("2")))
	})
	m.step("the ConfigMap is edited", func() time.Time {
		m.s.setProfiles(shelf(document("3")))
		return m.fleet.awaits(is(m.t, "a", document("3")))
	})
	m.step("all kubelets beat", func() time.Time { m.s.beatNodes(m.t, m.count, "2026-01-01T00:05:00Z"); return time.Time{} })
	m.look("after the changes")
}

// outages makes the API server fail. An edit right afterwards shows when the last node is back.
func (m *study) outages() {
	var began time.Time
	m.step("all connections are cut, and an edit", func() time.Time {
		began = time.Now()
		m.fleet.cut()
		m.s.setProfiles(shelf(document("5")))
		return m.fleet.awaits(is(m.t, "a", document("5")))
	})
	m.rates("cut", began)
	m.s.stop()
	pass(10 * time.Second)
	began = time.Now()
	m.s.start()
	m.idle = 0 // It has just started.
	m.step("the server was away, and an edit", func() time.Time {
		m.server = append(m.server, fmt.Sprintf("ready %.1f s after its start", since(began).Seconds()))
		m.s.setProfiles(shelf(document("6")))
		return m.fleet.awaits(is(m.t, "a", document("6")))
	})
	m.rates("back", began)
	m.look("after the outages")
}

// rates notes the numbers of connections and requests in each second.
func (m *study) rates(when string, began time.Time) {
	m.server = append(m.server, fmt.Sprintf("%s: connections a second %v, requests a second %v", when, rate(m.fleet.dials(), began), rate(m.fleet.requests(), began)))
	m.t.Log(m.server[len(m.server)-1])
}

// report repeats all of it with nodes that also report.
func (m *study) report() {
	m.fleet = &fleet{}
	var began time.Time
	m.step("start, told", func() time.Time {
		began = time.Now()
		m.fleet = m.s.startFleet(m.t, m.count, func(f *nodeClient, node string) { f.tell(m.t, node) })
		m.fleet.awaits(is(m.t, "a", document("6")))
		return m.told(began)
	})
	m.rates("start, told", began)
	m.step("the ConfigMap is edited, told", func() time.Time {
		began = time.Now()
		m.s.setProfiles(shelf(document("7")))
		m.fleet.awaits(is(m.t, "a", document("7")))
		return m.told(began)
	})
	m.rates("edited, told", began)
	m.look("all follow and tell")
	m.fleet.stop()
}

// told waits until all nodes have written annotations, condition and event since then, and returns when the
// last of these writes was answered. It sends the server no requests, because these would be measured as
// well.
func (m *study) told(since time.Time) (last time.Time) {
	m.t.Helper()
	var missing *nodeClient
	defer func() {
		if m.t.Failed() && missing != nil {
			for _, r := range missing.made() {
				m.t.Logf("answered %d after %s: %s", r.answer, r.answered.Sub(since), r.what)
			}
		}
	}()
	m.s.await("all nodes to tell", func() bool {
		for _, node := range m.fleet.nodes {
			at, all := node.told(since)
			if !all {
				missing = node
				return false
			}
			if at.After(last) {
				last = at
			}
		}
		return true
	})
	return last
}

// told returns when the node had written all three since then.
func (f *nodeClient) told(since time.Time) (last time.Time, all bool) {
	paths := map[string]bool{}
	for _, r := range f.made() {
		// If the answer to the first request was lost, the event already exists.
		written := r.answer > 0 && r.answer < 300 || r.answer == http.StatusConflict
		if !r.writes() || r.at.Before(since) || !written {
			continue
		}
		path, _, _ := strings.Cut(r.what, "?")
		paths[path] = true
		if r.answered.After(last) {
			last = r.answered
		}
	}
	return last, len(paths) == 3
}

// tell has the follower report what comes into force as the agent does: first pending, then applied when
// the kubelet has its lists.
func (f *nodeClient) tell(t *testing.T, node string) {
	t.Helper()
	reporter := startReporter(t, f.config, node, nil)
	f.policy.Labels.Replaced = reporter.NodeReplaced
	f.reporter = reporter
	f.applies = func(selected configs.SelectedProfile) {
		last := f.last
		next := nodereport.ProfileRef{Name: selected.Name, Source: selected.Source, Generation: selected.Generation}
		offer := "nvidia.com/gpu of " + selected.Generation
		if last == (nodereport.ProfileRef{}) {
			reporter.Report(nodereport.Report{State: nodereport.ProfilePending, Ready: nodereport.ConditionUnknown, Reason: "Starting", Message: "the plan is not served yet"})
		}
		reporter.Report(nodereport.Report{
			State: nodereport.ProfilePending, Wanted: next, Applied: last,
			Ready: nodereport.ConditionTrue, Reason: "ProfilePending", Message: "the kubelet is being told of " + offer,
		})
		reporter.Report(nodereport.Report{
			State: nodereport.ProfileApplied, Wanted: next, Applied: next,
			Ready: nodereport.ConditionTrue, Reason: "Serving", Message: offer,
		})
		f.last = next
	}
}

// fleet is the Virgates of many nodes, each with its own connection.
type fleet struct {
	t     *testing.T
	nodes []*nodeClient
}

// startFleet follows the Nodes node-0, node-1, …; change may be nil.
func (s *server) startFleet(t *testing.T, count int, change func(f *nodeClient, node string)) *fleet {
	t.Helper()
	f := &fleet{t: t, nodes: make([]*nodeClient, count)}
	for i := range f.nodes {
		f.nodes[i] = s.followBy(t, nodeName(i), virgateToken, func(f *nodeClient) {
			if change != nil {
				change(f, nodeName(i))
			}
		})
	}
	return f
}

func nodeName(i int) string { return fmt.Sprint("node-", i) }

// awaits waits until all nodes have the profile in force, and returns when the last one got it.
func (f *fleet) awaits(inForce string) (last time.Time) {
	f.t.Helper()
	var missing *nodeClient
	defer func() {
		if f.t.Failed() && missing != nil {
			have, why := missing.state()
			f.t.Logf("in force %q, rejected %q, requests %q", have, why, missing.seen())
		}
	}()
	await.True(f.t, "all nodes to have "+inForce, func() bool {
		for _, node := range f.nodes {
			if have, why := node.state(); have != inForce || why != "" {
				missing = node
				return false
			}
		}
		return true
	})
	for _, node := range f.nodes {
		if at := node.since(); at.After(last) {
			last = at
		}
	}
	return last
}

// cost is the sum of all nodes' requests and traffic so far.
type cost struct {
	// refused are requests that were answered 429, writes those that change something; answers are lists
	// and watches that brought something, forgotten those of a version that the server had forgotten.
	requests, refused, writes, answers, forgotten, connections float64
	read, written                                              float64 // bytes on the wire
}

func (f *fleet) cost() cost {
	var total cost
	for _, node := range f.nodes {
		for _, r := range node.made() {
			total.requests++
			if r.writes() {
				total.writes++
			}
			if r.answer == 429 {
				total.refused++
			}
			if r.follows() && !r.inVain() {
				total.answers++
			}
			if r.forgotten {
				total.forgotten++
			}
		}
		total.connections += float64(len(node.dialled()))
		total.read += float64(node.read.Load())
		total.written += float64(node.written.Load())
	}
	return total
}

// minus returns the cost since the earlier time.
func (c cost) minus(earlier cost) cost {
	return cost{
		requests: c.requests - earlier.requests, refused: c.refused - earlier.refused, writes: c.writes - earlier.writes,
		answers: c.answers - earlier.answers, forgotten: c.forgotten - earlier.forgotten,
		connections: c.connections - earlier.connections, read: c.read - earlier.read, written: c.written - earlier.written,
	}
}

// awaitAnswers waits until all nodes together have this many.
func (f *fleet) awaitAnswers(count float64) {
	f.t.Helper()
	await.True(f.t, fmt.Sprintf("%.0f answers", count), func() bool { return f.cost().answers >= count })
}

// expectReasons checks each node's requests.
func (f *fleet) expectReasons() {
	f.t.Helper()
	for _, node := range f.nodes {
		if node.expectReasons(f.t); f.t.Failed() {
			return
		}
	}
}

// cut cuts all connections at once, as an API server does that ends while another one is ready at once.
func (f *fleet) cut() {
	for _, node := range f.nodes {
		node.setCut(true)
		node.setCut(false)
	}
}

// rate counts the times in each second after begin, up to the last.
func rate(times []time.Time, begin time.Time) []int {
	var counts []int
	for _, at := range times {
		second := int(at.Sub(begin) / time.Second)
		if at.Before(begin) {
			continue
		}
		for len(counts) <= second {
			counts = append(counts, 0)
		}
		counts[second]++
	}
	return counts
}

// dials are the times when connections were requested, requests those when requests were made.
func (f *fleet) dials() []time.Time {
	var all []time.Time
	for _, node := range f.nodes {
		all = append(all, node.dialled()...)
	}
	slices.SortFunc(all, time.Time.Compare)
	return all
}

func (f *fleet) requests() []time.Time {
	var all []time.Time
	for _, node := range f.nodes {
		for _, r := range node.made() {
			all = append(all, r.at)
		}
	}
	slices.SortFunc(all, time.Time.Compare)
	return all
}

func (f *fleet) stop() {
	var ended sync.WaitGroup
	for _, node := range f.nodes {
		ended.Go(node.stop)
	}
	ended.Wait()
}

// writers is how many requests at once change the Nodes: the server refuses requests that wait too long
// behind others.
const writers = 16

// eachNode calls do for all Nodes, several at once.
func eachNode(t *testing.T, count int, do func(name string) error) {
	t.Helper()
	var working sync.WaitGroup
	problems := make([]error, writers)
	for worker := range writers {
		working.Go(func() {
			for i := worker; i < count; i += writers {
				problems[worker] = errors.Join(problems[worker], do(nodeName(i)))
			}
		})
	}
	working.Wait()
	if err := errors.Join(problems...); err != nil {
		t.Fatal(err)
	}
}

// makeNodes makes Nodes as large as those of a cluster with feature discovery:
// 60 labels and 10 annotations, about 5 kB.
func (s *server) makeNodes(t *testing.T, count int, profile string) {
	t.Helper()
	eachNode(t, count, func(name string) error {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: profile}, Annotations: map[string]string{}}}
		for i := range 60 {
			node.Labels[fmt.Sprintf("feature.node.kubernetes.io/attribute-%02d", i)] = "a-value-of-usual-length"
		}
		for i := range 10 {
			node.Annotations[fmt.Sprintf("example.com/annotation-%02d", i)] = strings.Repeat("x", 60)
		}
		_, err := s.admin.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
		return err
	})
}

// labelNodes gives all Nodes the profile.
func (s *server) labelNodes(t *testing.T, count int, profile string) {
	t.Helper()
	patch := []byte(`{"metadata":{"labels":{"` + label + `":"` + profile + `"}}}`)
	eachNode(t, count, func(name string) error {
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
}

// beatNodes updates the status of all Nodes, as their kubelets do every five
// minutes.
func (s *server) beatNodes(t *testing.T, count int, time string) {
	t.Helper()
	patch := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"` + time + `"}]}}`)
	eachNode(t, count, func(name string) error {
		_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		return err
	})
}

// shelf is a ConfigMap of 4 KiB with the profile a as wanted, b and c.
func shelf(a string) map[string]string {
	shelf := map[string]string{"a": a, "b": document("4"), "c": document("10")}
	size := 0
	for _, text := range shelf {
		size += len(text)
	}
	shelf["c"] += "#" + strings.Repeat("x", 4096-size-2) + "\n"
	return shelf
}

// testManyNodes has the nodes of a cluster watch at once, and checks bounds of the cost: see
// docs/internals/scale.md.
func testManyNodes(t *testing.T, s *server) {
	const nodes = 200
	two, four, ten := document("2"), document("4"), document("10")
	s.setProfiles(map[string]string{"a": two, "b": four})
	s.makeNodes(t, nodes, "a")
	all := s.startFleet(t, nodes, nil)
	all.awaits(is(t, "a", two))
	all.awaitAnswers(4 * nodes)
	begin := all.cost()
	t.Logf("start: %.2f requests, %.0f bytes read, %.0f written a node", begin.requests/nodes, begin.read/nodes, begin.written/nodes)

	// One label: one node learns of it. The others only read what keeps a connection and a watch alive,
	// which is less than a Node.
	var before []int64
	for _, node := range all.nodes {
		before = append(before, node.read.Load())
	}
	s.setNode(nodeName(7), "b")
	all.nodes[7].awaits(t, is(t, "b", four), "")
	for i, node := range all.nodes {
		if told := node.read.Load() - before[i]; told > 4000 && i != 7 {
			t.Errorf("node %d read %d bytes when another one's label changed", i, told)
		}
	}
	flip := all.cost()
	t.Logf("one label: %.0f bytes read by all nodes together", flip.read-begin.read)

	// One edit: all nodes learn of it, and none sends a request.
	s.setProfiles(map[string]string{"a": ten, "b": ten})
	for i, node := range all.nodes {
		if i != 7 {
			node.awaits(t, is(t, "a", ten), "")
		}
	}
	all.nodes[7].awaits(t, is(t, "b", ten), "")
	edit := all.cost()
	t.Logf("one edit of the ConfigMap: %.0f bytes read a node", (edit.read-flip.read)/nodes)
	all.expectReasons()
	if edit.answers > 4*nodes+2*edit.forgotten {
		t.Errorf("%.0f answers of %d nodes, want 4 each: %q", edit.answers, nodes, all.nodes[0].seen())
	}
	// A request may fail because its connection could not be made, or broke.
	if vain := edit.requests - edit.answers; edit.connections > nodes+vain {
		t.Errorf("%.0f connections of %d nodes, with %.0f requests in vain", edit.connections, nodes, vain)
	}
	if perNode := begin.read / nodes; perNode > 30_000 {
		t.Errorf("%.0f bytes read a node at the start, want 30000 at most", perNode)
	}
	for i, node := range all.nodes {
		want := 2
		if i == 7 {
			want = 3
		}
		if history := node.history(); len(history) != want {
			t.Errorf("node %d applied %q", i, history)
		}
	}

	// Cut off together, the nodes come back one by one and resume where they were.
	pass(firstSecond)
	all.cut()
	s.setProfiles(map[string]string{"a": two, "b": two})
	for i, node := range all.nodes {
		name := "a"
		if i == 7 {
			name = "b"
		}
		node.awaits(t, is(t, name, two), "")
	}
	// A node that has seen the new text may not be watching again yet.
	all.awaitAnswers(edit.answers + 2*nodes)
	again := all.cost().minus(edit)
	dials := all.dials()[int(edit.connections):]
	span := dials[len(dials)-1].Sub(dials[0])
	t.Logf("after a cut: %.2f requests a node, connections over %s", again.requests/nodes, span)
	all.expectReasons()
	if again.answers > 2*nodes+2*again.forgotten {
		t.Errorf("%.0f answers of %d nodes after a cut, want 2 each: %q", again.answers, nodes, all.nodes[0].seen())
	}
	if span.Seconds() < 2 {
		t.Errorf("all came back in %s, want them to be seconds apart", span)
	}
	all.stop()
}
