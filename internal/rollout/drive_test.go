package rollout

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/test/await"
)

func names(count int) (list []string) {
	for i := range count {
		list = append(list, fmt.Sprintf("n%02d", i))
	}
	return list
}

var spec = Spec{To: "new", Selector: "pool=a", MaxUnavailable: "2", Timeout: 10 * time.Minute}

// start begins a rollout; Drive with the holder's name continues it.
func start(t *testing.T, c *Client, s Spec) *Rollout {
	t.Helper()
	r, err := c.Start(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func expect(t *testing.T, a *api, want string, nodes ...string) {
	t.Helper()
	labels := a.labels(ProfileLabel)
	for _, name := range nodes {
		if labels[name] != want {
			t.Errorf("%s has the profile %q, want %q", name, labels[name], want)
		}
	}
}

func find(t *testing.T, c *Client, id string) *Rollout {
	t.Helper()
	r, err := c.Find(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestDrive checks that all nodes get the profile, at most two at once, and lose it again. Other labels and
// annotations stay, and a second rollout replaces the first.
func TestDrive(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(7)...)
	a.edit("n03", func(n *corev1.Node) { delete(n.Labels, ProfileLabel) })
	a.edit("n06", func(n *corev1.Node) { n.Labels["pool"] = "b" })
	c := a.client("alice")
	var most atomic.Int64
	c.Progress = func(r *Rollout) { most.Store(max(most.Load(), int64(r.Count(Pending, Undoing)))) }
	r := start(t, c, spec)
	if r.Phase != Running || len(r.Nodes) != 6 || r.Holder != "alice" || len(a.labelled) != 0 {
		t.Errorf("%+v, labels of %v", r.State, a.labelled)
	}
	r, err := c.Drive(t.Context(), r.ID, Resume{})
	if err != nil || r.Phase != Finished || r.Count(Done) != 6 || r.Holder != "" {
		t.Fatalf("%v: %+v", err, r)
	}
	expect(t, a, "new", names(6)...)
	expect(t, a, "old", "n06")
	if most.Load() != 2 {
		t.Errorf("%d were under way at once, want 2", most.Load())
	}
	if r, err = c.Undo(t.Context(), r.ID, false); err != nil || r.Phase != TakenBack || r.Count(Undone) != 6 {
		t.Fatalf("%v: %+v", err, r)
	}
	expect(t, a, "old", "n00", "n01", "n02", "n04", "n05", "n06")
	if n := a.node("n03"); n.Annotations["mine"] != "stays" || n.Labels["pool"] != "a" {
		t.Errorf("%+v", n.ObjectMeta)
	}
	if _, found := a.node("n03").Labels[ProfileLabel]; found {
		t.Error("n03 had no label, and has one after the undo")
	}
	second := start(t, a.client("bob"), spec)
	if list, err := c.List(t.Context()); err != nil || len(list) != 1 || list[0].ID != second.ID {
		t.Errorf("%v, %+v", err, list)
	}
}

// TestLayout checks that a MIG layout is rolled out by its own label.
func TestLayout(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(3)...)
	for _, name := range names(3) {
		a.edit(name, func(n *corev1.Node) {
			n.Labels[nodestatus.MIGStateLabel], n.Annotations[nodestatus.GenerationAnnotation] = "success", "g"
		})
	}
	c, s := a.client("alice"), spec
	s.MIG = true
	r, err := c.Drive(t.Context(), start(t, c, s).ID, Resume{})
	if err != nil || r.Phase != Finished || a.labels(LayoutLabel)["n02"] != "new" {
		t.Errorf("%v: %+v", err, r)
	}
	expect(t, a, "old", names(3)...)
}

// TestStop checks that after the first node that refuses, no other gets a label. The rollout can go on without that
// node, and an undo reaches it too.
func TestStop(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(6)...)
	a.follow = func(n *corev1.Node, label string) {
		switch {
		case n.Name == "n02" && n.Labels[label] == "new":
			refuse(n, label)
		case n.Name != "n03": // n03 reports nothing, so it is not done meanwhile.
			obey(n, label)
		}
	}
	c := a.client("alice")
	r, err := c.Drive(t.Context(), start(t, c, spec).ID, Resume{})
	if !errors.Is(err, ErrStopped) || !strings.Contains(err.Error(), "n02: the node refuses the profile: it says rejected, with profile old in force; ProfileRejected: there is no such profile") {
		t.Fatal(err)
	}
	if r.Phase != Stopped || r.Count(Failed) != 1 || r.Holder != "" {
		t.Errorf("%+v", r.State)
	}
	expect(t, a, "new", "n00", "n01", "n02") // n03 was begun beside n02, or was not.
	expect(t, a, "old", "n04", "n05")
	a.behave(obey)
	a.edit("n03", func(n *corev1.Node) { obey(n, ProfileLabel) })
	if r, err = c.Drive(t.Context(), r.ID, Resume{SkipFailed: true}); err != nil || r.Count(Done) != 5 || r.Count(Skipped) != 1 {
		t.Fatalf("%v: %+v", err, r)
	}
	if _, err = c.Undo(t.Context(), r.ID, true); err != nil {
		t.Fatal(err)
	}
	expect(t, a, "old", names(6)...)
}

// TestForeignLabel checks that a label that another client has set is never overwritten, forwards or backwards.
func TestForeignLabel(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(4)...)
	c, s := a.client("alice"), spec
	s.PauseAfter = 1
	r, err := c.Drive(t.Context(), start(t, c, s).ID, Resume{})
	if err != nil || r.Phase != Paused || r.Count(Done) != 2 {
		t.Fatalf("%v: %+v", err, r)
	}
	for _, name := range []string{"n01", "n03"} {
		a.edit(name, func(n *corev1.Node) { n.Labels[ProfileLabel] = "theirs" })
	}
	r, err = c.Drive(t.Context(), r.ID, Resume{})
	if !errors.Is(err, ErrStopped) || !strings.Contains(err.Error(), `n01: someone else changed its label nvidia.com/device-plugin.config: it is "theirs" and was "new"`) ||
		!strings.Contains(err.Error(), `n03: someone else changed its label nvidia.com/device-plugin.config: it is "theirs" and was "old"`) {
		t.Error(err)
	}
	if r, err = c.Undo(t.Context(), r.ID, false); err != nil || r.Count(Left) != 1 || !strings.Contains(r.Reason, "1 nodes") {
		t.Fatalf("%v: %+v", err, r)
	}
	expect(t, a, "theirs", "n01", "n03")
	expect(t, a, "old", "n00", "n02")
}

// TestTwoRollouts checks that a node is part of one rollout only. The second rollout releases the nodes it has
// claimed.
func TestTwoRollouts(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(5)...)
	a.edit("n04", func(n *corev1.Node) { n.Labels["pool"] = "b" })
	first := start(t, a.client("alice"), Spec{To: "new", Selector: "pool=b", MaxUnavailable: "1", Timeout: time.Minute})
	bob := a.client("bob")
	_, err := bob.Start(t.Context(), Spec{To: "other", Selector: "pool", MaxUnavailable: "1", Timeout: time.Minute})
	if err == nil || !strings.Contains(err.Error(), "node n04 belongs to rollout "+first.ID+" to new, which alice began") {
		t.Errorf("got %v", err)
	}
	if list, err := bob.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%v, %d rollouts", err, len(list))
	}
}

// TestTwoStarts checks that if two rollouts want the same nodes at once, the first gets them, and nothing is left
// of the other, whichever looks first.
func TestTwoStarts(t *testing.T) {
	t.Parallel()
	for _, moment := range []string{"before the plan is written", "before it runs"} {
		t.Run(moment, func(t *testing.T) {
			t.Parallel()
			a := startAPI(t, names(5)...)
			a.edit("n04", func(n *corev1.Node) { n.Labels["pool"] = "b" })
			alice, bob := a.client("alice"), a.client("bob")
			all := Spec{To: "other", Selector: "pool", MaxUnavailable: "1", Timeout: time.Minute}
			var once atomic.Bool
			var bobs *Rollout
			var bobsErr error
			a.intercept(func(_, body string) bool {
				at := strings.Contains(body, "resourceVersion") == (moment == "before it runs")
				if at && strings.Contains(body, "alice") && !once.Swap(true) {
					bobs, bobsErr = bob.Start(t.Context(), all)
				}
				return true
			})
			r, err := alice.Start(t.Context(), spec)
			winner, loser, winners := r, bobsErr, "alice"
			if moment == "before the plan is written" {
				winner, loser, winners = bobs, err, "bob"
			}
			if winner == nil || winner.By != winners || winner.Phase != Running {
				t.Errorf("%s does not have them: %+v; %v, %v", winners, winner, err, bobsErr)
			}
			if loser == nil || !strings.Contains(loser.Error(), "node n00 belongs to rollout") || !strings.Contains(loser.Error(), winners+" began") {
				t.Errorf("the other one: %v", loser)
			}
			if list, err := alice.List(t.Context()); err != nil || len(list) != 1 {
				t.Errorf("%v, %d rollouts", err, len(list))
			}
		})
	}
}

// TestTwoClaims checks that of two written plans that do not run yet, the earlier one gets the nodes, in whatever
// order they look at each other.
func TestTwoClaims(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"alice", "bob"} {
		a := startAPI(t, names(2)...)
		claims := map[string]func() error{}
		for _, holder := range []string{"alice", "bob"} {
			c := a.client(holder)
			params, err := spec.params(holder)
			if err != nil {
				t.Fatal(err)
			}
			params.Max = 1
			p := plan{Params: params, State: State{Phase: Claiming, Holder: holder}, members: []member{{"n01", nil}}}
			if _, err := c.create(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			claims[holder] = func() error { return c.claim(t.Context(), p) }
		}
		errs := map[string]error{first: claims[first]()}
		for holder, claim := range claims {
			if holder != first {
				errs[holder] = claim()
			}
		}
		if errs["alice"] != nil {
			t.Errorf("%s first: alice, who was earlier: %v", first, errs["alice"])
		}
		if err := errs["bob"]; err == nil || !strings.Contains(err.Error(), "node n01 belongs to rollout") || !strings.Contains(err.Error(), "alice began") {
			t.Errorf("%s first: bob: %v", first, err)
		}
	}
}

// TestEndedGivesNodes checks that an ended rollout loses its nodes to a new one, and that its undo does not reach
// them. A rollout that is being undone keeps them.
func TestEndedGivesNodes(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(4)...)
	a.edit("n03", func(n *corev1.Node) { n.Labels["pool"] = "b" })
	c := a.client("alice")
	first := start(t, c, Spec{To: "new", Selector: "pool", MaxUnavailable: "4", Timeout: time.Minute})
	if _, err := c.Drive(t.Context(), first.ID, Resume{}); err != nil {
		t.Fatal(err)
	}
	second := Spec{To: "newer", Selector: "pool=b", MaxUnavailable: "1", Timeout: time.Minute}
	var once atomic.Bool
	bob := a.client("bob")
	a.intercept(func(name, body string) bool {
		if name == planName+first.ID && !once.Swap(true) { // Someone undoes the rollout while its node is being taken.
			a.editState(first.ID, func(s *State) { s.Phase = TakingBack })
		}
		return true
	})
	if _, err := bob.Start(t.Context(), second); err == nil || !strings.Contains(err.Error(), "rollout "+first.ID+", which had ended and had some of these nodes, is undoing by now") {
		t.Errorf("got %v", err)
	}
	a.editState(first.ID, func(s *State) { s.Phase = Finished })
	a.intercept(func(name, body string) bool { return true })
	start(t, bob, second)
	r, err := c.Undo(t.Context(), first.ID, false)
	if err != nil || len(r.Nodes) != 3 || r.Count(Undone) != 3 {
		t.Fatalf("%v: %d nodes, %+v", err, len(r.Nodes), r.State)
	}
	expect(t, a, "old", "n00", "n01", "n02")
	expect(t, a, "new", "n03")
}

// TestTwoDrivers checks that a second driver does not disturb a live one, and replaces a dead one.
func TestTwoDrivers(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(4)...)
	a.follow = nil
	alice, bob := a.client("alice"), a.client("bob")
	alice.lease, bob.outwait = time.Second, patience // Alice renews often, and Bob waits long enough.
	r := start(t, alice, spec)
	driving, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := alice.Drive(driving, r.ID, Resume{})
		ended <- err
	}()
	if _, err := bob.Drive(t.Context(), r.ID, Resume{}); err == nil || !strings.Contains(err.Error(), "another program drives it: alice") {
		t.Errorf("bob got %v", err)
	}
	if err := bob.Forget(t.Context(), r.ID, true); err == nil || !strings.Contains(err.Error(), "another program drives it: alice") {
		t.Errorf("bob got %v", err)
	}
	stop()
	if err := <-ended; !errors.Is(err, ErrInterrupted) {
		t.Errorf("alice got %v", err)
	}
	if r = find(t, bob, r.ID); r.Phase != Paused || r.Holder != "" || r.Reason != "interrupted by alice" {
		t.Errorf("%+v", r.State)
	}
	// Carol takes the lease and dies.
	a.editState(r.ID, func(s *State) { s.Phase, s.Holder = Running, "carol" })
	a.behave(obey)
	for _, name := range names(2) {
		a.edit(name, func(n *corev1.Node) { obey(n, ProfileLabel) })
	}
	bob.outwait = time.Second
	if r, err := bob.Drive(t.Context(), r.ID, Resume{}); err != nil || r.Phase != Finished {
		t.Errorf("%v: %+v", err, r)
	}
}

// TestPause checks that a pause by another client ends the driver, and that nodes under way go on by themselves.
func TestPause(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(4)...)
	a.follow = nil
	alice, bob := a.client("alice"), a.client("bob")
	r := start(t, alice, spec)
	alice.Progress = func(r *Rollout) {
		if r.Count(Pending) == 2 && r.Phase == Running {
			if err := bob.Pause(t.Context(), r.ID); err != nil {
				t.Error(err)
			}
		}
	}
	r, err := alice.Drive(t.Context(), r.ID, Resume{})
	if err != nil || r.Phase != Paused || r.Reason != "by bob" || r.Holder != "" || r.Count(Waiting) != 2 {
		t.Errorf("%v: %+v", err, r.State)
	}
	if err := bob.Pause(t.Context(), r.ID); err == nil || !strings.Contains(err.Error(), "does not run: it is paused") {
		t.Errorf("got %v", err)
	}
}

// TestNodesGone checks that deleted nodes are no longer part of the rollout, even if all are deleted, and that the
// driver ends when another client deletes the rollout.
func TestNodesGone(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(4)...)
	a.follow = nil
	alice := a.client("alice")
	r := start(t, alice, spec)
	var once atomic.Bool
	alice.Progress = func(r *Rollout) {
		if r.Count(Pending) == 2 && !once.Swap(true) {
			a.remove("n00")
			a.behave(obey)
			a.edit("n01", func(n *corev1.Node) { obey(n, ProfileLabel) })
		}
	}
	r, err := alice.Drive(t.Context(), r.ID, Resume{})
	if err != nil || r.Phase != Finished || r.Count(Done) != 3 {
		t.Fatalf("%v: %+v", err, r)
	}
	if _, err = alice.Undo(t.Context(), r.ID, false); err != nil {
		t.Fatal(err)
	}
	r = start(t, alice, spec)
	for _, name := range names(4)[1:] {
		a.remove(name)
	}
	if r, err = alice.Drive(t.Context(), r.ID, Resume{}); err != nil || r.Phase != Finished || len(r.Nodes) != 0 {
		t.Errorf("%v: %+v", err, r)
	}
	if err := alice.Forget(t.Context(), r.ID, false); err != nil {
		t.Error(err)
	}
	if _, err := alice.Drive(t.Context(), r.ID, Resume{}); !errors.Is(err, errNone) {
		t.Errorf("got %v", err)
	}
}

// TestForgottenWhileDriven checks that deleting a rollout's ConfigMap ends its driver, and that no more labels are
// set.
func TestForgottenWhileDriven(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(4)...)
	a.follow = nil
	alice := a.client("alice")
	r := start(t, alice, spec)
	var once atomic.Bool
	alice.Progress = func(r *Rollout) {
		if r.Count(Pending) == 2 && !once.Swap(true) {
			a.removeConfigMap(planName + r.ID)
		}
	}
	if _, err := alice.Drive(t.Context(), r.ID, Resume{}); !errors.Is(err, errNone) {
		t.Errorf("got %v", err)
	}
	expect(t, a, "old", "n02", "n03")
}

// TestTroubles checks that lost or refused answers and conflicting writes do not change the result.
func TestTroubles(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(6)...)
	var asked, answered atomic.Int64
	a.before = func(name, _ string) bool {
		calls := asked.Add(1)
		if calls%5 == 0 {
			a.touch(name) // So that the patch conflicts.
		}
		return calls%7 != 0
	}
	a.lost = func(string, string) bool { return answered.Add(1)%3 == 0 }
	c := a.client("alice")
	id := start(t, c, spec).ID
	until := func(what string, try func() (*Rollout, error), want Phase) {
		await.Until(t, what, func() error {
			tried, err := try()
			if r, err := a.client("bob").Find(t.Context(), id); err == nil && r.Phase == want {
				return nil
			}
			return fmt.Errorf("%w, %+v", err, tried)
		})
	}
	until("drive", func() (*Rollout, error) { return c.Drive(t.Context(), id, Resume{}) }, Finished)
	expect(t, a, "new", names(6)...)
	until("undo", func() (*Rollout, error) { return c.Undo(t.Context(), id, false) }, TakenBack)
	expect(t, a, "old", names(6)...)
}

// TestUnready checks that nodes that cannot follow are left out, but only on request.
func TestUnready(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(3)...)
	a.edit("n00", func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	a.edit("n01", func(n *corev1.Node) { delete(n.Labels, nodestatus.StateLabel) })
	c, s := a.client("alice"), spec
	_, err := c.Start(t.Context(), s)
	if err == nil || !strings.Contains(err.Error(), "2 of 3 nodes cannot follow now") || !strings.Contains(err.Error(), "n01: no Virgate has said there how its profile is") {
		t.Errorf("got %v", err)
	}
	s.SkipUnready = true
	if r := start(t, c, s); len(r.Nodes) != 1 {
		t.Errorf("%d nodes", len(r.Nodes))
	}
}

// TestKilledClaiming checks that a rollout whose start was killed can only be undone.
func TestKilledClaiming(t *testing.T) {
	t.Parallel()
	a := startAPI(t, names(3)...)
	c := a.client("alice")
	params, err := spec.params("alice")
	if err != nil {
		t.Fatal(err)
	}
	params.Max = 1
	old := "old"
	p := plan{
		Params:  params,
		State:   State{Phase: Claiming, Holder: "alice", Renewed: time.Now().UTC()},
		members: []member{{"n00", &old}, {"n01", nil}},
	}
	if _, err := c.create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	bob := a.client("bob")
	bob.outwait = time.Second
	if _, err := bob.Drive(t.Context(), params.ID, Resume{}); err == nil || !strings.Contains(err.Error(), "never begun") {
		t.Errorf("got %v", err)
	}
	if _, err := bob.Undo(t.Context(), params.ID, false); err != nil {
		t.Error(err)
	}
	if list, err := bob.List(t.Context()); err != nil || len(list) > 0 {
		t.Errorf("%v, %+v", err, list)
	}
}

// TestKilled kills a driver before each of its writes, from the first claim on. Another driver gives all nodes
// the new profile and, after another kill, undoes it.
func TestKilled(t *testing.T) {
	t.Parallel()
	kill := func(a *api, writes int64) (survived func() bool) {
		var made atomic.Int64
		a.intercept(func(string, string) bool { return made.Add(1) <= writes })
		return func() bool { return made.Load() <= writes }
	}
	for writes, over := int64(0), false; !over; writes++ {
		a := startAPI(t, names(3)...)
		a.refusal = http.StatusForbidden // It ends without another word.
		alice, bob := a.client("alice"), a.client("bob")
		bob.outwait = 50 * time.Millisecond
		survived := kill(a, writes)
		if r, err := alice.Start(t.Context(), spec); err == nil {
			_, _ = alice.Drive(t.Context(), r.ID, Resume{})
		}
		over = survived()
		a.intercept(nil)
		list, err := bob.List(t.Context())
		if err != nil || len(list) > 1 {
			t.Fatal(err, list)
		}
		if len(list) == 0 {
			expect(t, a, "old", names(3)...)
			continue
		}
		id := list[0].ID
		if list[0].Phase != Claiming && list[0].Phase != Finished {
			if r, err := bob.Drive(t.Context(), id, Resume{}); err != nil || r.Phase != Finished {
				t.Fatalf("killed after %d writes: %v: %+v", writes, err, r)
			}
			expect(t, a, "new", names(3)...)
		}
		kill(a, writes)
		_, _ = bob.Undo(t.Context(), id, false)
		a.intercept(nil)
		carol := a.client("carol")
		carol.outwait = 50 * time.Millisecond
		if _, err := carol.Find(t.Context(), id); err == nil { // Otherwise it was given back.
			if r, err := carol.Undo(t.Context(), id, false); err != nil {
				t.Fatalf("killed after %d writes: %v: %+v", writes, err, r)
			}
		}
		expect(t, a, "old", names(3)...)
	}
}

// TestLeaseTaken checks that if two resume at once, one is refused, whether the other is faster in taking the lease
// or in renewing it.
func TestLeaseTaken(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"when it is taken", "when it is renewed"} {
		a := startAPI(t, names(2)...)
		a.behave(nil)
		r := start(t, a.client("alice"), spec)
		a.editState(r.ID, func(s *State) { s.Holder = "" })
		bob := a.client("bob")
		bob.lease = 300 * time.Millisecond
		var taken atomic.Int64
		a.intercept(func(_, body string) bool {
			if !strings.Contains(body, `"holder":"bob"`) {
				return true
			}
			// First the lease is taken, then the phase is written, and then the lease is renewed.
			if call := taken.Add(1); call == 1 && at == "when it is taken" || call == 3 && at == "when it is renewed" {
				a.editState(r.ID, func(s *State) { s.Phase, s.Holder = Running, "carol" })
			}
			return true
		})
		if _, err := bob.Drive(t.Context(), r.ID, Resume{}); !errors.Is(err, errHeld) {
			t.Errorf("%s: %v", at, err)
		}
		if r = find(t, bob, r.ID); r.Holder != "carol" {
			t.Errorf("%s: %+v", at, r.State)
		}
	}
}
