package e2e

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/virgate/virgate/test/repeat"
)

// sharingMode is how a GPU is offered: its resource name, and whether it is shared.
type sharingMode struct {
	resource string
	shared   bool
}

// layout is the number of devices that each of the node's eight GPUs should have in each mode, worked out
// from a profile by hand.
type layout map[sharingMode][8]int

// alike gives this count to the GPUs from first to last, excluding last.
func alike(count, first, last int) (counts [8]int) {
	for i := first; i < last; i++ {
		counts[i] = count
	}
	return counts
}

// change reports whether the second layout gives a resource more than the first, and whether it takes some
// away. A change of mode does both.
func change(from, to layout, resource string) (gives, takes bool) {
	for _, shared := range []bool{false, true} {
		w := sharingMode{resource, shared}
		for gpu := range to[w] {
			gives = gives || to[w][gpu] > from[w][gpu]
			takes = takes || to[w][gpu] < from[w][gpu]
		}
	}
	return gives, takes
}

// offers returns how many of the resource the node has at rest, when pods hold this many devices of each GPU
// in each mode. Devices held beyond a smaller number of shares stay allocatable; devices held in a mode that
// ends do not. A GPU is offered in its new mode when no pod holds it in another. If a pod holds a GPU alone
// that should be shared under the same name, the GPU stays that pod's, and allocatable.
func (l layout) offers(resource string, held map[sharingMode][8]int) (count int64) {
	for gpu := range 8 {
		for _, shared := range []bool{false, true} {
			w := sharingMode{resource, shared}
			switch alone := held[sharingMode{resource, false}][gpu]; {
			case l[w][gpu] == 0:
			case !heldOtherwise(held, w, gpu):
				count += int64(max(held[w][gpu], l[w][gpu]))
			case shared && alone > 0:
				count++
			}
		}
	}
	return count
}

func heldOtherwise(held map[sharingMode][8]int, than sharingMode, gpu int) bool {
	for w, counts := range held {
		if w != than && counts[gpu] > 0 {
			return true
		}
	}
	return false
}

// stormResources are all resources of the layouts.
var stormResources = []string{"nvidia.com/gpu", "nvidia.com/gpu.shared"}

// stormProfile is one of the example profiles whose number of shares the storm edits.
type stormProfile struct {
	name string
	// shares is the number in the file, edited the other number.
	shares, edited int
	layout         func(shares int) layout
}

var stormProfiles = []stormProfile{
	{"time-slicing-4", 4, 6, func(shares int) layout { return layout{{"nvidia.com/gpu", true}: alike(shares, 0, 8)} }},
	{"time-slicing-10-packed", 10, 7, func(shares int) layout { return layout{{"nvidia.com/gpu", true}: alike(shares, 0, 8)} }},
	{"time-slicing-4-renamed", 4, 8, func(shares int) layout { return layout{{"nvidia.com/gpu.shared", true}: alike(shares, 0, 8)} }},
	{"side-by-side", 8, 5, func(shares int) layout {
		return layout{{"nvidia.com/gpu.shared", true}: alike(shares, 0, 2), {"nvidia.com/gpu", false}: alike(1, 2, 8)}
	}},
}

// text is the profile with that number of shares.
func (p stormProfile) text(t *testing.T, shares int) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("..", "..", "..", "configs", "examples", p.name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	before := "replicas: " + strconv.Itoa(p.shares)
	if strings.Count(string(content), before) != 1 {
		t.Fatalf("profile %s has not one %q", p.name, before)
	}
	return strings.Replace(string(content), before, "replicas: "+strconv.Itoa(shares), 1)
}

// stormPods and stormSwitches are the storm's numbers of pods and of profile switches.
var stormPods, stormSwitches = repeat.Times(50, 150), repeat.Times(12, 40)

const (
	stormCrowd = 60
	stormMap   = "storm"
)

// storm creates and deletes pods of all offered resources while the profile changes.
type storm struct {
	// name is the name of the part, and the prefix of its pods' names.
	name    string
	c       *cluster
	random  *rand.Rand
	events  *eventLog
	kubelet api.PodResourcesListerClient
	monitor *shareMonitor

	// profile is the label's profile; edited tells for each profile whether its text is the edited one.
	profile  int
	edited   []bool
	layout   layout
	switches []switching
	// rests are the times when the node had come to offer what it should.
	rests   []time.Time
	created int
	// leaving is when each existing pod is to be deleted: between atLeast and upTo after it came. most is
	// the most that ran at once.
	leaving       map[string]time.Time
	atLeast, upTo time.Duration
	most          int
}

// switching is a change of the devices that the node should offer. shown is when the node's status had all
// of it.
type switching struct {
	at, shown time.Time
	from, to  layout
	name      string
}

// newStorm returns a storm whose pods stay between atLeast and upTo; they are deleted at the end of the
// test.
func newStorm(t *testing.T, c *cluster, name string, atLeast, upTo time.Duration) *storm {
	t.Helper()
	t.Cleanup(func() { c.clear(t) })
	return &storm{
		c: c, name: name, random: rand.New(rand.NewPCG(1, 1)), kubelet: c.kubeletSays(t),
		edited: make([]bool, len(stormProfiles)), leaving: map[string]time.Time{}, atLeast: atLeast, upTo: upTo,
	}
}

func testStorm(t *testing.T, c *cluster) {
	s := newStorm(t, c, "storm", 10*time.Second, 70*time.Second)
	s.begin(t)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	var nextPod, nextSwitch time.Time
	for s.created < stormPods || len(s.switches) < stormSwitches {
		now := <-tick.C
		if now.After(nextPod) && s.created < stormPods && len(s.leaving) < stormCrowd {
			s.addPod(t)
			nextPod = now.Add(s.between(0, 1200*time.Millisecond))
		}
		if now.After(nextSwitch) && len(s.switches) < stormSwitches {
			s.change(t)
			nextSwitch = now.Add(s.between(time.Second, 3*time.Second))
			if len(s.switches)%(stormSwitches/4) == 0 {
				s.standStill(t)
			}
		}
		s.removePods(t, now)
		s.most = max(s.most, s.events.running())
	}
	s.end(t)
	s.reportSwitches()
}

func (s *storm) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int64N(int64(most-least)))
}

// begin installs Virgate and starts to follow the node and the pods.
func (s *storm) begin(t *testing.T) {
	texts := map[string]string{}
	for _, profile := range stormProfiles {
		texts[profile.name] = profile.text(t, profile.shares)
	}
	s.c.createNamespace(t, namespace)
	s.c.profiles(t, stormMap, texts)
	s.c.label(t, "side-by-side")
	t.Cleanup(func() { s.c.label(t, "") })
	s.c.install(t, "node=sim:dgx-a100", "config.name="+stormMap)
	s.c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 16})
	gpus := slices.Concat(units(t, s.kubelet, "nvidia.com/gpu.shared"), units(t, s.kubelet, "nvidia.com/gpu"))
	s.profile = 1
	profile := stormProfiles[s.profile]
	s.layout = profile.layout(profile.shares)
	s.c.label(t, profile.name)
	s.c.offers(t, map[string]int64{"nvidia.com/gpu": 80})
	s.follow(t, gpus)
}

// follow begins to watch the node and the pods.
func (s *storm) follow(t *testing.T, gpus []string) {
	t.Helper()
	s.events = s.c.watchCluster(t)
	s.monitor = startShareMonitor(t, s.kubelet, s.events, gpus, s.layout)
}

// change gives the node another label, or the label's profile another text.
func (s *storm) change(t *testing.T) {
	t.Helper()
	name := "edit"
	if s.random.IntN(3) == 0 {
		s.edited[s.profile] = !s.edited[s.profile]
	} else {
		s.profile = s.nextProfile()
		name = "label"
	}
	profile := stormProfiles[s.profile]
	shares := profile.shares
	if s.edited[s.profile] {
		shares = profile.edited
	}
	to := profile.layout(shares)
	s.goTo(fmt.Sprintf("%s %s (%d)", name, profile.name, shares), to)
	if name == "label" {
		s.c.label(t, profile.name)
		return
	}
	s.c.editProfile(t, stormMap, profile.name, profile.text(t, shares))
}

// goTo notes that the node is now asked for that layout.
func (s *storm) goTo(name string, to layout) {
	s.monitor.want(to)
	s.switches = append(s.switches, switching{at: time.Now(), from: s.layout, to: to, name: name})
	s.layout = to
}

// nextProfile returns another profile, most often one of the first two: a GPU changes to another name only
// when no pod holds it.
func (s *storm) nextProfile() int {
	if next := s.random.IntN(2); next != s.profile && s.random.IntN(4) > 0 {
		return next
	}
	return (s.profile + 1 + s.random.IntN(len(stormProfiles)-1)) % len(stormProfiles)
}

// addPod creates a pod that requests a resource of the node's status.
func (s *storm) addPod(t *testing.T) {
	t.Helper()
	names := s.events.onOffer()
	if len(names) == 0 {
		return
	}
	one := pod(fmt.Sprintf("%s-%d", s.name, s.created), names[s.random.IntN(len(names))], 1)
	if _, err := s.c.client.CoreV1().Pods(workspace).Create(t.Context(), one, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.created++
	s.leaving[one.Name] = time.Now().Add(s.between(s.atLeast, s.upTo))
}

// removePods deletes the pods whose time is over, and the refused ones.
func (s *storm) removePods(t *testing.T, now time.Time) {
	t.Helper()
	for name, leaves := range s.leaving {
		if !now.Before(leaves) || s.events.isRefused(name) {
			s.removePod(t, name)
		}
	}
}

func (s *storm) removePod(t *testing.T, name string) {
	t.Helper()
	s.events.deleting(name)
	if err := s.c.client.CoreV1().Pods(workspace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	delete(s.leaving, name)
}

// standStill waits until the node offers what it should beside what pods hold, and checks that each pod
// sees what the kubelet says it holds. If the kubelet has given a device to two pods, it deletes one, as
// docs/how-to/troubleshoot-containers.md says.
func (s *storm) standStill(t *testing.T) {
	t.Helper()
	before := s.monitor.looked()
	s.c.await(t, "the node to come to rest", func() error {
		if err := s.monitor.lookedSince(before); err != nil {
			return err
		}
		for _, name := range s.monitor.givenToTwo() {
			if _, stays := s.leaving[name]; stays {
				s.removePod(t, name)
			}
		}
		if complaints := s.monitor.unlike(); len(complaints) > 0 {
			return fmt.Errorf("%q", complaints)
		}
		if err := differs(s.wanted(), s.c.node(t).Status.Allocatable); err != nil {
			return fmt.Errorf("%w\nholders: %q", err, s.monitor.odd())
		}
		return nil
	})
	for name, held := range s.monitor.last().held {
		if !s.events.runs(name) {
			continue
		}
		if got := s.c.printedVariable(t, name, "NVIDIA_VISIBLE_DEVICES"); len(held) != 1 || got != held[0].unit {
			t.Errorf("pod %s sees %q and holds %v", name, got, held)
		}
	}
	s.rest()
}

// rest notes that the node offers what it should.
func (s *storm) rest() {
	s.rests = append(s.rests, time.Now())
	s.monitor.rest()
}

// around returns the time span of events that can be related to that moment: from the last rest but one
// before it to the second one after it. At a rest, Virgate, the kubelet and the API server agree. The
// scheduler, the kubelet's copy of the node and the test's own watches learn of it later, but before the
// next rest. That order holds however slow the machine is.
func (s *storm) around(moment time.Time) (from, to time.Time) {
	next := sort.Search(len(s.rests), func(i int) bool { return s.rests[i].After(moment) })
	to = time.Now()
	if next >= 2 {
		from = s.rests[next-2]
	}
	if next+1 < len(s.rests) {
		to = s.rests[next+1]
	}
	return from, to
}

// wanted is what the node should offer beside what pods hold now.
func (s *storm) wanted() map[string]int64 {
	held := s.monitor.counts()
	want := map[string]int64{}
	for _, resource := range stormResources {
		if count := s.layout.offers(resource, held); count > 0 {
			want[resource] = count
		}
	}
	return want
}

// end removes all pods and judges the event log.
func (s *storm) end(t *testing.T) {
	t.Helper()
	s.standStill(t)
	s.removePods(t, time.Now().Add(time.Hour))
	s.c.clear(t)
	s.standStill(t)
	if status := s.c.plugin(t).Status.ContainerStatuses[0]; status.RestartCount > 0 {
		t.Errorf("Virgate was restarted: %v", status)
	}
	s.judge(t)
}

// judge checks the event log of a storm. The kubelet may have less of a resource only because of a switch,
// or because pods ended whose devices the profile no longer has. A pod may be refused only if it was bound
// while the node's status had more than the kubelet.
func (s *storm) judge(t *testing.T) {
	t.Helper()
	s.events.mu.Lock()
	defer s.events.mu.Unlock()
	if len(s.events.wrong) > 20 {
		t.Errorf("of %d complaints the first:", len(s.events.wrong))
	}
	for _, wrong := range s.events.wrong[:min(len(s.events.wrong), 20)] {
		t.Error(wrong)
	}
	for _, each := range s.falls() {
		if each.cause == "" {
			t.Errorf("%s fell from %d to %d at %s for no reason; switches before: %s", each.resource, each.from, each.to, each.at.Format(clock), s.lately(each.at))
		}
	}
	ran, refused := 0, 0
	for _, name := range slices.Sorted(maps.Keys(s.events.pods)) {
		l := s.events.pods[name]
		if !l.ran.IsZero() {
			ran++
		}
		if l.refused.IsZero() {
			continue
		}
		refused++
		why := s.overtaken(l)
		if why == "" {
			t.Errorf("pod %s, bound %s and refused %s: %s; switches before: %s",
				name, l.bound.Format(clock), l.refused.Format(clock), l.refusal, s.lately(l.refused))
			continue
		}
		t.Logf("pod %s was overtaken: %s", name, why)
	}
	note := func(what, value string) { s.c.report.note(s.name+": "+what, value) }
	note("pods made, ran, refused because a shrink overtook them", fmt.Sprintf("%d, %d, %d", len(s.events.pods), ran, refused))
	note("pods that ran at once, at most", fmt.Sprint(s.most))
	note("times the kubelet had less of a resource, all for a reason", fmt.Sprint(len(s.falls())))
	note("looks in which the kubelet had given one whole GPU to two pods", fmt.Sprint(s.monitor.givenTwice.Load()))
	note("until the health of what pods hold followed a switch, at most", time.Duration(s.monitor.slowest.Load()).Round(time.Millisecond).String())
}

// overtaken returns why the pod was refused; empty if all sources agreed. The scheduler used the node's
// status, the kubelet its own devices or its copy of the status, and each of these may be as old as around
// allows.
func (s *storm) overtaken(l *podRecord) string {
	from, _ := s.around(l.bound)
	statuses, states := during(s.events.statuses, from, l.refused), during(s.events.kubeletStates, from, l.refused)
	most, least := int64(0), int64(math.MaxInt64)
	for i, each := range slices.Concat(statuses, states) {
		has := each.allocatable[l.resource]
		least = min(least, has)
		if i < len(statuses) {
			most = max(most, has)
		}
	}
	if least >= most {
		return ""
	}
	return fmt.Sprintf("bound %s and refused %s: between %d and %d of %s since %s", l.bound.Format(clock), l.refused.Format(clock), least, most, l.resource, from.Format(clock))
}

// during returns the statuses that held at any moment of the span, and the next two: they may have been
// true before they were seen.
func during(all []status, from, to time.Time) []status {
	first := sort.Search(len(all), func(i int) bool { return all[i].at.After(from) })
	last := sort.Search(len(all), func(i int) bool { return all[i].at.After(to) })
	return all[max(0, first-1):min(len(all), last+2)]
}

const clock = "15:04:05.000"

// fall is a moment when the kubelet has less of a resource than before.
type fall struct {
	at       time.Time
	resource string
	from, to int64
	cause    string // Empty if no allowed cause explains it.
}

func (s *storm) falls() []fall {
	var all []fall
	for i := 1; i < len(s.events.kubeletStates); i++ {
		before, now := s.events.kubeletStates[i-1].allocatable, s.events.kubeletStates[i]
		for resource, from := range before {
			if to := now.allocatable[resource]; to < from {
				all = append(all, fall{now.at, resource, from, to, s.cause(now.at, resource, from-to)})
			}
		}
	}
	return all
}

// cause returns why the kubelet may have lost this many of a resource at that time.
func (s *storm) cause(at time.Time, resource string, count int64) string {
	from, to := s.around(at)
	for _, each := range slices.Backward(s.switches) {
		if _, takes := change(each.from, each.to, resource); takes && each.at.After(from) && each.at.Before(at) {
			return fmt.Sprintf("%s after %s", at.Sub(each.at).Round(time.Millisecond), each.name)
		}
	}
	ended := int64(0) // Before or after: the API server learns late when fifty pods end together.
	for _, l := range s.events.pods {
		if l.resource == resource && !l.ran.IsZero() && l.ended.After(from) && l.ended.Before(to) {
			ended++
		}
	}
	if ended >= count {
		return fmt.Sprintf("when %d pods with it had ended", ended)
	}
	return ""
}

// lately lists the switches that could matter at that time.
func (s *storm) lately(at time.Time) string {
	from, _ := s.around(at)
	var names []string
	for _, each := range s.switches {
		if each.at.After(from) && each.at.Before(at) {
			names = append(names, fmt.Sprintf("%s at %s", each.name, each.at.Format(clock)))
		}
	}
	return fmt.Sprintf("%q since %s", names, from.Format(clock))
}

// reportSwitches notes the time from a switch to the first status of the node that shows it: less of what
// the switch takes, or more of what it gives.
func (s *storm) reportSwitches() {
	s.events.mu.Lock()
	defer s.events.mu.Unlock()
	var times []time.Duration
	for i, each := range s.switches {
		end := time.Now()
		if i+1 < len(s.switches) {
			end = s.switches[i+1].at
		}
		if took, ok := s.shown(each, end); ok {
			times = append(times, took)
		}
	}
	slices.Sort(times)
	s.c.report.note("storm: switches, seen in allocatable before the next", fmt.Sprintf("%d, %d", len(s.switches), len(times)))
	if len(times) > 0 {
		s.c.report.note("storm: switch to allocatable, median and worst", fmt.Sprintf("%s, %s",
			times[len(times)/2].Round(time.Millisecond), times[len(times)-1].Round(time.Millisecond)))
	}
}

func (s *storm) shown(by switching, end time.Time) (took time.Duration, ok bool) {
	for i := 1; i < len(s.events.statuses); i++ {
		now := s.events.statuses[i]
		if now.at.Before(by.at) || now.at.After(end) {
			continue
		}
		for _, resource := range stormResources {
			gives, takes := change(by.from, by.to, resource)
			before, after := s.events.statuses[i-1].allocatable[resource], now.allocatable[resource]
			if gives && after > before || takes && after < before {
				return now.at.Sub(by.at), true
			}
		}
	}
	return 0, false
}
