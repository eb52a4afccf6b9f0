package hostile

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/shortdir"
)

const gpu = "nvidia.com/gpu"

// timing shortens the protocol's waits for many repetitions. A slow machine must not look like a kubelet
// that has lost the stream; only noKubelet tests that.
func (o options) timing() plugin.Timing {
	timing := plugin.Timing{RemovalDelay: 40 * time.Millisecond, StopAfter: 20 * time.Millisecond, ListInterval: time.Millisecond}
	if !o.noKubelet {
		timing.StreamTimeout, timing.VerifyAfter = time.Hour, time.Hour
	}
	return timing
}

// options are the differences from the default program.
type options struct {
	// stateDir and cdiDir are where it writes; below its own folder when empty.
	stateDir, cdiDir string
	// noKubelet leaves kubelet.sock to the test.
	noKubelet bool
	profile   string
	// node is the simulated node's name; two GPUs when empty.
	node string
}

// program is a run of Virgate on a simulated node and beside a simulated kubelet.
type program struct {
	t       *testing.T
	ctx     context.Context
	dir     string
	node    *simnode.Node
	kubelet *kubelettest.Kubelet
	look    chan os.Signal
	log     *logBuffer
}

// logBuffer is the beginning of the log, for any goroutine. It allocates all its room at the start, so that
// a log does not look like a leak.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

const logged = 1 << 20

func newLogbook() *logBuffer {
	l := &logBuffer{}
	l.text.Grow(logged)
	return l
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text.Len()+len(p) <= logged {
		_, _ = l.text.Write(p)
	}
	return len(p), nil
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start runs everything until the test ends.
func start(t *testing.T, o options) *program {
	t.Helper()
	dir := shortdir.New(t)
	if o.node == "" {
		o.node = "h100x2"
	}
	if o.stateDir == "" {
		o.stateDir = dir
	}
	if o.cdiDir == "" {
		o.cdiDir = filepath.Join(dir, "cdi")
	}
	node, err := simnode.New(o.node)
	if err != nil {
		t.Fatal(err)
	}
	p := &program{t: t, dir: dir, node: node, look: make(chan os.Signal, 1), log: newLogbook()}
	p.write(o.profile)
	resources := filepath.Join(dir, "pr.sock")
	p.kubelet = kubelettest.New(simkubelet.Options{Dir: dir, PodResourcesSocket: resources, StopGrace: time.Millisecond, StatusPeriod: 50 * time.Millisecond})

	ctx, cancel := context.WithCancel(t.Context())
	p.ctx = ctx
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
		for _, violation := range p.kubelet.Violations() {
			t.Errorf("the kubelet's contract is broken: %s", violation)
		}
	})
	if !o.noKubelet {
		running.Go(func() { _ = p.kubelet.Run(ctx) })
	}
	running.Go(func() {
		pprof.Do(ctx, pprof.Labels("program", dir), func(ctx context.Context) {
			if err := daemon.Run(ctx, p.daemon(o, resources)); err != nil {
				t.Errorf("the program ends: %v", err)
			}
		})
	})
	return p
}

// goroutines counts this program's goroutines by the label that each inherits from the one that started it:
// other tests run at the same time.
func (p *program) goroutines() (total int) {
	p.t.Helper()
	var profile strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		p.t.Fatal(err)
	}
	// A stack's lines are "3 @ 0x4f 0x6a", then "# labels: {...}" if it has any.
	for stack := range strings.SplitSeq(profile.String(), "\n\n") {
		if count, _, found := strings.Cut(stack, " @"); found && strings.Contains(stack, p.dir+`"`) {
			number, err := strconv.Atoi(count[strings.LastIndexByte(count, '\n')+1:])
			if err != nil {
				p.t.Fatal(err)
			}
			total += number
		}
	}
	return total
}

// daemon is virgate run with short intervals.
func (p *program) daemon(o options, resources string) daemon.Options {
	return daemon.Options{
		GPUs:      func(configs.StartupSettings) (daemon.GPUs, error) { return daemon.Simulated(p.node, p.node), nil },
		Profile:   daemon.ProfileOptions{Path: p.profile()},
		PluginDir: p.dir, StateDir: o.stateDir, PodResourcesSocket: resources, Timing: o.timing(),
		Rescan: time.Second, Probe: time.Second,
		HostRoot: p.dir, CDIDir: o.cdiDir, HostInterval: 20 * time.Millisecond, CDIRetry: 20 * time.Millisecond,
		Settings: agent.Settings{
			SampleInterval: 50 * time.Millisecond, Listen: "127.0.0.1:0", Reload: p.look, Logger: slog.New(slog.NewTextHandler(p.log, nil)), Version: "test",
		},
	}
}

func (p *program) profile() string { return filepath.Join(p.dir, "profile.yaml") }

// write replaces the profile by a rename, as a mounted ConfigMap does.
func (p *program) write(text string) {
	p.t.Helper()
	if err := os.WriteFile(p.profile()+".new", []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Rename(p.profile()+".new", p.profile()); err != nil {
		p.t.Fatal(err)
	}
	select {
	case p.look <- syscall.SIGHUP:
	default:
	}
}

// patience is how long the program may take for anything on a busy machine.
const patience = await.Patience

// shows waits until the kubelet can grant exactly this many of the resource.
func (p *program) shows(resource string, allocatable int) {
	p.t.Helper()
	p.await(func(s simkubelet.Snapshot) bool {
		r := s.Resources[resource]
		return r.Allocatable == allocatable && (allocatable == 0 || r.Connected && r.Streams == 1)
	})
}

func (p *program) await(so func(simkubelet.Snapshot) bool) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	if err := p.kubelet.Await(ctx, so); err != nil {
		p.t.Fatalf("%v\n%s", err, p.log)
	}
}

// address returns the HTTP address.
func (p *program) address() string {
	p.t.Helper()
	form := regexp.MustCompile(`msg="http listens" address=(\S+)`)
	var found []string
	await.Until(p.t, "HTTP", func() error {
		if found = form.FindStringSubmatch(p.log.String()); found == nil {
			return fmt.Errorf("it is not served:\n%s", p.log)
		}
		return nil
	})
	return found[1]
}

// get returns the answer to a well-behaved client's request.
func (p *program) get(path string) string {
	p.t.Helper()
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + p.address() + path)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return string(body)
}

// says waits until the answer has the text.
func (p *program) says(path, text string) {
	p.t.Helper()
	await.Until(p.t, path, func() error {
		if body := p.get(path); !strings.Contains(body, text) {
			return fmt.Errorf("it does not say %q:\n%s", text, body)
		}
		return nil
	})
}

// replicas is a profile with this many shares of each GPU.
func replicas(n int) string {
	return fmt.Sprintf("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n", n)
}

// repetitions is how often a leak test repeats its step after warming up. LEAKS=1000 in the environment
// takes minutes; docs/explanation/reliability.md has the figures of that run.
func repetitions(t *testing.T) int {
	t.Helper()
	text := os.Getenv("LEAKS")
	if text == "" {
		return 40
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 20 {
		t.Fatalf("LEAKS=%q is no number from 20", text)
	}
	return n
}

// long skips a test in `make test`, which must not take minutes nor depend on the machine's load. `make
// test-race` runs it.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("long: make test-race plays it")
	}
}

// processUsage is what this process uses: program, node, kubelet and test.
type processUsage struct{ goroutines, descriptors, heap float64 }

func measure(t *testing.T) processUsage {
	t.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("descriptors cannot be counted here: %v", err)
	}
	// Twice, because finalizers release objects.
	runtime.GC()
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return processUsage{float64(runtime.NumGoroutine()), float64(len(descriptors)), float64(memory.HeapAlloc)}
}

// flat repeats the step and checks that nothing grows with it. A leak grows in every series of repetitions.
// What fills up once, such as pools and buffers, or is under way during a measurement does not: each kind
// must be flat in one of the series.
func flat(t *testing.T, step func(n int)) {
	t.Helper()
	const warmUp, parts, mostSeries = 20, 10, 5
	for n := range warmUp {
		step(n)
	}
	count := repetitions(t)
	growing := map[string]bool{}
	kinds := []struct {
		name string
		of   func(processUsage) float64
		// most is what a repetition may add: less than one thing in three, and less memory than any
		// goroutine or connection takes.
		most float64
	}{
		{"goroutines", func(u processUsage) float64 { return u.goroutines }, 0.3},
		{"descriptors", func(u processUsage) float64 { return u.descriptors }, 0.3},
		{"heap bytes", func(u processUsage) float64 { return u.heap }, 1500},
	}
	for _, kind := range kinds {
		growing[kind.name] = true
	}
	for series := 0; series < mostSeries && len(growing) > 0; series++ {
		seen := []processUsage{measure(t)}
		for part := range parts {
			for n := range count / parts {
				step(part*(count/parts) + n)
			}
			seen = append(seen, measure(t))
		}
		for _, kind := range kinds {
			values := make([]float64, len(seen))
			for i, u := range seen {
				values[i] = kind.of(u)
			}
			growth := slope(values) * parts / float64(count)
			t.Logf("%s over %d repetitions: %.0f, %+.3f with each", kind.name, count, values, growth)
			if growth <= kind.most {
				delete(growing, kind.name)
			}
		}
	}
	for name := range growing {
		t.Errorf("%s grow in each of %d series of %d repetitions", name, mostSeries, count)
	}
}

// slope is the median of the slopes between any two values (Theil and Sen), which is robust to a moment of
// noise.
func slope(values []float64) float64 {
	var slopes []float64
	for i := range values {
		for j := range i {
			slopes = append(slopes, (values[i]-values[j])/float64(i-j))
		}
	}
	slices.Sort(slopes)
	return slopes[len(slopes)/2]
}

// TestProfileSwitchesLeakNothing switches among five profiles: fewer and more replicas, a name that comes
// and goes, another policy, and an invalid one.
func TestProfileSwitchesLeakNothing(t *testing.T) {
	long(t)
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	steps := []struct {
		profile, resource string
		devices           int
	}{
		{replicas(4), gpu, 8},
		{replicas(3), gpu, 6},
		{"sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}", gpu + ".shared", 4},
		{"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, policy: packed}]}}", gpu, 4},
		{"sharing: nonsense", gpu, 4},
	}
	flat(t, func(n int) {
		step := steps[n%len(steps)]
		p.write(step.profile)
		p.shows(step.resource, step.devices)
	})
}

// TestKubeletRestartsLeakNothing has the kubelet remove the sockets each time.
func TestKubeletRestartsLeakNothing(t *testing.T) {
	long(t)
	p := start(t, options{profile: replicas(4)})
	p.shows(gpu, 8)
	flat(t, func(int) {
		if err := p.kubelet.Restart(p.ctx); err != nil {
			t.Fatal(err)
		}
		p.shows(gpu, 8)
	})
}
