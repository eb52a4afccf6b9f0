package agent

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/exporter-toolkit/web"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

// HTTP says how HTTP is served. The zero HTTP is plain and shows all series.
type HTTP struct {
	// ConfigFile protects the address with TLS and basic authentication, as the
	// web configuration file of Prometheus's exporters says; empty for plain HTTP.
	// Certificates and users are read anew while serving.
	ConfigFile string
	// HealthListen is another address, plain, for /healthz and /readyz; empty for none.
	HealthListen string
	// Profiling adds /debug/pprof/.
	Profiling bool
	// NoContainers leaves out the series that name pods.
	NoContainers bool
	// MaxSeries is how many of Virgate's series a scrape may have; 10000 when 0, which
	// leaves room for 8 GPUs with 200 replicas each.
	MaxSeries int
}

// Validate says what is wrong with the configuration file.
func (h HTTP) Validate() error {
	if err := web.Validate(h.ConfigFile); err != nil {
		return fmt.Errorf("read the web configuration file %s: %w", h.ConfigFile, err)
	}
	return nil
}

// servers are what answers HTTP, one for each address. The error says that an address
// cannot be one.
func (a *agent) servers() (servers []func(context.Context) error, err error) {
	for i, s := range []struct {
		what, listens, address, config string
		handler                        func() *http.ServeMux
	}{
		{"HTTP", "http listens", a.Listen, a.HTTP.ConfigFile, a.handler},
		{"health", "health listens", a.HTTP.HealthListen, "", a.healthHandler},
	} {
		if s.address == "" {
			continue
		}
		if _, err := net.ResolveTCPAddr("tcp", s.address); err != nil {
			return nil, fmt.Errorf("listen for %s: %w", s.what, err)
		}
		serve := func(ctx context.Context) error {
			// That another program has the address, as may be on the host's network, must
			// not end the serving of GPUs.
			for pause := firstPause; ctx.Err() == nil; {
				began := time.Now()
				listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.address)
				if err == nil {
					a.Logger.Info(s.listens, "address", listener.Addr().String()) //nolint:sloglint // one of the two constants above
					a.setUnserved(i, nil)
					err = a.serve(ctx, listener, s.handler(), s.config)
				}
				if ctx.Err() == nil {
					a.setUnserved(i, fmt.Errorf("listen for %s: %w", s.what, err))
				}
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
				pause = nextPause(pause, time.Since(began))
			}
			return nil
		}
		if a.ListenWhenServing && i == 0 {
			serve = after(a.locked, serve)
		}
		servers = append(servers, serve)
	}
	return servers, nil
}

// The pause before an address is tried again doubles from the first to the longest.
const (
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second
)

// nextPause is the pause after this one, and after a try that took so long with it: what
// was served for a while and ended is a new failure.
func nextPause(pause, took time.Duration) time.Duration {
	if took >= 2*longestPause {
		return firstPause
	}
	return min(2*pause, longestPause)
}

// setUnserved tells why an address is not served, or that it is.
func (a *agent) setUnserved(i int, err error) {
	if last := a.unserved[i].Swap(&err); err != nil && (last == nil || !sameError(*last, err)) {
		a.Logger.Error("http not served, trying again", "error", err)
	}
	a.wakeReport()
}

// maxConnections bounds how much memory and how many descriptors idle or slow clients
// can take. Scrapers and people need only a few connections.
const maxConnections = 256

// connections closes the oldest connection of a server when there are more than
// maxConnections. netutil.LimitListener lets the newest wait instead, so that
// any pod which can reach the address could make the kubelet's probes time out.
type connections struct {
	mu   sync.Mutex
	open []net.Conn // oldest first
}

// follow is for http.Server.ConnState, which has each connection before the next is accepted.
func (c *connections) follow(connection net.Conn, state http.ConnState) {
	if secured, ok := connection.(*tls.Conn); ok {
		connection = secured.NetConn() // Whose end waits for nobody.
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		if c.open = append(c.open, connection); len(c.open) > maxConnections {
			_ = c.open[0].Close()
			c.open = c.open[1:]
		}
	case http.StateClosed, http.StateHijacked:
		c.open = slices.DeleteFunc(c.open, func(other net.Conn) bool { return other == connection })
	case http.StateActive, http.StateIdle:
	}
}

// serve answers HTTP until ctx ends. It only reads: nothing can be changed here.
func (a *agent) serve(ctx context.Context, listener net.Listener, handler http.Handler, config string) error {
	server := &http.Server{
		Handler:           handler,
		ConnState:         new(connections).follow,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	defer func() { _ = listener.Close() }() // A bad web configuration file leaves it open.
	if config == "" {
		return server.Serve(listener)
	}
	return web.Serve(listener, server, &web.FlagConfig{WebConfigFile: &config}, a.Logger)
}

func (a *agent) healthHandler() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	return mux
}

// registry has the collectors of a scrape. When there are too many series, those of
// the last collectors are left out.
func (a *agent) registry() *prometheus.Registry {
	show := []prometheus.Collector{
		collector{metrics.ParseFamilies(programFamilies), a}, a.calls, metrics.NewHealthCollector(a.Health.Health),
		metrics.NewUtilizationCollector(a.utilization), metrics.NewCollector(a.sharing),
	}
	if !a.HTTP.NoContainers {
		show = append(show, metrics.NewContainerCollector(a.sharing, a.utilization))
	}
	if a.ClaimCalls != nil {
		show = append([]prometheus.Collector{a.ClaimCalls, draCollector{metrics.ParseFamilies(draFamilies), a}}, show...)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		metrics.NewLimitedCollector(cmp.Or(a.HTTP.MaxSeries, 10000), show...),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}

// maxRequests is how many are answered at a time on each path; others get 503.
const maxRequests = 8

func limited(handler http.HandlerFunc) http.HandlerFunc {
	underWay := make(chan struct{}, maxRequests)
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case underWay <- struct{}{}:
			defer func() { <-underWay }()
			handler(w, r)
		default:
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests at a time", http.StatusServiceUnavailable)
		}
	}
}

func (a *agent) handler() *http.ServeMux {
	registry := a.registry()
	mux := a.healthHandler()
	mux.HandleFunc("GET /plan", limited(a.showPlan))
	mux.HandleFunc("GET /status", limited(a.showPage()))
	mux.Handle("GET /{$}", http.RedirectHandler("/status", http.StatusFound))
	mux.HandleFunc("GET /api/v1/status", limited(func(w http.ResponseWriter, r *http.Request) { writeJSON(w, a.status(r.Context())) }))
	mux.HandleFunc("GET /api/v1/forecast", a.showForecast())
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		Registry: registry, MaxRequestsInFlight: maxRequests, CoalesceGather: true,
		// What is wrong with one series is no reason to lose the others.
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(a.Logger.Handler(), slog.LevelWarn),
	}))
	if a.HTTP.Profiling { // For go tool pprof, in the 30 s that an answer may take.
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// ready answers 200 when every planned resource is registered and has its stream,
// and otherwise 503 with the reasons, one a line. That a switch waits for pods is no
// reason, or they would hold up a rollout; the answer says it.
func (a *agent) ready(w http.ResponseWriter, _ *http.Request) {
	if reasons := a.unready(); len(reasons) > 0 {
		http.Error(w, strings.Join(reasons, "\n"), http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
	p := a.progress.Load()
	for _, text := range nodereport.Waiting(p.layouts, p.waits) {
		_, _ = fmt.Fprintln(w, nodereport.ProfileSwitching, "waits:", text)
	}
}

func (a *agent) unready() []string {
	switch {
	case a.serving.Load():
	case a.standby.Load():
		return nil // Another Virgate serves this node.
	default:
		return []string{"not serving yet"}
	}
	s := a.state.Load()
	var reasons []string
	switch {
	case s.profile == nil && s.rejected != nil:
		reasons = append(reasons, "no profile: "+s.rejected.Error())
	case s.profile == nil:
		reasons = append(reasons, "no profile yet")
	case !s.planned && s.unread != nil:
		reasons = append(reasons, "GPUs not read: "+s.unread.Error())
	case !s.planned:
		reasons = append(reasons, "GPUs not read yet")
	}
	status := a.Plugin.Status()
	if s.planned && !status.Served {
		reasons = append(reasons, "plan not served yet")
	}
	for _, name := range unregistered(status) {
		reasons = append(reasons, name+": not registered with the kubelet")
	}
	return reasons
}

// unregistered are the resources that the kubelet does not listen to.
func unregistered(status plugin.Status) (names []string) {
	for _, r := range status.Resources {
		if r.Streams != 1 {
			names = append(names, r.Name)
		}
	}
	return names
}

func (a *agent) showPlan(w http.ResponseWriter, _ *http.Request) {
	s := a.state.Load()
	if !s.planned {
		http.Error(w, "no plan yet", http.StatusServiceUnavailable)
		return
	}
	writeJSON(w, s.plan.Summary())
}

// writeJSON answers with the value, indented for people.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(value)
}

// ServeControl answers requests on the control socket until ctx ends. Only there can a
// running Virgate be changed, so the listener must keep out who may not do that.
func ServeControl(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	return server.Serve(listener)
}

// maxControlBody bounds the body of a request on the control socket, in bytes.
const maxControlBody = 64 << 10

// HealthHandler answers GET /health with the health of all units, and POST
// /health/clear?gpu=SELECTOR with that of the units it cleared, both as a
// sharing.HealthReport in JSON. It answers 400 when there is no such unit. It is for
// the control socket: on the other addresses nothing can be changed.
func HealthHandler(health Health) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, health.Health())
	})
	mux.HandleFunc("POST /health/clear", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, maxControlBody)
		selector, err := sharing.ParseSelector(r.FormValue("gpu"))
		if err != nil {
			http.Error(w, "gpu: "+err.Error(), http.StatusBadRequest)
			return
		}
		units, err := health.ClearHealth(r.Context(), selector)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		writeJSON(w, sharing.HealthReport{Units: units, Monitors: []sharing.HealthMonitor{}})
	})
	return mux
}
