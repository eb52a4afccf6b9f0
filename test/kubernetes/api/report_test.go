package api

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
)

// TestReport runs all tests of reports on one API server. Each part has its own Node, because events
// outlive their Node.
func TestReport(t *testing.T) {
	s := startServer(t)
	s.allow()
	for _, part := range []struct {
		name string
		play func(*testing.T, *server)
	}{
		{"told", testTold},
		{"once allowed", testToldOnceAllowed},
		{"by the whole program", testProgramTells},
		{"confined", testAdmission},
		{"later", testToldLater},
	} {
		t.Run(part.name, func(t *testing.T) {
			whole := s.t
			s.t = t
			defer func() { s.t = whole }()
			part.play(t, s)
		})
	}
}

// startReporter runs a reporter that logs in with config until the test ends.
func startReporter(t *testing.T, config *rest.Config, node string, log *slog.Logger) *nodestatus.Reporter {
	t.Helper()
	r, err := nodestatus.New(nodestatus.Options{Config: config, Node: node, Events: true, Condition: true, Annotations: true, RemoveStale: true, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return r
}

// complaints are the lines of a log.
type complaints chan string

func (c complaints) Write(line []byte) (int, error) {
	select {
	case c <- string(line):
	default: // No test reads so many.
	}
	return len(line), nil
}

// await takes a line that has all of the parts; the other lines stay.
func (c complaints) await(t *testing.T, parts ...string) {
	t.Helper()
	await.True(t, fmt.Sprintf("a complaint with %q", parts), func() bool {
		for range len(c) {
			line := <-c
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
				return true
			}
			_, _ = c.Write([]byte(line))
		}
		return false
	})
}

func serving(generation string) nodereport.Report {
	ref := nodereport.ProfileRef{Name: "a", Source: "ConfigMap gpu/profiles", Generation: generation}
	return nodereport.Report{
		State: nodereport.ProfileApplied, Wanted: ref, Applied: ref, Ready: nodereport.ConditionTrue, Reason: "Serving", Message: "nvidia.com/gpu",
	}
}

func refused(problem string) nodereport.Report {
	r := serving("g1")
	r.State, r.Wanted.Generation, r.Problem, r.Reason = nodereport.ProfileRejected, "", problem, "ProfileRejected"
	return r
}

func (s *server) node(name string) *corev1.Node {
	node, err := s.admin.CoreV1().Nodes().Get(s.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return &corev1.Node{}
	}
	return node
}

// says reports whether the Node's annotations, label and condition have this generation, state and reason.
func (s *server) says(name, generation, state, reason string) bool {
	node := s.node(name)
	i := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == nodestatus.ConditionType })
	return i >= 0 && node.Status.Conditions[i].Reason == reason &&
		node.Annotations[nodestatus.GenerationAnnotation] == generation && node.Labels[nodestatus.StateLabel] == state
}

// told returns the messages of the node's events with that reason ("" for any), found as kubectl describe
// does.
func (s *server) told(node, reason string) []string {
	selector := "involvedObject.kind=Node,involvedObject.name=" + node + ",involvedObject.uid=" + node
	if reason != "" {
		selector += ",reason=" + reason
	}
	list, err := s.admin.CoreV1().Events(metav1.NamespaceDefault).List(s.t.Context(), metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return nil
	}
	var messages []string
	for _, event := range list.Items {
		messages = append(messages, event.Message)
	}
	return messages
}

// testTold has only the shipped ClusterRole.
func testTold(t *testing.T, s *server) {
	s.setNode("told", "")
	theirs := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True","reason":"KubeletReady"}],"capacity":{"nvidia.com/old":"0","nvidia.com/gpu":"0"},"allocatable":{"nvidia.com/gpu":"0"}}}`)
	_, err := s.admin.CoreV1().Nodes().Patch(t.Context(), "told", types.StrategicMergePatchType, theirs, metav1.PatchOptions{}, "status")
	s.must(err)

	r := startReporter(t, s.config(virgateToken), "told", nil)
	first := serving("g1")
	first.Gone = []nodereport.GoneResource{{Name: "nvidia.com/old", Since: time.Now().Add(-time.Hour)}}
	r.Report(first)
	s.await("the first profile", func() bool {
		return s.says("told", "g1", "applied", "Serving") && len(s.told("told", "ProfileApplied")) == 1
	})
	s.await("the stale resource to go", func() bool { _, there := s.node("told").Status.Capacity["nvidia.com/old"]; return !there })

	problem := `ConfigMap gpu/profiles[data.a]:5: sharing.timeSlicing.resources[0].replicas: must be at least 1 (got -3)`
	r.Report(refused(problem))
	s.await("the refusal", func() bool {
		return s.says("told", "g1", "rejected", "ProfileRejected") && len(s.told("told", "ProfileRejected")) == 1
	})
	if got := s.told("told", "ProfileRejected"); !strings.HasSuffix(got[0], problem) {
		t.Errorf("told %q", got)
	}

	node := s.node("told")
	if _, there := node.Status.Capacity["nvidia.com/gpu"]; !there || len(node.Status.Conditions) != 2 {
		t.Errorf("what is theirs has changed: %+v", node.Status)
	}
	for _, owner := range node.ManagedFields {
		if owner.Manager == "virgate" && (owner.Operation != metav1.ManagedFieldsOperationUpdate || strings.Contains(string(owner.FieldsV1.Raw), "KubeletReady")) {
			t.Errorf("virgate owns %s", owner.FieldsV1.Raw)
		}
	}

	// The Node is created anew.
	s.removeNode("told")
	s.setNode("told", "")
	r.NodeReplaced()
	s.await("the new Node to say it", func() bool { return s.says("told", "g1", "rejected", "ProfileRejected") })

	// Repeated events become one with a count.
	for i := range 20 {
		unit := sharing.UnitHealth{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: sharing.Healthy}
		if i%2 == 0 {
			unit.State, unit.Reason = sharing.Unhealthy, "XID 79"
		}
		next := serving("g1")
		next.Units = []sharing.UnitHealth{unit}
		r.Report(next)
	}
	s.await("the XID", func() bool {
		got := s.told("told", "GPUUnhealthy")
		return len(got) == 1 && strings.Contains(got[0], "XID 79") && len(s.told("told", "GPURecovered")) == 1
	})
}

// testToldLater reports while the API server is away. When the server is back, it gets the last state and
// the events of the time between.
func testToldLater(t *testing.T, s *server) {
	s.setNode("later", "")
	r := startReporter(t, s.config(virgateToken), "later", nil)
	r.Report(serving("g1"))
	s.await("the first profile", func() bool { return s.says("later", "g1", "applied", "Serving") })
	s.stop()
	r.Report(refused("p.yaml:1: x: unknown key"))
	r.Report(serving("g2"))
	s.start()
	s.await("the last state", func() bool {
		return s.says("later", "g2", "applied", "Serving") && len(s.told("later", "ProfileRejected")) == 1 && len(s.told("later", "ProfileApplied")) == 2
	})
}

// testToldOnceAllowed starts without any right.
func testToldOnceAllowed(t *testing.T, s *server) {
	s.setNode("unallowed", "")
	complaints := make(complaints, 100)
	r := startReporter(t, s.config(strangerToken), "unallowed", slog.New(slog.NewTextHandler(complaints, nil)))
	r.Report(serving("g1"))
	for _, what := range []string{"annotations", "condition", "events"} {
		complaints.await(t, "forbidden", "writes="+what)
	}
	s.bind("stranger", "virgate", user("stranger"))
	s.await("being allowed", func() bool {
		return s.says("unallowed", "g1", "applied", "Serving") && len(s.told("unallowed", "ProfileApplied")) == 1
	})
}
