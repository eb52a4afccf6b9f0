package api

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/sharing"
)

// scaleVariable has the number of nodes of TestScale.
const scaleVariable = "VIRGATE_SCALE_NODES"

// TestScale measures what the Virgates of a large cluster cost an API server:
// the tables of docs/scale.md. It holds no bound and takes six minutes and both
// cores at 1,000 nodes, so it runs only where it is asked for; the part "200 nodes" of
// TestAPI holds the bounds.
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
	// idle is the part of a core that the server uses with nobody there.
	idle float64
	// rows and server are the lines of two tables.
	rows, server []string
}

// quietTime is how long a server is measured that has nothing to do.
const quietTime = 30 * time.Second

// step measures what do costs each node and the server. It returns when the last
// node had what it brought, or zero.
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
	used := (m.s.cpu() - cpu).Seconds() - m.idle*time.Since(began).Seconds()
	var spent cost
	if m.fleet != nil {
		spent = m.fleet.cost().minus(before)
	}
	n := float64(m.count)
	m.rows = append(m.rows, fmt.Sprintf("| %s | %.2f | %.2f | %.0f | %.0f | %.2f | %.0f | %.2f ms | %s |", name,
		spent.requests/n, spent.writes/n, spent.read/n, spent.written/n, spent.connections/n, spent.refused, 1000*used/n, took))
	m.t.Log(m.rows[len(m.rows)-1])
}

// pass lets time pass that belongs to a measurement.
func pass(span time.Duration) { <-time.After(span) }

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

// changes are those that people and kubelets make.
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

// outages are those of the API server. An edit right afterwards shows when the
// last node is there again.
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
		m.server = append(m.server, fmt.Sprintf("ready %.1f s after its start", time.Since(began).Seconds()))
		m.s.setProfiles(shelf(document("6")))
		return m.fleet.awaits(is(m.t, "a", document("6")))
	})
	m.rates("back", began)
	m.look("after the outages")
}

// rates notes how many connections and requests there were in each second.
func (m *study) rates(when string, began time.Time) {
	m.server = append(m.server, fmt.Sprintf("%s: connections a second %v, requests a second %v", when, rate(m.fleet.dials(), began), rate(m.fleet.requests(), began)))
	m.t.Log(m.server[len(m.server)-1])
}

// report is all of it with nodes that tell as well.
func (m *study) report() {
	m.fleet = &fleet{}
	var began time.Time
	m.step("start, told", func() time.Time {
		began = time.Now()
		m.fleet = m.s.startFleet(m.t, m.count, func(f *follower, node string) { f.tell(m.t, node) })
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

// told waits until all nodes have written annotations, condition and event since
// then, and returns when the last of that was answered. It asks the server
// nothing, which would be measured as well.
func (m *study) told(since time.Time) (last time.Time) {
	m.t.Helper()
	m.s.await(fleetTimeout, "all nodes to tell", func() bool {
		for _, node := range m.fleet.nodes {
			at, all := node.told(since)
			if !all {
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

// told is when the node had written all three since then.
func (f *follower) told(since time.Time) (last time.Time, all bool) {
	written := map[string]bool{}
	for _, r := range f.made() {
		if !r.writes() || r.at.Before(since) || r.answer == 0 || r.answer > 299 {
			continue
		}
		path, _, _ := strings.Cut(r.what, "?")
		written[path] = true
		if r.answered.After(last) {
			last = r.answered
		}
	}
	return last, len(written) == 3
}

// tell has the follower report what comes into force as the agent does: it is
// pending, and applied when the kubelet has its lists.
func (f *follower) tell(t *testing.T, node string) {
	t.Helper()
	reporter := startReporter(t, f.config, node, nil)
	f.policy.Labels.Replaced = reporter.NodeReplaced
	var last sharing.ProfileRef
	f.applies = func(selected configs.Selected) {
		next := sharing.ProfileRef{Name: selected.Name, Source: selected.Source, Generation: selected.Generation}
		offer := "nvidia.com/gpu of " + selected.Generation
		if last == (sharing.ProfileRef{}) {
			reporter.Report(sharing.NodeReport{State: sharing.ProfilePending, Ready: sharing.ConditionUnknown, Reason: "Starting", Message: "the plan is not served yet"})
		}
		reporter.Report(sharing.NodeReport{
			State: sharing.ProfilePending, Wanted: next, Applied: last,
			Ready: sharing.ConditionTrue, Reason: "ProfilePending", Message: "the kubelet is being told of " + offer,
		})
		reporter.Report(sharing.NodeReport{
			State: sharing.ProfileApplied, Wanted: next, Applied: next,
			Ready: sharing.ConditionTrue, Reason: "Serving", Message: offer,
		})
		last = next
	}
}
