package api

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/repeat"
)

// draNode is the driver of one node among many, with its own connection.
type draNode struct {
	counter
	name   string
	driver *dradriver.Driver
	// offered is the node's present offer. began is the number of its requests before the step, lists the
	// number of lists that all steps have required of it.
	offered      []resourceapi.ResourceSlice
	began, lists int
}

// draFleet are the drivers of many nodes of eight GPUs in four time slices each.
type draFleet struct {
	t     *testing.T
	s     *server
	gpus  []sharing.GPU
	nodes []*draNode
	// stop ends all drivers.
	stop func()
	// cpu and at are the server's when the step began; bytes are those read and written.
	cpu           time.Duration
	at            time.Time
	read, written int64
}

// offer is the offer of a node with this many faulty GPUs.
func (f *draFleet) offer(node string, faulty int) []resourceapi.ResourceSlice {
	f.t.Helper()
	gpus := append([]sharing.GPU(nil), f.gpus...)
	for i := range faulty {
		gpus[i].Health = sharing.Faulty("XID 79")
	}
	profile := sharing.Profile{
		GPUNames:    []sharing.NamingRule{{Pattern: "*", Name: "nvidia.com/gpu"}},
		TimeSlicing: []sharing.ReplicatedResource{{Resource: "nvidia.com/gpu", Replicas: 4}}, DRA: sharing.DRAConfig{All: true},
	}
	offer, err := dra.Build(dra.Node{Name: node, Driver: dra.DriverName, GPUs: gpus, Profile: profile, Plan: sharing.NewPlan(gpus, profile)})
	f.s.must(err)
	if n := len(offer.Slices); n != 1 || len(offer.Slices[0].Spec.Devices) != 8 {
		f.t.Fatalf("%d slices with %d devices, want 1 with 8", n, len(offer.Slices[0].Spec.Devices))
	}
	return offer.Slices
}

// startDRAFleet starts this many drivers at once, as the user virgate.
func (s *server) startDRAFleet(t *testing.T, count int) *draFleet {
	t.Helper()
	library, err := simnode.New("h100x8")
	s.must(err)
	gpus, err := nvml.Scan(library)
	s.must(err)
	f := &draFleet{t: t, s: s, gpus: gpus}
	dir := t.TempDir()
	for i := range count {
		n := &draNode{name: nodeName(i)}
		own := filepath.Join(dir, strconv.Itoa(i))
		n.driver, err = dradriver.New(dradriver.Options{
			Driver: dra.DriverName, Node: n.name, Dir: own, RegistryDir: filepath.Join(own, "r"), Config: n.into(s.config(virgateToken)),
			Claims: newDRAClaims(), Logger: slog.New(slog.DiscardHandler),
		})
		s.must(err)
		s.must(os.MkdirAll(filepath.Join(own, "r"), 0o700))
		n.offered = f.offer(n.name, 0)
		n.driver.Publish(n.offered)
		f.nodes = append(f.nodes, n)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	f.begin()
	for _, n := range f.nodes {
		running.Go(func() {
			if err := n.driver.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	f.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(f.stop)
	return f
}

// begin begins a step.
func (f *draFleet) begin() {
	f.cpu, f.at, f.read, f.written = f.s.cpu(), time.Now(), 0, 0
	for _, n := range f.nodes {
		n.began = len(n.made())
		f.read, f.written = f.read+n.read.Load(), f.written+n.written.Load()
	}
}

// draVerb returns the verb of a request, in the words of apiserver_request_total.
func draVerb(r request) string {
	method, uri, _ := strings.Cut(r.what, " ")
	verb := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodDelete: "delete"}[method]
	switch {
	case verb != "":
		return verb
	case r.watch():
		return "watch"
	case strings.Contains(uri, "/nodes/"):
		return "get"
	}
	return "list"
}

// verbs counts the requests by verb. "failed" counts those without a good answer, or without one so far,
// and "ended" the watches that have ended.
func verbs(requests []request) map[string]int {
	verbs := map[string]int{}
	for _, r := range requests {
		switch {
		case r.answer == http.StatusOK || r.answer == http.StatusCreated:
			verbs[draVerb(r)]++
			if r.watch() && (r.ended || r.forgotten) {
				verbs["ended"]++
			}
		default:
			verbs["failed"]++
			verbs[fmt.Sprint("failed with ", r.answer)]++
		}
	}
	return verbs
}

// verbs counts the requests since the step began.
func (n *draNode) verbs() map[string]int { return verbs(n.made()[n.began:]) }

// awaits waits until the server has the offers of all nodes, including those that write because of the
// step. It asks the server only when each of these has had an answer that says so, or no answer.
func (f *draFleet) awaits(writers []*draNode, old map[string]types.UID) {
	f.t.Helper()
	missing := ""
	defer func() {
		if f.t.Failed() {
			f.t.Log("missing: ", missing)
		}
	}()
	next := time.Time{}
	await.True(f.t, "all slices", func() bool {
		for _, n := range writers {
			if verbs := n.verbs(); verbs["create"]+verbs["update"]+verbs["failed"] == 0 {
				missing = n.name
				return false
			}
		}
		if time.Now().Before(next) {
			return false
		}
		next = time.Now().Add(time.Second) // Lists cost the server something too.
		missing = f.missing(old)
		return missing == ""
	})
	// From now on each driver keeps up with its slices, and has written what it had to.
	await.True(f.t, "all watches", func() bool {
		for _, n := range f.nodes {
			if missing = n.name; n.driver.State().Written.IsZero() || !n.watches() {
				return false
			}
		}
		return true
	})
}

// watches reports whether a watch has been answered and no end of it is known.
func (n *draNode) watches() bool {
	watching := false
	for _, r := range n.made() {
		if r.watch() {
			watching = r.answer == http.StatusOK && !r.forgotten && !r.ended
		}
	}
	return watching
}

// missing returns what the server lacks of the offers; old are slices that must be gone.
func (f *draFleet) missing(old map[string]types.UID) string {
	f.t.Helper()
	there := f.slices()
	for _, n := range f.nodes {
		for _, want := range n.offered {
			slice, ok := there[want.Name]
			switch {
			case !ok:
				return want.Name
			case slice.UID == old[want.Name]:
				return want.Name + ", which is the old one"
			case *slice.Spec.NodeName != n.name || !sameDevices(slice.Spec.Devices, want.Spec.Devices) || slice.Spec.Pool.ResourceSliceCount != int64(len(n.offered)):
				return want.Name + ", which is another one"
			}
			delete(there, want.Name)
		}
	}
	for name := range there {
		return name + " is too much"
	}
	return ""
}

// sameDevices compares devices without the times of taints, which the server sets.
func sameDevices(a, b []resourceapi.Device) bool {
	timeless := func(devices []resourceapi.Device) []resourceapi.Device {
		list := (&resourceapi.ResourceSliceSpec{Devices: devices}).DeepCopy().Devices
		for i := range list {
			for j := range list[i].Taints {
				list[i].Taints[j].TimeAdded = nil
			}
		}
		return list
	}
	return equality.Semantic.DeepEqual(timeless(a), timeless(b))
}

// slices are all that the server has, by name.
func (f *draFleet) slices() map[string]resourceapi.ResourceSlice {
	f.t.Helper()
	all, err := f.s.admin.ResourceV1().ResourceSlices().List(f.t.Context(), metav1.ListOptions{})
	f.s.must(err)
	byName := map[string]resourceapi.ResourceSlice{}
	for _, slice := range all.Items {
		byName[slice.Name] = slice
	}
	return byName
}

// end ends a step. Each of the writers must have made that write once, and the others none. No node may
// have listed more often than it had reasons: one for each step in which it had to write, one for each
// watch that ended, and one for each request that failed. The last two depend on how busy the server is.
func (f *draFleet) end(name string, writers []*draNode, write string) {
	f.t.Helper()
	total, last := map[string]int{}, f.at
	own := map[*draNode]bool{}
	for _, n := range writers {
		own[n] = true
		n.lists++
	}
	wrong := 0
	for _, n := range f.nodes {
		asked := n.verbs()
		for verb, count := range asked {
			total[verb] += count
		}
		for _, r := range n.made()[n.began:] {
			if r.writes() && r.answered.After(last) {
				last = r.answered
			}
		}
		want := map[string]int{}
		if own[n] {
			want[write] = 1
		}
		for _, verb := range []string{"create", "update", "delete"} {
			// A write without an answer may have been done.
			if got := asked[verb]; (got > want[verb] || got < want[verb] && asked["failed"] == 0) && wrong < 5 {
				wrong++
				f.t.Errorf("%s: %s made %d requests to %s, want %d: %q", name, n.name, got, verb, want[verb], n.seen()[n.began:])
			}
		}
		all := verbs(n.made())
		if most := n.lists + all["ended"] + all["failed"]; all["list"] > most && wrong < 5 {
			wrong++
			f.t.Errorf("%s: %s has made %d lists, want at most %d: %q", name, n.name, all["list"], most, n.seen())
		}
		if most := asked["create"] + asked["failed"]; asked["get"] > most && wrong < 5 {
			wrong++
			f.t.Errorf("%s: %s read its Node %d times, want at most %d", name, n.name, asked["get"], most)
		}
	}
	var read, written int64
	for _, n := range f.nodes {
		read, written = read+n.read.Load(), written+n.written.Load()
	}
	took := "–"
	if last != f.at {
		took = fmt.Sprintf("%.1f s", last.Sub(f.at).Seconds())
	}
	f.t.Logf("| %s | %d | %d | %d | %d | %d | %d | %d | %.0f | %.0f | %.1f s | %s |", name, total["list"], total["watch"], total["get"], total["create"], total["update"],
		total["delete"], total["failed"], float64(read-f.read)/1000, float64(written-f.written)/1000, (f.s.cpu() - f.cpu).Seconds(), took)
	for what, count := range total {
		if strings.HasPrefix(what, "failed with") || what == "ended" {
			f.t.Logf("%s: %d", what, count)
		}
	}
}

// testDRANodes measures what the drivers of many nodes cost an API server: the table of
// docs/internals/scale.md. VIRGATE_SCALE_NODES sets their number.
func testDRANodes(t *testing.T, s *server) {
	count := repeat.Times(50, 200)
	if text := os.Getenv(scaleVariable); text != "" {
		var err error
		count, err = strconv.Atoi(text)
		s.must(err)
	}
	// The other parts' slices, and these of others'.
	none := func() {
		s.must(s.admin.ResourceV1().ResourceSlices().DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{}))
	}
	none()
	s.createRole("virgate-dra-nodes", "clusterrole-dra.yaml")
	s.bind("virgate-dra-nodes", "virgate-dra-nodes", user("virgate"))
	s.await("the right to write slices", func() bool {
		review, err := s.admin.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{User: "virgate", ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: "create", Group: resourceapi.GroupName, Resource: "resourceslices",
			}},
		}, metav1.CreateOptions{})
		s.must(err)
		return review.Status.Allowed
	})
	s.makeNodes(t, count, "a")
	t.Log("| | list | watch | get | create | update | delete | failed | kB read | kB sent | server CPU | last write |")

	f := s.startDRAFleet(t, count)
	defer none()
	defer f.stop()
	f.awaits(f.nodes, nil)
	f.end(fmt.Sprintf("%d nodes start at once", count), f.nodes, "create")

	// At rest no node sends a request while one node has something to write.
	f.begin()
	pass(3 * time.Second)
	f.at = time.Now()
	f.set(f.nodes[7:8], 1)
	f.awaits(f.nodes[7:8], nil)
	f.end("at rest, 3 s and more, and a fault on one node", f.nodes[7:8], "update")

	some := f.nodes[count/2 : count/2+count/10]
	f.begin()
	f.set(some, 1)
	f.awaits(some, nil)
	f.end(fmt.Sprintf("a fault on each of %d nodes", len(some)), some, "update")

	f.begin()
	f.set(some, 0)
	f.awaits(some, nil)
	f.end("they are well again", some, "update")

	f.begin()
	f.set(f.nodes, 2)
	f.awaits(f.nodes, nil)
	f.end("two faults on all nodes", f.nodes, "update")

	old := map[string]types.UID{}
	for name, slice := range f.slices() {
		old[name] = slice.UID
	}
	f.begin()
	f.wipe()
	f.awaits(f.nodes, old)
	f.end("all kubelets start, and delete the slices", f.nodes, "create")
}

// set has the nodes offer GPUs, this many of them faulty.
func (f *draFleet) set(nodes []*draNode, faulty int) {
	f.t.Helper()
	for _, n := range nodes {
		n.offered = f.offer(n.name, faulty)
		n.driver.Publish(n.offered)
	}
}

// wipe does what all kubelets do when they start (kubernetes 1.36.3, wipeResourceSlices).
func (f *draFleet) wipe() {
	f.t.Helper()
	var working sync.WaitGroup
	problems := make([]error, len(f.nodes))
	for i, n := range f.nodes {
		working.Go(func() {
			problems[i] = f.s.admin.ResourceV1().ResourceSlices().DeleteCollection(f.t.Context(), metav1.DeleteOptions{},
				metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + n.name})
		})
	}
	working.Wait()
	for _, err := range problems {
		f.s.must(err)
	}
}
