package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/policy"
	"github.com/virgate/virgate/internal/policy/report"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// The waits of the program, short enough for thousands of operations. The quiet
// time stays well above what a kubelet here takes to read a list, and stopAfter
// above what it takes to keep and read one on a busy machine.
const (
	quiet       = 400 * time.Millisecond
	retireAfter = 300 * time.Millisecond
	stopAfter   = time.Second
	healthQuiet = 100 * time.Millisecond
	probe       = 60 * time.Millisecond
	rescan      = 120 * time.Millisecond
)

// site is where a program runs.
type site struct {
	// dir is the device-plugins directory, with the state file.
	dir, podResources, kubeconfig string
	// root is what the program takes for the host's file system.
	root string
	node *simnode.Node
	log  *slog.Logger
}

// program is one run of `virgate run`, with its parts put together as
// cmd/virgate/run.go does, but for the flags, and for the times above.
type program struct {
	reach  reach
	seen   *seenPolicy
	look   chan struct{}
	cancel context.CancelFunc
	// ended is closed when it has; err then says what went wrong.
	ended chan struct{}
	err   error
	// address is known once HTTP is served.
	address chan string
}

// start returns at once; what cannot be started is told by stop.
func start(at reach) *program {
	ctx, cancel := context.WithCancel(context.Background())
	p := &program{
		reach: at,
		seen:  &seenPolicy{}, look: make(chan struct{}, 1), cancel: cancel,
		ended: make(chan struct{}), address: make(chan string, 1),
	}
	go func() {
		defer close(p.ended)
		p.err = p.run(ctx, at)
	}()
	return p
}

func (p *program) run(ctx context.Context, s reach) error {
	log := slog.New(addressHandler{s.log.Handler(), p.address})
	file := state.NewFile(s.dir, log)
	config, err := policy.APIConfig(s.kubeconfig)
	if err != nil {
		return err
	}
	api, err := policy.NewAPI(config)
	if err != nil {
		return err
	}
	reporter, err := report.New(report.Options{
		Config: config, Node: nodeName, Events: true, Condition: true, Annotations: true, Logger: log,
	})
	if err != nil {
		return err
	}
	profiles, err := openProfiles(ctx, api, state.Profile{File: file}, reporter, log)
	if err != nil {
		return err
	}
	defer func() { _ = profiles.ahead.Stop() }()
	p.seen.use(profiles)

	library := nvml.WithDeadlines(s.driver, nvml.Limits{})
	kubelet := podresources.New(podresources.Options{Socket: s.podResources, CheckpointDir: s.dir, Logger: log})
	defer func() { _ = kubelet.Close() }()
	node := nvml.NewNode(library, nvml.Options{
		Logger: log, Rescan: rescan, Probe: probe, Backoff: 20 * time.Millisecond,
		Store: state.Health{File: file}, Boot: "soak",
	})
	var lock *state.Lock
	defer func() {
		if lock != nil {
			_ = lock.Release()
		}
	}()
	keeper := policy.NewKeeper(state.Profile{File: file}, configs.Overrides{}, profiles.started, log)
	return agent.Run(ctx, agent.Options{
		Node: node, Policy: p.seen,
		Plugin: plugin.NewManager(plugin.Options{
			Dir: s.dir, Kubelet: kubelet, Store: state.Lists{File: file}, Logger: log.With("component", "plugin"),
			Timing: plugin.Timing{Quiet: quiet, RetireAfter: retireAfter, StopAfter: stopAfter, ListInterval: 5 * time.Millisecond},
		}),
		Host: host.New(host.Options{
			Root: s.root, DevRoot: profiles.started.DevRoot, Logger: log,
			Specs: cdi.NewWriter(cdi.Options{Dir: filepath.Join(s.dir, "cdi"), Holders: kubelet, Source: cdi.Simulated{}, Logger: log}),
		}),
		Holders: kubelet, Health: node, Keeper: keeper, Reporter: reporter,
		OnProfile: func(profile sharing.Profile) {
			rules := profile.Health
			rules.QuietTime, rules.MaxQuietTime = healthQuiet, healthQuiet // Less than a profile may say.
			node.SetHealth(rules)
		},
		Claim: func(ctx context.Context, standBy func()) (err error) {
			lock, err = state.Acquire(ctx, s.dir, func(err error) {
				if errors.Is(err, state.ErrLocked) {
					standBy()
				}
			})
			if err != nil {
				return err
			}
			file.Load()
			return plugin.RemoveSockets(s.dir)
		},
		TakeOver:    node.TakeOver,
		Partitioner: nvml.NewPartitioner(library, node.Quiet), Journal: state.Journal{File: file}, Refresh: node.LookAgain,
		Meter: usage.NewSampler(usage.Options{
			Meter: nvml.NewMeter(library), Proc: s.node.Proc(), Containers: s.node, Logger: log,
		}),
		SampleInterval: 500 * time.Millisecond,
		Listen:         "127.0.0.1:0", Look: p.look, Logger: log, Version: "soak", NodeName: nodeName,
		Background: []func(context.Context) error{keeper.Run},
	})
}

// hangup is SIGHUP.
func (p *program) hangup() {
	select {
	case p.look <- struct{}{}:
	default:
	}
}

// longestStop is for a machine that does a lot else: alone it takes tens of
// milliseconds.
const longestStop = time.Minute

// stop is SIGTERM. It returns how long the end took.
func (p *program) stop() (time.Duration, error) {
	began := time.Now()
	p.cancel()
	select {
	case <-p.ended:
		if p.err != nil {
			return time.Since(began), fmt.Errorf("virgate run: %w", p.err)
		}
		return time.Since(began), nil
	case <-time.After(longestStop):
		return longestStop, fmt.Errorf("invariant 10: virgate run has not ended %s after SIGTERM", longestStop)
	}
}

// scrape reads every page.
func (p *program) scrape(ctx context.Context) error {
	for _, path := range []string{"/healthz", "/metrics", "/plan", "/status", "/api/v1/status"} {
		code, _, err := p.page(ctx, path)
		if err != nil {
			return err
		}
		// There is no plan before there is a profile.
		if code != http.StatusOK && (path != "/plan" || code != http.StatusServiceUnavailable) {
			return fmt.Errorf("%s: %d", path, code)
		}
	}
	return nil
}

// page is what the program answers on HTTP.
func (p *program) page(ctx context.Context, path string) (code int, body string, err error) {
	var address string
	select {
	case address = <-p.address:
		p.address <- address
	default:
		return 0, "", errors.New("http is not served yet")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return 0, "", err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// addressHandler passes log records on, and tells where HTTP is served.
type addressHandler struct {
	slog.Handler
	address chan string
}

func (h addressHandler) Handle(ctx context.Context, record slog.Record) error {
	if record.Message == "http listens" {
		record.Attrs(func(a slog.Attr) bool {
			if a.Key == "address" {
				h.address <- a.Value.String()
			}
			return true
		})
	}
	return h.Handler.Handle(ctx, record)
}
