package configsource

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/test/await"
)

const (
	byPool = "rules:\n- nodeSelector: {pool: a}\n  profile: four\n- nodeSelector: {pool: b}\n  profile: ten\n"
	// byModel needs the GPUs; its first rule does not.
	byModel = "rules:\n- nodeSelector: {pool: a}\n  profile: four\n- nodeSelector: {nvidia.com/gpu.product: H100}\n  profile: ten\n"
)

var two = strings.Replace(four, "4", "2", 1)

// pooled is the Node with labels in pairs of name and value.
func pooled(labels ...string) runtime.Object {
	node := fakeNode("n1", "").(*metav1.PartialObjectMetadata)
	for i := 0; i < len(labels); i += 2 {
		metav1.SetMetaDataLabel(&node.ObjectMeta, labels[i], labels[i+1])
	}
	return node
}

func withRules(rules string) runtime.Object {
	return fakeConfigMap(map[string]string{"two": two, "four": four, "ten": ten, configs.RulesName: rules})
}

// by waits until the reason is this one.
func (s *testNode) by(want string) {
	s.t.Helper()
	if selected, _ := s.source.Profile(); selected.Choice.By != want {
		s.t.Errorf("by %q, want by %q", selected.Choice.By, want)
	}
}

func TestRules(t *testing.T) {
	s := newTestNode(t, func(n *NodeSource) { n.Default = "two" })
	s.nodes.Change("n1", pooled("pool", "a"))
	s.maps.Change("profiles", withRules(byPool))
	s.run()
	s.await(generation(t, four), "")
	s.by("rule 1 of ConfigMap gpu/profiles")

	// Labels that come, go and change.
	s.nodes.Change("n1", pooled("pool", "b"))
	s.await(generation(t, ten), "")
	s.by("rule 2 of ConfigMap gpu/profiles")
	s.nodes.Change("n1", pooled())
	s.await(generation(t, two), "")
	s.by("default: no rule of ConfigMap gpu/profiles matches")
	s.nodes.Change("n1", pooled("pool", "b", labelName, "four"))
	s.await(generation(t, four), "")
	s.by("label " + labelName)
	s.nodes.Change("n1", pooled("pool", "b"))
	s.await(generation(t, ten), "")

	// An edit, a broken one, and the way back.
	s.maps.Change("profiles", withRules(strings.Replace(byPool, "ten", "two", 1)))
	s.await(generation(t, two), "")
	broken := strings.Replace(byPool, "profile: ten", "profile: eleven", 1)
	s.maps.Change("profiles", withRules(broken))
	s.await(generation(t, two), `ConfigMap gpu/profiles[virgate-rules]:5: rules[1].profile: rule 2: no profile has this name, there is four, ten, two (got "eleven")`)
	s.by("refused rules of ConfigMap gpu/profiles")
	s.nodes.Change("n1", pooled("pool", "a"))
	s.await(generation(t, two), "rule 2: no profile has this name")
	s.nodes.Change("n1", pooled("pool", "a", labelName, "ten")) // A node that needs another profile now has the label.
	s.await(generation(t, ten), "")
	s.nodes.Change("n1", pooled("pool", "a"))
	s.await(generation(t, ten), "rule 2: no profile has this name")
	s.maps.Change("profiles", withRules(byPool))
	s.await(generation(t, four), "")
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"two": two, "four": four}))
	s.await(generation(t, two), "")
	s.by("default")

	// Nothing changes while the API server is away.
	s.maps.Change("profiles", withRules(byPool))
	s.await(generation(t, four), "")
	s.maps.SetAway(errors.New("connection refused"))
	s.nodes.SetAway(errors.New("connection refused"))
	s.await(generation(t, four), "")
	s.nodes.Change("n1", pooled("pool", "b"))
	s.maps.SetAway(nil)
	s.nodes.SetAway(nil)
	s.await(generation(t, ten), "")
}

// TestRulesLayout has a rule name a MIG layout, which the Node's own label replaces.
func TestRulesLayout(t *testing.T) {
	rules := "rules: [{nodeSelector: {pool: a}, profile: mig, mig: all-1g.5gb}, {nodeSelector: {pool: b}, profile: four, mig: all-1g.5gb}]"
	layout := func(name string) string { return generation(t, strings.Replace(cutting, "all-balanced", name, 1)) }
	s := newTestNode(t, nil)
	s.nodes.Change("n1", pooled("pool", "a"))
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"mig": cutting, "four": four, configs.RulesName: rules}))
	s.run()
	s.await(layout("all-1g.5gb"), "")
	s.nodes.Change("n1", pooled("pool", "a", MIGLabel, "all-disabled"))
	s.await(layout("all-disabled"), "")
	s.nodes.Change("n1", pooled("pool", "b"))
	s.await(layout("all-disabled"), `ConfigMap gpu/profiles[four]: rule 2 of ConfigMap gpu/profiles: MIG layout "all-1g.5gb": the profile does not have mig.manage: true`)
	if wanted, err := s.source.Profile(); !errors.Is(err, configs.ErrMIGLayout) || wanted.Choice.Rule != 2 {
		t.Errorf("%+v, %v", wanted.Choice, err)
	}
}

// TestRulesBeforeTheGPUs uses the default until the node's GPUs are known, if they matter.
func TestRulesBeforeTheGPUs(t *testing.T) {
	var inventory atomic.Pointer[map[string]string]
	s := newTestNode(t, func(n *NodeSource) {
		n.Default = "two"
		n.Inventory = func() map[string]string {
			if known := inventory.Load(); known != nil {
				return *known
			}
			return nil
		}
	})
	s.nodes.Change("n1", pooled("nvidia.com/gpu.product", "H100"))
	s.maps.Change("profiles", withRules(byModel))
	s.run()
	s.await(generation(t, two), "")
	s.by("default: until the node's GPUs are known, because rule 2 of ConfigMap gpu/profiles asks for nvidia.com/gpu.product")
	awaits := func(want bool) {
		t.Helper()
		if selected, _ := s.source.Profile(); selected.Choice.AwaitsGPUs != want {
			t.Errorf("awaits the GPUs: %t, want %t", selected.Choice.AwaitsGPUs, want)
		}
	}
	awaits(true)
	s.nodes.Change("n1", pooled("pool", "a"))
	s.await(generation(t, four), "")
	awaits(false)
	inventory.Store(&map[string]string{"nvidia.com/gpu.product": "H100"})
	s.nodes.Change("n1", pooled())
	s.await(generation(t, ten), "")
	s.by("rule 2 of ConfigMap gpu/profiles")
	awaits(false)
	inventory.Store(&map[string]string{"nvidia.com/gpu.product": "A100"})
	s.look()
	s.await(generation(t, two), "")

	// Such a rule cannot put a profile with other process settings into force, and the error gives the reason.
	ten := ten + "flags: {failOnInitError: false}\n"
	s.maps.Change("profiles", fakeConfigMap(map[string]string{"four": four, "two": two, "ten": ten, configs.RulesName: byModel}))
	await.True(t, "the changed ConfigMap", func() bool {
		documents, err := s.source.Source.Documents()
		return err == nil && documents["ten"] == ten
	})
	inventory.Store(&map[string]string{"nvidia.com/gpu.product": "H100"})
	s.look()
	s.await(generation(t, two), "the process starts with the default's settings")
}

// TestRulesWithoutGPUs checks that a program that never knows the GPUs reports that, and chooses nothing in place
// of a rule's profile.
func TestRulesWithoutGPUs(t *testing.T) {
	s := newTestNode(t, func(n *NodeSource) { n.Default = "two" })
	s.nodes.Change("n1", pooled("pool", "a"))
	s.maps.Change("profiles", withRules(byModel))
	s.run()
	s.await(generation(t, four), "")
	s.nodes.Change("n1", pooled())
	s.await(generation(t, four), "ConfigMap gpu/profiles[virgate-rules]: rule 2 asks for nvidia.com/gpu.product, which only virgate run")
	if wanted, _ := s.source.Profile(); wanted.Name != "" {
		t.Errorf("%s is named, which a rule may replace", wanted.Name)
	}
}

// TestRulesSpread checks that a changed ConfigMap takes effect within the time in its rules, on each node at a
// different moment.
func TestRulesSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spread := func(time string) string { return "spread: " + time + "\n" + byPool }
		s := newTestNode(t, nil)
		s.nodes.Change("n1", pooled("pool", "a"))
		s.maps.Change("profiles", withRules(spread("0s")))
		s.run()
		s.await(generation(t, four), "")

		// The text of a profile changes; the rules set how fast.
		edit := func(rules string, replicas int) string {
			text := strings.Replace(four, "4", fmt.Sprint(replicas), 1)
			s.maps.Change("profiles", fakeConfigMap(map[string]string{"four": text, "ten": ten, "two": two, configs.RulesName: rules}))
			synctest.Wait()
			return generation(t, text)
		}
		delays := map[time.Duration]bool{}
		for i := range 20 {
			before, next := s.last(), edit(spread("1h"), 20+i)
			selected, err := s.source.Profile()
			if err != nil || selected.Generation != before {
				t.Fatalf("taken at once: %v", err)
			}
			delay := time.Until(selected.Delayed)
			if delay <= 0 || delay > time.Hour || delays[delay] {
				t.Fatalf("taken after %s", delay)
			}
			delays[delay] = true
			// Further changes do not delay it.
			for j := range 5 {
				next = edit(spread("1h"), 100+10*i+j)
			}
			if selected, _ := s.source.Profile(); time.Until(selected.Delayed) > delay {
				t.Fatalf("put off until %s", selected.Delayed)
			}
			sleepFor(delay)
			synctest.Wait()
			if s.last() != next {
				t.Fatal("not taken when it was due")
			}
		}

		// A change that is undone in time has no effect.
		applied := len(s.applied)
		edit(spread("1h"), 5)
		edit(spread("1h"), 294)
		sleepFor(2 * time.Hour)
		synctest.Wait()
		if selected, _ := s.source.Profile(); len(s.applied) != applied || !selected.Delayed.IsZero() {
			t.Errorf("%d changes by one that was taken back, delayed until %s", len(s.applied)-applied, selected.Delayed)
		}

		// The node's labels count at once, also its own profile label, which can name a new profile.
		edit(spread("1h"), 6)
		s.nodes.Change("n1", pooled("pool", "b"))
		synctest.Wait()
		if s.last() != generation(t, ten) {
			t.Error("a label waits for the ConfigMap")
		}
		s.nodes.Change("n1", pooled("pool", "b", labelName, "four"))
		synctest.Wait()
		if s.last() != generation(t, strings.Replace(four, "4", "6", 1)) {
			t.Error("the node's own label names what is not there yet")
		}
		s.nodes.Change("n1", pooled("pool", "a"))
		synctest.Wait()
		// Without a spread, changes and errors take effect at once.
		next := edit(spread("1h"), 7)
		if s.last() == next {
			t.Error("taken at once")
		}
		if next = edit(spread("0s"), 8); s.last() != next {
			t.Error("not taken at once")
		}
		edit(strings.Replace(spread("1h"), "profile: ten", "profile: x", 1), 9)
		if s.problem == nil || s.last() != next {
			t.Errorf("a broken list: %v", s.problem)
		}
		// The next list ends the refusal at once. After that, the spread counts again.
		next = edit(spread("1h"), 10)
		if s.problem != nil || s.last() != next {
			t.Errorf("after a broken list: %v", s.problem)
		}
		edit(spread("1h"), 11)
		if s.last() != next {
			t.Error("taken at once")
		}
		s.stop()
	})
}

// last is the generation in force.
func (s *testNode) last() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.applied[len(s.applied)-1]
}

// sleepFor lets the time of a synctest bubble pass.
func sleepFor(d time.Duration) { <-time.After(d) } //nolint:forbidigo // the time is simulated

// TestRulesAnySequence checks that for any changes of labels and rules, each profile in force follows from some
// valid rules and some labels, a broken list changes nothing, and the last rules and labels decide in the end.
func TestRulesAnySequence(t *testing.T) {
	for seed := range uint64(10) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				random := rand.New(rand.NewPCG(seed, 2))
				s := newTestNode(t, func(n *NodeSource) { n.Default = "two" })
				documents := map[string]string{"two": two, "four": four, "ten": ten}
				labels := map[string]string{}
				lists := []string{byPool, strings.Replace(byPool, "pool: a", "zone: a", 1), "rules: [{nodeSelector: {}, profile: ten}]", "rules: 7", strings.Replace(byPool, "ten", "x", 1), ""}
				put := func() {
					var pairs []string
					for name, value := range labels {
						pairs = append(pairs, name, value)
					}
					s.nodes.Change("n1", pooled(pairs...))
					s.maps.Change("profiles", fakeConfigMap(maps.Clone(documents)))
				}
				put()
				s.run()
				for range 80 {
					switch name := []string{"pool", "zone", labelName}[random.IntN(3)]; random.IntN(5) {
					case 0:
						documents[configs.RulesName] = lists[random.IntN(len(lists))]
					case 1:
						delete(documents, configs.RulesName)
					case 2:
						delete(labels, name)
					default:
						labels[name] = []string{"a", "b"}[random.IntN(2)]
						if name == labelName {
							labels[name] = []string{"four", "ten"}[random.IntN(2)]
						}
					}
					before := "" // The profile that was in force.
					if synctest.Wait(); len(s.applied) > 0 {
						before = s.last()
					}
					put()
					synctest.Wait()
					rules, there, err := configs.Documents(documents).Rules("")
					want, match := "two", rules.Match(labels, nil)
					switch {
					case labels[labelName] != "":
						want = labels[labelName]
					case there && err != nil:
						if s.problem == nil || before != "" && s.last() != before && !sameStep(s, before) {
							t.Fatalf("a broken list: %v", s.problem)
						}
						continue
					case match.Number > 0:
						want = match.Rule.Profile
					}
					if s.problem != nil || s.last() != generation(t, documents[want]) {
						t.Fatalf("%v with %v and %q", s.problem, labels, documents[configs.RulesName])
					}
				}
				s.stop()
			})
		})
	}
}

// sameStep reports whether the last change came from the labels, which were set before the broken list.
func sameStep(s *testNode, before string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.applied) > 1 && s.applied[len(s.applied)-2] == before
}
