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
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/plugin"
)

const gpu = "nvidia.com/gpu"

// timing has the waits of the protocol short enough for many repetitions.
func timing() plugin.Timing {
	return plugin.Timing{Quiet: 40 * time.Millisecond, StopAfter: 20 * time.Millisecond, ListInterval: time.Millisecond}
}

// options say how a program differs from the usual one.
type options struct {
	// stateDir and cdiDir are where it writes; below its own folder when empty.
	stateDir, cdiDir string
	// noKubelet leaves kubelet.sock to the test.
	noKubelet bool
	profile   string
	// node is the simulated node's name; two boards when empty.
	node string
}

// program is a run of Virgate with its parts put together as cmd/virgate does, on
// a simulated node and beside a simulated kubelet.
type program struct {
	t       *testing.T
	ctx     context.Context
	dir     string
	node    *simnode.Node
	kubelet *simkubelet.Kubelet
	look    chan struct{}
	log     *logbook
}

// logbook is the beginning of the log, for any goroutine. It has all its room
// from the start, so that a log does not look like a leak.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

const logged = 1 << 20

func newLogbook() *logbook {
	l := &logbook{}
	l.text.Grow(logged)
	return l
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text.Len()+len(p) <= logged {
		_, _ = l.text.Write(p)
	}
	return len(p), nil
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start runs everything until the test ends.
func start(t *testing.T, o options) *program {
	t.Helper()
	dir, err := os.MkdirTemp("", "vh") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
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
	p := &program{t: t, dir: dir, node: node, look: make(chan struct{}, 1), log: newLogbook()}
	p.write(o.profile)
	resources := filepath.Join(dir, "pr.sock")
	p.kubelet = simkubelet.New(simkubelet.Options{Dir: dir, PodResourcesSocket: resources, StopGrace: time.Millisecond, StatusPeriod: 50 * time.Millisecond})

	ctx, cancel := context.WithCancel(t.Context())
	p.ctx = ctx
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
		for _, violation := range p.kubelet.Violations() {
			t.Errorf("the kubelet's contract is broken: %s", violation)
		}
		_ = os.RemoveAll(dir)
	})
	if !o.noKubelet {
		running.Go(func() { _ = p.kubelet.Run(ctx) })
	}
	running.Go(func() {
		if err := p.run(ctx, o, resources); err != nil {
			t.Errorf("the program ends: %v", err)
		}
	})
	return p
}

func (p *program) run(ctx context.Context, o options, resources string) error {
	log := slog.New(slog.NewTextHandler(p.log, nil))
	file := state.NewFile(o.stateDir, log)
	file.Load()
	kubelet := podresources.New(podresources.Options{Socket: resources, CheckpointDir: p.dir, Logger: log})
	defer func() { _ = kubelet.Close() }()
	library := nvml.WithDeadlines(p.node, nvml.Limits{})
	node := nvml.NewNode(library, nvml.Options{Logger: log, Rescan: time.Second, Probe: time.Second, Store: state.Health{File: file}})
	specs := cdi.NewWriter(cdi.Options{Dir: o.cdiDir, Holders: kubelet, Source: cdi.Simulated{}, Logger: log, Retry: 20 * time.Millisecond})
	profile := &policy.File{Path: p.profile()}
	started, err := profile.Config()
	if err != nil {
		return err
	}
	profile.Started = started.Process
	return agent.Run(ctx, agent.Options{
		Node: node, Policy: profile, Health: node, TakeOver: node.TakeOver, Kept: file.Trouble,
		Plugin:  plugin.NewManager(plugin.Options{Dir: p.dir, Kubelet: kubelet, Store: state.Lists{File: file}, Timing: timing(), Logger: log}),
		Host:    host.New(host.Options{Root: p.dir, Specs: specs, Logger: log, Interval: 20 * time.Millisecond}),
		Meter:   usage.NewSampler(usage.Options{Meter: nvml.NewMeter(library), Proc: p.node.Proc(), Containers: p.node, Logger: log}),
		Holders: kubelet, SampleInterval: 50 * time.Millisecond,
		Partitioner: nvml.NewPartitioner(library, node.Quiet), Journal: state.Journal{File: file}, Refresh: node.LookAgain,
		Listen: "127.0.0.1:0", Look: p.look, Logger: log, Version: "test",
	})
}

func (p *program) profile() string { return filepath.Join(p.dir, "profile.yaml") }

// write makes text the profile, by a rename as a mounted ConfigMap does.
func (p *program) write(text string) {
	p.t.Helper()
	if err := os.WriteFile(p.profile()+".new", []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Rename(p.profile()+".new", p.profile()); err != nil {
		p.t.Fatal(err)
	}
	select {
	case p.look <- struct{}{}:
	default:
	}
}

// patience is how long the program may take for anything on a machine with much
// else to do.
const patience = 2 * time.Minute

// shows waits until the kubelet could give exactly so many of the resource.
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

// address is where HTTP is served.
func (p *program) address() string {
	p.t.Helper()
	form := regexp.MustCompile(`msg="http listens" address=(\S+)`)
	for late := time.After(patience); ; {
		if found := form.FindStringSubmatch(p.log.String()); found != nil {
			return found[1]
		}
		select {
		case <-late:
			p.t.Fatalf("HTTP is not served:\n%s", p.log)
		case <-time.After(time.Millisecond):
		}
	}
}

// get is the answer to a request of a client that does as it should.
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
	for late := time.After(patience); ; {
		body := p.get(path)
		if strings.Contains(body, text) {
			return
		}
		select {
		case <-late:
			p.t.Fatalf("%s does not say %q:\n%s", path, text, body)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// replicas is a profile with so many shares of each board.
func replicas(n int) string {
	return fmt.Sprintf("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n", n)
}
