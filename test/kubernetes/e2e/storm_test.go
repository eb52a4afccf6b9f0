package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// The storm: so many pods and switches, at most so many pods at once.
const (
	stormPods     = 300
	stormSwitches = 100
	stormCrowd    = 60
	stormMap      = "storm"
)

// storm creates and deletes pods of all that is on offer while the profile changes.
type storm struct {
	c       *cluster
	random  *rand.Rand
	diary   *diary
	kubelet api.PodResourcesListerClient
	tenants *tenants

	// profile is the label's, edited says of each whether its text is the other one.
	profile  int
	edited   []bool
	layout   layout
	switches []switching
	created  int
	// leaving is when each pod that is there is to go, most how many ran at once.
	leaving map[string]time.Time
	most    int
}

// switching is a change of what the node is to offer.
type switching struct {
	at       time.Time
	from, to layout
	name     string
}

func testStorm(t *testing.T, c *cluster) {
	s := &storm{c: c, random: rand.New(rand.NewPCG(1, 1)), edited: make([]bool, len(stormProfiles)), leaving: map[string]time.Time{}}
	t.Cleanup(func() { c.clear(t) })
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
		s.most = max(s.most, s.diary.running())
	}
	s.end(t)
}

func (s *storm) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int64N(int64(most-least)))
}

// begin installs Virgate and follows what happens from then on.
func (s *storm) begin(t *testing.T) {
	texts := map[string]string{}
	for _, profile := range stormProfiles {
		texts[profile.name] = profile.text(t, profile.shares)
	}
	s.c.createNamespace(t, namespace)
	s.c.profiles(t, stormMap, texts)
	s.c.label(t, "side-by-side")
	t.Cleanup(func() { s.c.label(t, "") })
	s.c.install(t, "node=sim:dgx-a100", "config.name="+stormMap, quickly)
	s.c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 16})
	s.kubelet = s.c.kubeletSays(t)
	gpus := slices.Concat(units(t, s.kubelet, "nvidia.com/gpu.shared"), units(t, s.kubelet, "nvidia.com/gpu"))
	s.profile = 1
	profile := stormProfiles[s.profile]
	s.layout = profile.layout(profile.shares)
	s.c.label(t, profile.name)
	s.c.offers(t, map[string]int64{"nvidia.com/gpu": 80})
	s.diary = s.c.keepDiary(t)
	s.tenants = followTenants(t, s.kubelet, s.diary, gpus)
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
	s.switches = append(s.switches, switching{time.Now(), s.layout, to, fmt.Sprintf("%s %s (%d)", name, profile.name, shares)})
	s.layout = to
	if name == "label" {
		s.c.label(t, profile.name)
		return
	}
	s.c.editProfile(t, stormMap, profile.name, profile.text(t, shares))
}

// nextProfile is another one, most often one of the first two: a GPU goes over to
// another name only when nobody holds it.
func (s *storm) nextProfile() int {
	if next := s.random.IntN(2); next != s.profile && s.random.IntN(4) > 0 {
		return next
	}
	return (s.profile + 1 + s.random.IntN(len(stormProfiles)-1)) % len(stormProfiles)
}

// addPod creates a pod for one of a resource that the node's status says it has.
func (s *storm) addPod(t *testing.T) {
	t.Helper()
	names := s.diary.onOffer()
	if len(names) == 0 {
		return
	}
	one := pod(fmt.Sprintf("storm-%d", s.created), names[s.random.IntN(len(names))], 1)
	if _, err := s.c.client.CoreV1().Pods(workspace).Create(t.Context(), one, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.created++
	s.leaving[one.Name] = time.Now().Add(s.between(10*time.Second, 70*time.Second))
}

// removePods deletes those whose time has come, and those that were refused.
func (s *storm) removePods(t *testing.T, now time.Time) {
	t.Helper()
	for name, leaves := range s.leaving {
		if now.Before(leaves) && !s.diary.isRefused(name) {
			continue
		}
		s.diary.deleting(name)
		if err := s.c.client.CoreV1().Pods(workspace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		delete(s.leaving, name)
	}
}

// standStill waits until the node offers what it is to offer with what pods hold,
// and looks that each pod sees what the kubelet says it holds.
func (s *storm) standStill(t *testing.T) {
	t.Helper()
	s.c.await(t, time.Minute, "the node to come to rest", func() error {
		held := s.tenants.counts()
		want := map[string]int64{}
		for _, resource := range []string{"nvidia.com/gpu", "nvidia.com/gpu.shared"} {
			if count := s.layout.offers(resource, held); count > 0 {
				want[resource] = count
			}
		}
		return differs(want, s.c.node(t).Status.Allocatable)
	})
	for name, held := range s.tenants.now() {
		if !s.diary.runs(name) {
			continue
		}
		if got := s.c.printedVariable(t, name, "NVIDIA_VISIBLE_DEVICES"); len(held) != 1 || got != held[0].unit {
			t.Errorf("pod %s sees %q and holds %v", name, got, held)
		}
	}
}

// end takes all away and judges what the diary says.
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
