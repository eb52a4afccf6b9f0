package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/virgate/virgate/test/repeat"
)

// draStormPods is the number of pods in the storm by claims and by name.
var draStormPods = repeat.Times(60, 200)

const (
	draStormCrowd  = 30
	draStormShares = 4
)

// The kinds of pods that a draStorm makes.
const (
	byName = iota
	byShare
	byWhole
)

// draStorm creates pods by the old name, by claims of shares and by claims of whole GPUs, while the profile
// changes between the device plugin, shares by DRA and whole GPUs by DRA.
type draStorm struct {
	c      *cluster
	random *rand.Rand
	ledger *ledger

	pods                     map[string]*stormPod // Those that exist.
	made, ran, refused, flip int
	lastRan, flipped         time.Time
	profile, unhealthy       string
}

type stormPod struct {
	kind    int
	leaves  time.Time // Zero until it has run.
	deleted bool
	// deaths counts how often the kubelet had died before the pod was made.
	deaths int
}

// testDRAStorm checks what the containers really have: no GPU is given both by the plugin and by DRA, none
// whole beside another holder, and none more often than it has shares. In the end every claim got its device
// and gave it back.
func testDRAStorm(t *testing.T, c *cluster) {
	c.kubeletBug = true
	t.Cleanup(func() { c.kubeletBug = false })
	c.createNamespace(t, namespace)
	shares := replicas(fmt.Sprint(draStormShares))
	c.profiles(t, "dra-storm", map[string]string{"plugin": shares, "dra": shares + "dra: {resources: all}\n", "whole": "version: v1\ndra: {resources: all}\n"})
	t.Cleanup(func() { c.label(t, "") })
	c.label(t, "plugin")
	t.Cleanup(func() { c.uninstall(t) })
	c.install(t, "node=sim:dgx-a100", "config.name=dra-storm", "dra.enabled=true", "dra.resources={"+shared+"}", "--cdi-dir=/var/run/cdi", "--probe=2s")
	all := map[string]int64{shared: 8 * draStormShares}
	c.awaitAllocatable(t, all)
	ledger := newLedger(t, c)
	c.claimTemplate(t, "storm-share", sharedBy("time-slicing"))
	c.claimTemplate(t, "storm-whole", sharedBy("exclusive"))
	t.Cleanup(func() { c.clear(t) })

	s := &draStorm{c: c, random: rand.New(rand.NewPCG(3, 1)), ledger: ledger, pods: map[string]*stormPod{}, profile: "plugin", flipped: time.Now()}
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() { s.ledger.follow(ctx) })
	defer following.Wait()
	defer cancel()
	s.blow(t)

	s.heal(t)
	c.label(t, "dra")
	for name, pod := range s.pods { // These would need whole GPUs again.
		if pod.kind == byWhole && pod.leaves.IsZero() {
			s.delete(t, name)
		}
	}
	c.await(t, "every pod to get its share and go", func() error {
		if s.look(t); len(s.pods) > 0 {
			return fmt.Errorf("there are %q", slices.Sorted(maps.Keys(s.pods)))
		}
		return nil
	})
	c.awaitSeries(t, c.plugin(t), "virgate_claims", "0")
	c.label(t, "plugin")
	c.awaitAllocatable(t, all)
	c.awaitSlices(t, "")
	c.await(t, "no claim to be left", func() error {
		claims, err := c.client.ResourceV1().ResourceClaims(workspace).List(t.Context(), metav1.ListOptions{})
		if err == nil && len(claims.Items) > 0 {
			err = fmt.Errorf("there are %d, the first is %s", len(claims.Items), claims.Items[0].Name)
		}
		return err
	})
	if status := c.plugin(t).Status.ContainerStatuses[0]; status.RestartCount > 0 {
		t.Errorf("Virgate was restarted: %v", status)
	}
	cancel()
	following.Wait()
	s.ledger.judge(t)
	c.report.note("dra storm: pods made, ran, refused in a change; profiles", fmt.Sprintf("%d, %d, %d; %d", s.made, s.ran, s.refused, s.flip))
}

// blow creates the pods, changes the profile and makes GPUs fail.
func (s *draStorm) blow(t *testing.T) {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var nextPod, nextFlip, nextFault time.Time
	nextFlip = time.Now().Add(5 * time.Second)
	for s.made < draStormPods {
		now := <-tick.C
		s.look(t)
		if now.After(nextPod) && len(s.pods) < draStormCrowd {
			s.add(t)
			nextPod = now.Add(s.between(0, 600*time.Millisecond))
		}
		// The next profile follows even if no pod can run under this one.
		if now.After(nextFlip) && (s.lastRan.After(s.flipped) || now.Sub(s.flipped) > 20*time.Second) {
			others := slices.DeleteFunc([]string{"plugin", "dra", "whole"}, func(name string) bool { return name == s.profile })
			s.profile = others[s.random.IntN(len(others))]
			s.c.label(t, s.profile)
			s.flip++
			s.flipped, nextFlip = now, now.Add(s.between(3*time.Second, 8*time.Second))
		}
		if now.After(nextFault) {
			if s.unhealthy == "" {
				s.unhealthy = fmt.Sprint(s.random.IntN(8))
				s.c.simulate(t, s.c.plugin(t), "xid", "--gpu", s.unhealthy, "79")
			} else {
				s.heal(t)
			}
			nextFault = now.Add(s.between(3*time.Second, 8*time.Second))
		}
	}
}

func (s *draStorm) heal(t *testing.T) {
	t.Helper()
	if s.unhealthy != "" {
		s.c.simulate(t, s.c.plugin(t), "heal", "--gpu", s.unhealthy)
		s.unhealthy = ""
	}
}

func (s *draStorm) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.random.Int64N(int64(most-least)))
}

// add creates a pod.
func (s *draStorm) add(t *testing.T) {
	t.Helper()
	kind := []int{byName, byName, byShare, byShare, byWhole}[s.random.IntN(5)]
	name := fmt.Sprintf("dra-storm-%d", s.made)
	one := pod(name, shared, 1)
	if kind != byName {
		one = claimPod(name, []string{byShare: "storm-share", byWhole: "storm-whole"}[kind])
	}
	if _, err := s.c.client.CoreV1().Pods(workspace).Create(t.Context(), one, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.made++
	s.pods[name] = &stormPod{kind: kind, deaths: s.c.kubeletDeaths}
}

// look reads the state of the pods and claims, and deletes pods that have run for a while.
func (s *draStorm) look(t *testing.T) {
	t.Helper()
	if err := s.c.keepKubelet(t); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	list, err := s.c.client.CoreV1().Pods(workspace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]v1.Pod{}
	for _, pod := range list.Items {
		there[pod.Name] = pod
	}
	claims, err := s.c.client.ResourceV1().ResourceClaims(workspace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range claims.Items {
		for _, of := range claim.Status.ReservedFor {
			if claim.Status.Allocation != nil && len(claim.Status.Allocation.Devices.Results) > 0 {
				s.ledger.allocated(of.Name, claim.Status.Allocation.Devices.Results[0].Device)
			}
		}
	}
	for name, pod := range s.pods {
		got, found := there[name]
		switch {
		case !found && pod.deleted:
			delete(s.pods, name)
		case !found:
			t.Fatalf("pod %s is gone", name)
		case pod.deleted:
		case got.Status.Phase == v1.PodFailed:
			// Refused by the kubelet, or by Virgate for a GPU that has just failed or changed its mode. A
			// container that was being started when the kubelet died has failed without a reason.
			interrupted := got.Status.Reason == "" && s.c.kubeletDeaths > pod.deaths
			if s.refused++; !interrupted && got.Status.Reason != unexpectedAdmission && !strings.HasPrefix(got.Status.Reason, outOf) {
				t.Errorf("pod %s failed: %s: %s", name, got.Status.Reason, got.Status.Message)
			}
			s.delete(t, name)
		case got.Status.Phase == v1.PodRunning && pod.leaves.IsZero():
			s.ran++
			s.lastRan, pod.leaves = now, now.Add(s.between(time.Second/2, 3*time.Second))
		case !pod.leaves.IsZero() && now.After(pod.leaves):
			s.delete(t, name)
		}
	}
}

func (s *draStorm) delete(t *testing.T, name string) {
	t.Helper()
	if err := s.c.client.CoreV1().Pods(workspace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.pods[name].deleted = true
}

// ledger records which pods really had which GPU at the same time, from the processes in the containers,
// their device nodes and their environment.
type ledger struct {
	gpus map[string]string // By UUID: the number of the device node.

	mu      sync.Mutex
	devices map[string]string            // By pod: the device that the scheduler allocated to its claim.
	seen    map[string]map[string]holder // By the GPU and the names.
	samples int
}

// holder is a container's process.
type holder struct {
	process, pod, gpu string
	claim             bool
}

// newLedger learns which device node belongs to which GPU from the CDI specs that the runtime reads. They
// are written when claims are served.
func newLedger(t *testing.T, c *cluster) *ledger {
	t.Helper()
	l := &ledger{gpus: map[string]string{}, devices: map[string]string{}, seen: map[string]map[string]holder{}}
	uuids := units(t, c.kubeletSays(t), shared)
	c.await(t, "CDI entries of all GPUs", func() error {
		files, err := filepath.Glob("/var/run/cdi/*")
		for _, file := range files {
			var spec struct {
				Devices []struct {
					Name           string
					ContainerEdits struct{ DeviceNodes []struct{ Path string } }
				}
			}
			data, err := os.ReadFile(file)
			if err == nil {
				err = yaml.Unmarshal(data, &spec)
			}
			if err != nil {
				return err
			}
			for _, device := range spec.Devices {
				for _, node := range device.ContainerEdits.DeviceNodes {
					number, found := strings.CutPrefix(node.Path, "/dev/nvidia")
					if _, err := strconv.Atoi(number); found && err == nil && slices.Contains(uuids, device.Name) {
						l.gpus[device.Name] = number
					}
				}
			}
		}
		if len(l.gpus) != len(uuids) {
			return fmt.Errorf("%q have %v: %v", files, l.gpus, err)
		}
		return nil
	})
	return l
}

func (l *ledger) allocated(pod, device string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.devices[pod] = device
}

// follow takes samples until the context ends.
func (l *ledger) follow(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		l.sample()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sample notes the holders of each GPU. It finds them one after the other, so the first may have ended
// before the last began: only those that still exist after all were found were there together.
func (l *ledger) sample() {
	folders, _ := filepath.Glob("/proc/[0-9]*")
	byGPU := map[string]map[string]holder{}
	for _, folder := range folders {
		for _, h := range l.holders(folder) {
			if byGPU[h.gpu] == nil {
				byGPU[h.gpu] = map[string]holder{}
			}
			byGPU[h.gpu][h.pod] = h
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.samples++
	for gpu, holders := range byGPU {
		maps.DeleteFunc(holders, func(_ string, h holder) bool { return len(holders) > 1 && !slices.Contains(l.holders(h.process), h) })
		l.seen[gpu+": "+strings.Join(slices.Sorted(maps.Keys(holders)), " ")] = holders
	}
}

// holders returns the GPUs that the process has, if it belongs to a container of the storm.
func (l *ledger) holders(process string) (all []holder) {
	environment, err := os.ReadFile(filepath.Join(process, "environ"))
	if err != nil {
		return nil
	}
	var pod, visible string
	for variable := range strings.SplitSeq(string(environment), "\x00") {
		if value, found := strings.CutPrefix(variable, podName+"="); found && strings.HasPrefix(value, "dra-storm-") {
			pod = value
		} else if value, found := strings.CutPrefix(variable, "NVIDIA_VISIBLE_DEVICES="); found {
			visible = value
		}
	}
	if pod == "" {
		return nil
	}
	if number, found := l.gpus[visible]; found {
		return []holder{{process: process, pod: pod, gpu: number}}
	}
	entries, _ := os.ReadDir(filepath.Join(process, "root/dev"))
	for _, entry := range entries {
		if number, found := strings.CutPrefix(entry.Name(), "nvidia"); found {
			if _, err := strconv.Atoi(number); err == nil {
				all = append(all, holder{process: process, pod: pod, gpu: number, claim: true})
			}
		}
	}
	return all
}

// judge checks the combinations of holders that were seen.
func (l *ledger) judge(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	claims, plugins, together, unknown := map[string]bool{}, map[string]bool{}, 0, map[string]bool{}
	for what, holders := range l.seen {
		whole, ways := false, map[bool]bool{}
		for pod, h := range holders {
			ways[h.claim] = true
			if !h.claim {
				plugins[pod] = true
				continue
			}
			claims[pod] = true
			device, known := l.devices[pod]
			if !known {
				unknown[pod] = true
			}
			whole = whole || known && !strings.HasSuffix(device, "-ts")
		}
		if together = max(together, len(holders)); len(ways) > 1 || whole && len(holders) > 1 || len(holders) > draStormShares {
			t.Errorf("GPU %s were there at the same time: %v, devices %v", what, holders, l.devices)
		}
	}
	if len(claims) == 0 || len(plugins) == 0 {
		t.Errorf("the ledger saw %d pods by claims and %d by the plugin", len(claims), len(plugins))
	}
	t.Logf("ledger: %d samples, %d pods by claims (%d of devices that nobody saw allocated), %d by the plugin, at most %d on one GPU", l.samples, len(claims), len(unknown), len(plugins), together)
}
