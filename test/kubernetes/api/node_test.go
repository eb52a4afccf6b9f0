package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/shortdir"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

const (
	namespace, configMap = "gpu", "profiles"
	label                = "nvidia.com/device-plugin.config"
)

// nodeClient is a node's policy, and what it would have applied.
type nodeClient struct {
	counter
	config *rest.Config
	policy *configsource.NodeSource
	// applies is called with what comes into force; may be nil.
	applies func(configs.SelectedProfile)
	stop    func()
	// reporter reports what is in force, last is its latest report; only set for nodes that report.
	reporter *nodestatus.Reporter
	last     nodereport.ProfileRef

	mu sync.Mutex
	// applied are the names and generations that came into force, in order, and at is when the last one
	// did. rejected is why the wanted one is not in force, "" if it is.
	applied  []string
	at       time.Time
	rejected string
}

// follow starts a policy for the named Node.
func (s *server) follow(t *testing.T, node, token string, change func(*configsource.NodeSource)) *nodeClient {
	t.Helper()
	return s.followBy(t, node, token, func(f *nodeClient) {
		if change != nil {
			change(f.policy)
		}
	})
}

// followBy calls follow with a nodeClient that change adjusts before it starts.
func (s *server) followBy(t *testing.T, node, token string, change func(*nodeClient)) *nodeClient {
	t.Helper()
	f := &nodeClient{}
	f.config = f.into(s.config(token))
	api, err := kube.NewClient(f.config)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.policy = &configsource.NodeSource{
		Source: configsource.NewConfigMap(api, namespace, configMap, log), Labels: configsource.NewNodeLabels(api, node, label, log),
		Started: started.Startup,
	}
	change(f)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.policy.Watch(ctx, f.look) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(f.stop)
	return f
}

// look does the same as the agent's loop.
func (f *nodeClient) look() {
	f.mu.Lock()
	defer f.mu.Unlock()
	selected, err := f.policy.Profile()
	f.rejected = ""
	if err != nil {
		f.rejected = err.Error()
		return
	}
	next := selected.Name + "@" + selected.Generation
	if len(f.applied) == 0 || f.applied[len(f.applied)-1] != next {
		f.applied, f.at = append(f.applied, next), time.Now()
		if f.applies != nil {
			f.applies(selected)
		}
	}
}

// state returns the profile in force as name@generation, and why the wanted one is not in force.
func (f *nodeClient) state() (inForce, rejected string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.applied) > 0 {
		inForce = f.applied[len(f.applied)-1]
	}
	return inForce, f.rejected
}

// awaits waits until the profile is in force ("" for any), and the reason for rejecting another one has the
// text ("" for no rejection).
func (f *nodeClient) awaits(t *testing.T, inForce, rejected string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			have, why := f.state()
			t.Logf("in force %q, rejected %q, requests %q", have, why, f.seen())
		}
	}()
	await.True(t, inForce+" in force, rejected: "+rejected, func() bool {
		have, why := f.state()
		return have == inForce && (rejected == "") == (why == "") && strings.Contains(why, rejected)
	})
}

// since returns when the present profile came into force.
func (f *nodeClient) since() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at
}

func (f *nodeClient) history() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.applied...)
}

// document returns a profile that offers every GPU this many times.
func document(replicas string) string {
	return "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: " + replicas + "}]}}\n"
}

// is formats a profile as state does.
func is(t *testing.T, name, text string) string {
	t.Helper()
	config, err := configs.Parse("", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return name + "@" + configs.Generation(config.Profile)
}

// counter counts the traffic of one node's connections, and can cut them.
type counter struct {
	read, written atomic.Int64
	mu            sync.Mutex
	requests      []request
	dials         []time.Time
	open          map[net.Conn]bool
	cut           bool
}

// request is a request that was made.
type request struct {
	at time.Time
	// what is its method and URL.
	what string
	// answer is the status, 0 without an answer. It came at answered.
	answer   int
	answered time.Time
	// forgotten is true if the server no longer had the events from a watch's version on: it said so by the
	// answer, or by an event.
	forgotten bool
	// ended is true when nothing more follows in the answer, broken when the client did not get what it asked
	// for: a list that it could not read to the end, or a watch that it gave up, because the answer was late.
	ended, broken bool
}

// follows reports whether the request keeps up with an object: it is a list or a watch.
func (r request) follows() bool { return !r.writes() && strings.Contains(r.what, "fieldSelector") }

// object returns what the request follows, watch whether it is a watch.
func (r request) object() string { object, _, _ := strings.Cut(r.what, "?"); return object }
func (r request) watch() bool    { return strings.Contains(r.what, "watch=true") }

// inVain reports whether the request brought nothing: a server that starts or is busy refuses some, and the
// connection may break. How often that happens depends on the server.
func (r request) inVain() bool { return !r.forgotten && (r.answer != http.StatusOK || r.broken) }

// writes reports whether the request changes something.
func (r request) writes() bool { return !strings.HasPrefix(r.what, http.MethodGet) }

// into makes c count the requests of all clients that use the configuration. They share one connection, as
// in the program.
func (c *counter) into(config *rest.Config) *rest.Config {
	c.open = map[net.Conn]bool{}
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut { // client-go takes some errors, such as net.ErrClosed, for the end of an answered watch.
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ENETUNREACH}
		}
		c.dials = append(c.dials, time.Now())
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c.open[conn] = true
		return counted{conn, c}, nil
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			c.mu.Lock()
			place := len(c.requests)
			c.requests = append(c.requests, request{at: time.Now(), what: r.Method + " " + r.URL.RequestURI()})
			c.mu.Unlock()
			answer, err := next.RoundTrip(r)
			if err == nil {
				c.mu.Lock()
				c.requests[place].answer, c.requests[place].answered = answer.StatusCode, time.Now()
				c.mu.Unlock()
				answer.Body = &readAnswer{ReadCloser: answer.Body, counter: c, place: place}
			}
			return answer, err
		})
	})
	shared, err := rest.TransportFor(config)
	if err != nil {
		panic(err) // The configuration is the test's own.
	}
	return &rest.Config{Host: config.Host, Transport: shared, QPS: -1}
}

// setCut cuts or restores the network.
func (c *counter) setCut(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	if cut {
		for conn := range c.open {
			_ = conn.Close()
		}
	}
}

// made returns the requests so far.
func (c *counter) made() []request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.requests)
}

// dialled returns when connections were requested.
func (c *counter) dialled() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.dials)
}

func (c *counter) seen() []string {
	var all []string
	for _, r := range c.made() {
		all = append(all, r.what)
	}
	return all
}

func (c *counter) answered(status int) int {
	count := 0
	for _, r := range c.made() {
		if r.answer == status {
			count++
		}
	}
	return count
}

// answers returns the lists and watches that brought something.
func (c *counter) answers() []request {
	return slices.DeleteFunc(c.made(), func(r request) bool { return !r.follows() || r.inVain() })
}

// expectReasons checks the node's requests, however slow the server is: it lists an object once, and once
// more each time that the server has forgotten its version. After a failed request it waits, each time
// longer.
func (c *counter) expectReasons(t *testing.T) {
	t.Helper()
	const first, longest = 300 * time.Millisecond, 20 * time.Second // configsource's backoff
	last, pause := map[string]request{}, map[string]time.Duration{}
	for _, r := range c.made() {
		object := r.object()
		before, again := last[object]
		switch {
		case !r.follows():
			continue
		case again && !r.watch() && before.watch() && !before.forgotten:
			t.Errorf("%s is listed again at %s after a watch at %s that the server answered with %d", object, r.at, before.at, before.answer)
		case again && !r.watch() && !before.watch() && !before.inVain():
			t.Errorf("%s is listed twice, at %s and %s", object, before.at, r.at)
		}
		if again && before.inVain() && before.watch() == r.watch() {
			if waited := r.at.Sub(before.at); waited < pause[object] {
				t.Errorf("%s is asked for %s after a request in vain, want %s at least", object, waited, pause[object])
			}
			pause[object] = min(2*pause[object], longest)
		} else {
			pause[object] = first
		}
		last[object] = r
	}
	if t.Failed() {
		for _, r := range c.made() {
			t.Logf("%s answered %d, forgotten %t: %s", r.at, r.answer, r.forgotten, r.what)
		}
	}
}

// readAnswer watches an answer for the error of a server that has forgotten a version.
type readAnswer struct {
	io.ReadCloser
	counter *counter
	place   int
	tail    []byte
}

func (a *readAnswer) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	const expired = string(metav1.StatusReasonExpired)
	a.tail = append(a.tail, p[:n]...)
	if forgotten := bytes.Contains(a.tail, []byte(expired)); forgotten || err != nil {
		a.counter.mu.Lock()
		r := &a.counter.requests[a.place]
		r.forgotten, r.ended = r.forgotten || forgotten, r.ended || err != nil
		r.broken = r.broken || err != nil && !errors.Is(err, io.EOF) && (!r.watch() || errors.Is(err, context.Canceled))
		a.counter.mu.Unlock()
	}
	a.tail = a.tail[max(0, len(a.tail)-len(expired)):]
	return n, err
}

// Close notes whether the client closes the answer before its end.
func (a *readAnswer) Close() error {
	a.counter.mu.Lock()
	r := &a.counter.requests[a.place]
	r.broken = r.broken || !r.ended
	a.counter.mu.Unlock()
	return a.ReadCloser.Close()
}

type roundTripper func(*http.Request) (*http.Response, error)

func (t roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

type counted struct {
	net.Conn
	counter *counter
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.counter.read.Add(int64(n))
	return n, err
}

func (c counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.counter.written.Add(int64(n))
	return n, err
}

func (c counted) Close() error {
	c.counter.mu.Lock()
	delete(c.counter.open, c.Conn)
	c.counter.mu.Unlock()
	return c.Conn.Close()
}

// testOneConnection checks that the reader and the writer, each with its own configuration as in the
// program, share one connection to the API server.
func testOneConnection(t *testing.T, s *server) {
	s.setNode("one", "a")
	s.setProfiles(map[string]string{"a": document("2")})
	// Connections to the relay are the program's alone.
	port, open := s.relay(t)
	kubeconfig := filepath.Join(t.TempDir(), "config")
	write(t, kubeconfig, fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: "https://127.0.0.1:%d", insecure-skip-tls-verify: true}}],
users: [{name: u, user: {token: %s}}], contexts: [{name: c, context: {cluster: c, user: u}}]}`, port, virgateToken))
	read, err := kube.RESTConfig(kubeconfig)
	s.must(err)
	f := s.followBy(t, "one", virgateToken, func(f *nodeClient) {
		api, err := kube.NewClient(read)
		s.must(err)
		log := slog.New(slog.DiscardHandler)
		f.policy.Source, f.policy.Labels = configsource.NewConfigMap(api, namespace, configMap, log), configsource.NewNodeLabels(api, "one", label, log)
		f.config, err = kube.RESTConfig(kubeconfig)
		s.must(err)
		f.tell(t, "one")
	})
	f.awaits(t, is(t, "a", document("2")), "")
	s.await("the Node to say so", func() bool {
		return s.node("one").Labels[nodestatus.StateLabel] == "applied" && len(s.told("one", "")) == 1
	})
	// A connection that lost a race is closed at once.
	s.await("one connection", func() bool { return open.Load() == 1 })
}

// relay returns a port of its own that leads to the server until the test ends, and the number of
// connections that clients have open to it.
func (s *server) relay(t *testing.T) (port int, open *atomic.Int64) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	s.must(err)
	t.Cleanup(func() { _ = listener.Close() })
	open = &atomic.Int64{}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			open.Add(1)
			go func() {
				defer open.Add(-1)
				defer func() { _ = client.Close() }()
				upstream, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.port))
				if err != nil {
					return
				}
				defer func() { _ = upstream.Close() }()
				go func() {
					_, _ = io.Copy(client, upstream)
					_ = client.Close()
				}()
				_, _ = io.Copy(upstream, client)
			}()
		}
	}()
	return listener.Addr().(*net.TCPAddr).Port, open
}

// program is all of Virgate on one simulated node.
type program struct {
	counter
	gpus    *simnode.Node
	kubelet *simkubelet.Kubelet
}

// run starts the program for the Node with GPUs of that kind until the test ends. It has the profiles of
// the API server unless change, which may be nil, changes that.
func (s *server) run(t *testing.T, name, gpus string, change func(*daemon.Options)) *program {
	t.Helper()
	dir := shortdir.New(t)
	p := &program{}
	var err error
	p.gpus, err = simnode.New(gpus)
	s.must(err)
	log := slog.New(slog.DiscardHandler)
	p.kubelet = simkubelet.New(simkubelet.Options{Dir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"), Logger: log})
	config := p.into(s.config(virgateToken))
	reporter, err := nodestatus.New(nodestatus.Options{Config: config, Node: name, Events: true, Condition: true, Annotations: true})
	s.must(err)
	api, err := kube.NewClient(config)
	s.must(err)
	options := daemon.Options{
		GPUs: func(configs.StartupSettings) (daemon.GPUs, error) { return daemon.Simulated(p.gpus, p.gpus), nil },
		Profile: daemon.ProfileOptions{
			Source: configsource.NewConfigMap(api, namespace, configMap, log), Labels: configsource.NewNodeLabels(api, name, label, log),
		},
		PluginDir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"),
		Timing: plugin.Timing{RemovalDelay: 500 * time.Millisecond, StopAfter: time.Second},
		Rescan: time.Minute, Probe: time.Minute, Reporter: reporter,
		Settings: agent.Settings{NodeName: name, Logger: log, Version: "test"},
	}
	if change != nil {
		change(&options)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { _ = p.kubelet.Run(ctx) })
	running.Go(func() {
		if err := daemon.Run(ctx, options); err != nil {
			t.Error(err)
		}
	})
	return p
}

// offers reports whether the kubelet can grant exactly this many of the resource.
func (p *program) offers(resource string, devices int) bool {
	return p.kubelet.Snapshot().Resources[resource].Allocatable == devices
}

// testProgramTells runs the whole program between a simulated driver, a simulated kubelet and the real API
// server.
func testProgramTells(t *testing.T, s *server) {
	s.setNode("program", "")
	profile := filepath.Join(t.TempDir(), "profile.yaml")
	const entry = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: "
	write(t, profile, entry+"4}\n")
	gpus := s.run(t, "program", "dgx-a100", func(o *daemon.Options) {
		o.Profile, o.PodResourcesSocket, o.Probe = daemon.ProfileOptions{Path: profile}, "", 100*time.Millisecond
	}).gpus
	s.await("the first profile", func() bool {
		return s.node("program").Labels[nodestatus.StateLabel] == "applied" && len(s.told("program", "ProfileApplied")) == 1
	})
	generation := s.node("program").Annotations[nodestatus.GenerationAnnotation]

	s.await("the XID", func() bool {
		// An event before the program listens is lost, so the test repeats it.
		s.must(gpus.Do("xid", map[string]string{"gpu": "0", "code": "79"}))
		return slices.ContainsFunc(s.told("program", "GPUUnhealthy"), func(m string) bool { return strings.Contains(m, "GPU 0 (GPU-") && strings.Contains(m, "XID 79") })
	})

	write(t, profile, entry+"-3}\n")
	s.await("the refusal", func() bool {
		return s.says("program", generation, "rejected", "ProfileRejected") && len(s.told("program", "ProfileRejected")) == 1
	})
	for _, part := range []string{profile + ":5", "sharing.timeSlicing.resources[0].replicas", "(got -3)"} {
		if got := s.told("program", "ProfileRejected")[0]; !strings.Contains(got, part) {
			t.Errorf("%q does not name %s", got, part)
		}
	}

	write(t, profile, entry+"5}\n")
	s.await("the next profile", func() bool {
		node := s.node("program")
		return node.Labels[nodestatus.StateLabel] == "applied" && node.Annotations[nodestatus.GenerationAnnotation] != generation && len(s.told("program", "ProfileApplied")) == 2
	})
}

// testKubelet runs the whole program between the API server and a simulated kubelet: a change in the
// cluster reaches the kubelet on the stream that was already open.
func testKubelet(t *testing.T, s *server) {
	two, four, ten := document("2"), document("4"), document("10")
	s.setNode("n1", "a")
	s.setProfiles(map[string]string{"a": two, "b": four})
	kubelet := s.run(t, "n1", "t4", nil).kubelet
	shows := func(devices int) {
		t.Helper()
		began := time.Now()
		await.True(t, "the kubelet to see it", func() bool {
			return kubelet.Snapshot().Resources["nvidia.com/gpu"].Allocatable == devices
		})
		t.Logf("%d devices after %s", devices, since(began))
	}
	shows(2)
	s.setNode("n1", "b")
	shows(4)
	s.setProfiles(map[string]string{"a": two, "b": ten})
	shows(10)
	s.setProfiles(map[string]string{"a": two, "b": document("0")})
	s.setNode("n1", "a")
	shows(2)
	if seen := kubelet.Snapshot().Resources["nvidia.com/gpu"]; seen.StreamsOpened != 1 || seen.Registrations != 1 {
		t.Errorf("%d streams, %d registrations; want one of each", seen.StreamsOpened, seen.Registrations)
	}
}
