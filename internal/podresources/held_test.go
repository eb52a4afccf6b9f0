package podresources

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func (n *node) expectHeld(source *Source, want ...sharing.Allocation) {
	n.t.Helper()
	got, err := source.Held(n.ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.t.Errorf("held: %s", diff)
	}
}

func TestHeld(t *testing.T) {
	n := startNode(t, simkubelet.Options{DelayPods: true})
	source := n.source(nil)
	stop := n.offer("a.sock", devices("a", "b", "c", "d", "e")...)
	n.expectHeld(source)

	second := n.add(simkubelet.Pod{Namespace: "n", Name: "second", Containers: []simkubelet.Container{
		{Name: "init", Init: true, Requests: wants(2)},
		{Name: "main", Requests: wants(1)},
	}})
	first := n.add(simkubelet.Pod{Namespace: "n", Name: "first", Containers: []simkubelet.Container{{Name: "main", Requests: wants(2)}}})
	named := []sharing.Allocation{
		{Namespace: "n", Pod: "first", Container: "main", Resource: gpu, Devices: []string{"c", "d"}},
		{Namespace: "n", Pod: "second", Container: "init", Resource: gpu, Devices: []string{"b"}}, // not in List
		{Namespace: "n", Pod: "second", Container: "main", Resource: gpu, Devices: []string{"a"}},
	}
	n.expectHeld(source, named...)

	// The one connection outlives the kubelet; no pod is named yet.
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	unnamed := []sharing.Allocation{
		{Pod: "uid:" + second.UID, Container: "init", Resource: gpu, Devices: []string{"a", "b"}},
		{Pod: "uid:" + second.UID, Container: "main", Resource: gpu, Devices: []string{"a"}},
		{Pod: "uid:" + first.UID, Container: "main", Resource: gpu, Devices: []string{"c", "d"}},
	}
	n.expectHeld(source, unnamed...)
	stop()
	if err := n.Start(n.ctx); err != nil {
		t.Fatal(err)
	}
	n.expectHeld(source, unnamed...)
	n.offer("b.sock", devices("a", "b", "c", "d", "e")...)
	if err := n.RestorePods(n.ctx); err != nil {
		t.Fatal(err)
	}
	awaitPodResources(t, source)
	n.expectHeld(source, named...)

	// A pod that is gone is kept until the kubelet writes again.
	if err := n.DeletePod("n", "first"); err != nil {
		t.Fatal(err)
	}
	n.expectHeld(source, unnamed[2], named[1], named[2])
}

// awaitPodResources waits until the connection is back.
func awaitPodResources(t *testing.T, source *Source) {
	t.Helper()
	deadline := time.Now().Add(patient)
	for {
		if _, err := list(t.Context(), source); err == nil {
			return
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestHeldFromOneSource(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	n.offer("a.sock", devices("a", "b")...)
	pod := n.add(simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{{Name: "c", Requests: wants(1)}}})
	named := sharing.Allocation{Namespace: "n", Pod: "p", Container: "c", Resource: gpu, Devices: []string{"a"}}
	unnamed := sharing.Allocation{Pod: "uid:" + pod.UID, Container: "c", Resource: gpu, Devices: []string{"a"}}
	started, err := n.source(nil).started()
	if err != nil {
		t.Fatal(err)
	}
	atStart := func() time.Time { return started }
	elsewhere := t.TempDir()
	old := filepath.Join(t.TempDir(), "old")
	broken := filepath.Join(t.TempDir(), "broken")
	for _, dir := range []string{old, broken} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		socket := filepath.Join(dir, "kubelet.sock") // Its time is the kubelet's start.
		if err := os.WriteFile(socket, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(socket, started, started); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(broken, checkpointName), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name   string
		change func(*Options)
		want   sharing.Allocation
		err    error
		texts  []string
	}{
		{name: "both", want: named},
		{name: "no PodResources", change: func(o *Options) { o.Socket = "" }, want: unnamed},
		{name: "PodResources does not answer", change: func(o *Options) { o.Socket = elsewhere + "/none" }, want: unnamed},
		{name: "no checkpoint, kubelet long up", change: func(o *Options) { o.CheckpointDir = old }, want: named},
		{
			name: "no checkpoint ever, kubelet just started", want: named,
			change: func(o *Options) { o.CheckpointDir, o.Now = old, atStart },
		},
		{
			name: "broken checkpoint, kubelet just started", change: func(o *Options) { o.CheckpointDir, o.Now = broken, atStart },
			err: ErrIncomplete, texts: []string{"kubelet started 0s ago", filepath.Join(broken, checkpointName) + ": parse checkpoint"},
		},
		{
			name: "no checkpoint, no kubelet.sock", change: func(o *Options) { o.CheckpointDir = elsewhere },
			err: ErrIncomplete, texts: []string{"kubelet.sock", checkpointName},
		},
		{
			name: "no directory", change: func(o *Options) { o.CheckpointDir = "" },
			err: ErrIncomplete, texts: []string{"start unknown", "no directory"},
		},
		{
			name: "nothing", change: func(o *Options) { o.CheckpointDir, o.Socket = elsewhere, elsewhere+"/none" },
			err: ErrUnknown, texts: []string{"PodResources: ", elsewhere + "/none", "checkpoint: ", checkpointName},
		},
		{
			name: "nothing configured", change: func(o *Options) { o.CheckpointDir, o.Socket = "", "" },
			err: ErrUnknown, texts: []string{"no socket", "no directory"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			source := n.source(row.change)
			if row.err == nil {
				n.expectHeld(source, row.want)
				return
			}
			held, err := source.Held(n.ctx)
			if !errors.Is(err, row.err) || held != nil {
				t.Fatalf("got %v and %v, want %v", held, err, row.err)
			}
			for _, text := range row.texts {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%q does not say %q", err, text)
				}
			}
		})
	}
}

// TestHeldByClaims checks that containers hold GPUs by claims, even while PodResources cannot be read or does not
// know all pods, as no checkpoint has them.
func TestHeldByClaims(t *testing.T) {
	n := startNode(t, simkubelet.Options{DelayPods: true})
	ahead := 2 * time.Minute
	source := n.source(func(o *Options) {
		o.Now = func() time.Time { return time.Now().Add(ahead) }
		o.Claimed = func(driver string, devices, names []string) ([]string, bool) {
			if driver != "gpu.nvidia.com" {
				return nil, false
			}
			return append(slices.Clone(devices), names...), devices[0] == "unknown"
		}
	})
	n.offer("a.sock", devices("a")...)
	claim := func(name, driver string, devices ...string) simkubelet.Claim {
		c := simkubelet.Claim{Name: name}
		for _, device := range devices {
			c.Devices = append(c.Devices, simkubelet.ClaimDevice{Driver: driver, Pool: "node", Name: device, CDI: []string{"x/y=" + device}})
		}
		return c
	}
	n.add(simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "both", Requests: wants(1), Claims: []simkubelet.Claim{claim("gpus", "gpu.nvidia.com", "gpu-0", "gpu-1"), claim("net", "dra.net", "eth1")}},
		{Name: "other", Claims: []simkubelet.Claim{claim("odd", "gpu.nvidia.com", "unknown")}},
	}})
	claimed := []sharing.Allocation{
		{Namespace: "n", Pod: "p", Container: "both", Resource: "gpu.nvidia.com", Devices: []string{"gpu-0", "gpu-1", "x/y=gpu-0", "x/y=gpu-0", "x/y=gpu-1"}, Claim: "gpus"},
		{Namespace: "n", Pod: "p", Container: "both", Resource: gpu, Devices: []string{"a"}},
		{Namespace: "n", Pod: "p", Container: "other", Resource: "gpu.nvidia.com", Devices: []string{"unknown", "x/y=unknown"}, Claim: "odd", AnyGPU: true},
	}
	n.expectHeld(source, claimed...)

	expectClaims := func(want ...string) {
		t.Helper()
		held, err := source.Held(n.ctx)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, a := range held {
			if a.Claim != "" {
				got = append(got, a.Pod+" "+a.Claim)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("claims: %s", diff)
		}
	}
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	expectClaims("p gpus", "p odd")
	expectClaims("p gpus", "p odd")
	ahead = 0
	if err := n.Start(n.ctx); err != nil {
		t.Fatal(err)
	}
	awaitPodResources(t, source)
	expectClaims("p gpus", "p odd") // The kubelet does not know its pods yet.
	if err := n.RestorePods(n.ctx); err != nil {
		t.Fatal(err)
	}
	expectClaims("p gpus", "p odd")
	if err := n.DeletePod("n", "p"); err != nil {
		t.Fatal(err)
	}
	expectClaims() // This kubelet has shown it.

	n.add(simkubelet.Pod{Namespace: "n", Name: "q", Containers: []simkubelet.Container{{Name: "c", Claims: []simkubelet.Claim{claim("gpus", "gpu.nvidia.com", "gpu-0")}}}})
	expectClaims("q gpus")
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(n.DeletePod("n", "q"), n.Start(n.ctx)); err != nil {
		t.Fatal(err)
	}
	awaitPodResources(t, source)
	expectClaims("q gpus")
	ahead = 2 * time.Minute
	expectClaims()
	ahead = 0
	expectClaims()
}

func TestSettlingTakesAMinute(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kubelet.sock")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	start := time.Now().Truncate(time.Second)
	if err := os.Chtimes(path, start, start); err != nil {
		t.Fatal(err)
	}
	for age, settled := range map[time.Duration]bool{
		-time.Hour: false, 0: false, time.Minute - 1: false, time.Minute: true, time.Hour: true,
	} {
		source := New(Options{CheckpointDir: dir, Now: func() time.Time { return start.Add(age) }})
		if err := source.afterStartup(); (err == nil) != settled {
			t.Errorf("at %v: got %v", age, err)
		}
	}
}

func TestApplied(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	both := n.source(nil)
	file := n.source(func(o *Options) { o.Socket = "" })
	stop := n.offer("a.sock", devices("b", "a", "!c")...)
	n.add(simkubelet.Pod{Name: "p", Containers: []simkubelet.Container{{Name: "c", Requests: wants(1)}}})
	expect := func(source *Source, want map[string][]string) {
		t.Helper()
		got, err := source.Applied(n.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	two := map[string][]string{gpu: {"a", "b"}}
	expect(both, two)
	expect(file, two)

	// The kubelet's memory follows a stream's end; its checkpoint does not.
	stop()
	n.await(func(s simkubelet.Snapshot) bool { return !s.Resources[gpu].Connected })
	expect(both, map[string][]string{})
	expect(file, two)
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	expect(both, two)

	if _, err := New(Options{}).Applied(n.ctx); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
}

// TestUnreadSourceIsNotSilent checks that an unreadable source is in Unread at once, and logged once, not at each
// question, until it can be read again.
func TestUnreadSourceIsNotSilent(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	n.offer("a.sock", devices("a")...)
	n.add(simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{{Name: "c", Requests: wants(1)}}})
	elsewhere, unreadable := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(unreadable, checkpointName), []byte(`{"Data":{}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name                     string
		change                   func(*Options)
		podResources, checkpoint string
		warnings                 []string
	}{
		{name: "both"},
		{"no socket there", func(o *Options) { o.Socket = elsewhere + "/none" }, "no such file", "", []string{"PodResources not reached"}},
		{"none configured", func(o *Options) { o.Socket = "" }, "no socket is configured", "", []string{"PodResources not reached"}},
		{"another format", func(o *Options) { o.CheckpointDir = unreadable }, "", "it has no RegisteredDevices", []string{"checkpoint not read"}},
		{"no checkpoint yet", func(o *Options) { o.CheckpointDir = elsewhere }, "", "", nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			var log strings.Builder
			source := n.source(func(o *Options) {
				if row.change != nil {
					row.change(o)
				}
				o.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
			})
			if podResources, checkpoint := source.Unread(); podResources != nil || checkpoint != nil {
				t.Errorf("unread before the first question: %v, %v", podResources, checkpoint)
			}
			for range 3 {
				_, _ = source.Held(n.ctx)
			}
			podResources, checkpoint := source.Unread()
			if !says(podResources, row.podResources) || !says(checkpoint, row.checkpoint) {
				t.Errorf("unread: %v, %v", podResources, checkpoint)
			}
			lines := strings.Count(log.String(), "\n")
			for _, warning := range row.warnings {
				if lines != len(row.warnings) || strings.Count(log.String(), warning) != 1 {
					t.Errorf("no single warning %q:\n%s", warning, log.String())
				}
			}
			if row.warnings == nil && lines > 0 {
				t.Errorf("logged:\n%s", log.String())
			}
		})
	}

	var log strings.Builder
	source := n.source(func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	n.expectUnread(source, false)
	if err := n.Stop(n.ctx); err != nil {
		t.Fatal(err)
	}
	n.expectUnread(source, true)
	cancelled, cancel := context.WithCancel(n.ctx)
	cancel()
	_, _ = source.Held(cancelled) // No call was made.
	if err := n.Start(n.ctx); err != nil {
		t.Fatal(err)
	}
	awaitPodResources(t, source)
	n.expectUnread(source, false)
	_, _ = source.Held(cancelled)
	if podResources, _ := source.Unread(); podResources != nil {
		t.Error("a caller that gave up counts as a kubelet that did not answer")
	}
	if got := log.String(); strings.Count(got, "PodResources not reached") != 1 || strings.Count(got, "PodResources answers again") != 1 {
		t.Errorf("log of one outage:\n%s", got)
	}
}

func (n *node) expectUnread(source *Source, want bool) {
	n.t.Helper()
	if _, err := source.Held(n.ctx); err != nil {
		n.t.Fatal(err)
	}
	if podResources, checkpoint := source.Unread(); (podResources != nil) != want || checkpoint != nil {
		n.t.Errorf("unread: %v, %v", podResources, checkpoint)
	}
}

// says reports whether the error has the text; "" means no error.
func says(err error, text string) bool {
	return (err == nil) == (text == "") && (err == nil || strings.Contains(err.Error(), text))
}

func TestBrokenCheckpoint(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, checkpointName), []byte(`{"Data":{`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{CheckpointDir: dir}).Held(t.Context()); !errors.Is(err, ErrUnknown) {
		t.Errorf("got %v", err)
	}
}

func TestServing(t *testing.T) {
	n := startNode(t, simkubelet.Options{})
	source := n.source(nil)
	is := func(when, resource string, want bool) {
		t.Helper()
		if got, err := source.Serving(n.ctx, resource); got != want || err != nil {
			t.Errorf("%s, %s: %t, %v", when, resource, got, err)
		}
	}
	is("without a plugin", gpu, false)
	stop := n.offer("a.sock", devices("0", "!1")...)
	is("with a plugin", gpu, true)
	is("with another one's plugin", "nvidia.com/other", false)
	stop()
	n.await(func(s simkubelet.Snapshot) bool { return !s.Resources[gpu].Connected })
	is("when the plugin has gone", gpu, false)
	n.offer("b.sock", devices("!0")...)
	is("with a plugin that has nothing healthy", gpu, false)
}

// GetAllocatableResources shows no device. If called is set, it closes called and waits for answer.
func (s *scripted) GetAllocatableResources(context.Context, *api.AllocatableResourcesRequest) (*api.AllocatableResourcesResponse, error) {
	s.calls.Add(1)
	if s.called != nil {
		close(s.called)
		<-s.answer
	}
	return &api.AllocatableResourcesResponse{}, nil
}

// TestServingIsAskedForAllAtOnce has many resources register at once, as at a start, and many claims: one call
// each would queue for seconds.
func TestServingIsAskedForAllAtOnce(t *testing.T) {
	service, source := serve(t, func(context.Context, int64) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{}, nil
	})
	for name, ask := range map[string]func() error{
		"Serving": func() error { _, err := source.Serving(t.Context(), gpu); return err },
		"HeldTogether": func() error { // There is no checkpoint, without which a start is a while ago.
			if _, err := source.HeldTogether(t.Context()); !errors.Is(err, ErrIncomplete) {
				return err
			}
			return nil
		},
	} {
		service.calls.Store(0)
		var asking sync.WaitGroup
		for range 10 * crowd {
			asking.Go(func() {
				if err := ask(); err != nil {
					t.Error(err)
				}
			})
		}
		asking.Wait()
		if calls := service.calls.Load(); calls == 0 || calls > crowd {
			t.Errorf("%s: %d calls", name, calls)
		}
	}
}

// TestServingBegins checks that a call already under way does not answer a later question.
func TestServingBegins(t *testing.T) {
	service, source := serve(t, nil)
	service.called, service.answer = make(chan struct{}), make(chan struct{})
	ended := make(chan error)
	go func() {
		_, err := source.Serving(t.Context(), gpu)
		ended <- err
	}()
	<-service.called
	if source.allocatables.begun.Load() == 0 {
		t.Error("a call that is under way answers later questions")
	}
	close(service.answer)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// FuzzMerge checks that for any list and checkpoint, no held device is lost or invented, and that the answer is
// sorted.
func FuzzMerge(f *testing.F) {
	add := func(checkpoint string, pods ...*api.PodResources) {
		listed, err := proto.Marshal(&api.ListPodResourcesResponse{PodResources: pods})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(listed, []byte(checkpoint))
	}
	pod := &api.PodResources{Namespace: "n", Name: "p", Containers: []*api.ContainerResources{{Name: "c", Devices: []*api.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"b", "a"}}, {ResourceName: "nvidia.com/gpu", DeviceIds: []string{"a"}}, {},
	}}}}
	add(kubeletText, pod, pod)
	add(kubeletText)
	add("", pod, &api.PodResources{Name: "\x1b\xe2\x80\xae"})
	f.Fuzz(func(t *testing.T, listed, text []byte) {
		var list api.ListPodResourcesResponse
		if proto.Unmarshal(listed, &list) != nil {
			return
		}
		checkpoint, _ := ParseCheckpoint(text) // Without a checkpoint there are no entries.
		held := merge(list.PodResources, checkpoint.Entries)
		if !slices.IsSortedFunc(held, func(a, b sharing.Allocation) int {
			return slices.Compare([]string{a.Namespace, a.Pod, a.Container, a.Resource}, []string{b.Namespace, b.Pod, b.Container, b.Resource})
		}) {
			t.Errorf("not sorted: %+v", held)
		}
		want, got := map[device]bool{}, map[device]bool{}
		for _, pod := range list.PodResources {
			for _, container := range pod.Containers {
				for _, entry := range container.Devices {
					for _, id := range entry.DeviceIds {
						want[device{entry.ResourceName, id}] = true
					}
				}
			}
		}
		for _, entry := range checkpoint.Entries {
			for _, id := range entry.Devices {
				want[device{entry.Resource, id}] = true
			}
		}
		for _, allocation := range held {
			if len(allocation.Devices) == 0 || !strictlySorted(allocation.Devices) {
				t.Errorf("holds %q", allocation.Devices)
			}
			for _, id := range allocation.Devices {
				got[device{allocation.Resource, id}] = true
				if !want[device{allocation.Resource, id}] {
					t.Errorf("%s of %s is made up", id, allocation.Resource)
				}
			}
		}
		if len(got) != len(want) {
			t.Errorf("%d devices are held, want %d", len(got), len(want))
		}
	})
}
