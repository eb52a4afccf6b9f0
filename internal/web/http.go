package web

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	toolkit "github.com/prometheus/exporter-toolkit/web"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/page"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/wake"
	"github.com/virgate/virgate/sharing"
)

// HTTP configures how HTTP is served. The zero HTTP is plain and shows all series.
type HTTP struct {
	// ConfigFile protects the address with TLS and basic authentication. It is a web configuration
	// file as for Prometheus's exporters; empty for plain HTTP. Certificates and users are read
	// again while serving.
	ConfigFile string
	// HealthListen is another address, with plain HTTP, for /healthz and /readyz; empty for none.
	HealthListen string
	// Profiling adds /debug/pprof/.
	Profiling bool
	// NoContainers leaves out the series that name pods.
	NoContainers bool
	// MaxSeries is how many of Virgate's series a scrape may have. 0 means 10000, which is enough
	// for 8 GPUs with 200 replicas each.
	MaxSeries int
}

// Validate returns what is wrong with the configuration file.
func (h HTTP) Validate() error {
	if err := toolkit.Validate(h.ConfigFile); err != nil {
		return fmt.Errorf("read the web configuration file %s: %w", h.ConfigFile, err)
	}
	return nil
}

// Options are what a Server needs.
type Options struct {
	HTTP
	// Listen is the address for everything; empty for none.
	Listen string
	// May is closed once Listen may be used; nil means at once.
	May <-chan struct{}
	// Changed is called when an address may have started or stopped being served.
	Changed func()
	Node    Node
	Logger  *slog.Logger
}

// Node has the functions that return what is shown of the node. They may be called from any goroutine.
type Node struct {
	// Status may wait for the kubelet, and Forecast for the kubelet and the driver. The other
	// functions do not wait.
	Status func(context.Context) status.Status
	// Unready returns why the node is not ready, and Waiting what a change of the profile waits for.
	Unready, Waiting func() []string
	// Plan returns what the node should offer; false while that is not known.
	Plan func() (sharing.Plan, bool)
	// Forecast returns what the node would become if its Node had that label.
	Forecast func(ctx context.Context, label, value string) nodereport.Forecast
	// Metrics returns a registry with everything that a scrape gets.
	Metrics func() *prometheus.Registry
}

// Server answers HTTP requests. It only reads: nothing can be changed here.
type Server struct {
	Options
	addresses []*address
}

// address is one network address on which a Server answers.
type address struct {
	// what and listens are words for people, and config is as in HTTP.ConfigFile.
	what, listens, text, config string
	may                         <-chan struct{}
	handler                     func() http.Handler
	// unserved is why the address is not served; nil while it is.
	unserved atomic.Pointer[error]
}

// New returns a server that does not listen yet.
func New(options Options) *Server {
	s := &Server{Options: options}
	if s.Listen != "" {
		s.addresses = append(s.addresses, &address{
			what:    "HTTP",
			listens: "http listens",
			text:    s.Listen,
			config:  s.ConfigFile,
			may:     s.May,
			handler: s.handler,
		})
	}
	if s.HealthListen != "" {
		s.addresses = append(s.addresses, &address{
			what:    "health",
			listens: "health listens",
			text:    s.HealthListen,
			handler: func() http.Handler { return split(probes(s.ready), probes(s.readyWithoutReasons)) },
		})
	}
	return s
}

// CheckAddresses returns an error if an address is invalid.
func (s *Server) CheckAddresses() error {
	for _, a := range s.addresses {
		if _, err := net.ResolveTCPAddr("tcp", a.text); err != nil {
			return fmt.Errorf("listen for %s: %w", a.what, err)
		}
	}
	return nil
}

// Run answers on all addresses until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	var running sync.WaitGroup
	for _, a := range s.addresses {
		running.Go(func() { s.keepServing(ctx, a) })
	}
	running.Wait()
	return nil
}

// Unserved returns why addresses are not served.
func (s *Server) Unserved() (reasons []error) {
	for _, a := range s.addresses {
		if why := a.unserved.Load(); why != nil && *why != nil {
			reasons = append(reasons, *why)
		}
	}
	return reasons
}

// keepServing listens again and again. Another program may have the address, for example on the
// host's network; that must not keep Virgate from serving GPUs.
func (s *Server) keepServing(ctx context.Context, a *address) {
	if a.may != nil {
		select {
		case <-a.may:
		case <-ctx.Done():
			return
		}
	}
	for retry := newRetry(); ctx.Err() == nil; {
		began := time.Now()
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", a.text)
		if err == nil {
			//nolint:sloglint // one of the two constants in New
			s.Logger.Info(a.listens, "address", listener.Addr().String())
			s.setUnserved(a, nil)
			err = s.serve(ctx, listener, a.handler(), a.config)
		}
		if ctx.Err() == nil {
			s.setUnserved(a, fmt.Errorf("listen for %s: %w", a.what, err))
		}
		wake.Sleep(ctx, retry.Step())
		retry = retryAfter(retry, time.Since(began))
	}
}

// newRetry returns the pauses before an address is tried again.
func newRetry() wait.Backoff {
	return wake.Backoff(100*time.Millisecond, 10*time.Second)
}

// retryAfter returns the pauses after a try that took so long, including its pause: if an address
// was served for a while, its end is a new failure.
func retryAfter(retry wait.Backoff, took time.Duration) wait.Backoff {
	if took >= 2*retry.Cap {
		return newRetry()
	}
	return retry
}

// setUnserved records why an address is not served, or that it is, and logs a new reason.
func (s *Server) setUnserved(a *address, err error) {
	last := a.unserved.Swap(&err)
	if err != nil && (last == nil || *last == nil || (*last).Error() != err.Error()) {
		s.Logger.Error("http not served, trying again", "error", err)
	}
	s.Changed()
}

// maxConnections limits the memory and the descriptors that idle or slow clients can use. Scrapers
// and people need only a few connections.
const maxConnections = 256

// connections closes the oldest connection of a server when there are more than maxConnections.
// netutil.LimitListener makes the newest wait instead, so that any pod that can reach the address
// could make the kubelet's probes time out.
type connections struct {
	mu   sync.Mutex
	open []net.Conn // oldest first
}

// follow is for http.Server.ConnState, which reports each connection before the next one is accepted.
func (c *connections) follow(connection net.Conn, state http.ConnState) {
	if secured, ok := connection.(*tls.Conn); ok {
		connection = secured.NetConn() // Closing it does not wait for the client.
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch state {
	case http.StateNew:
		c.open = append(c.open, connection)
		if len(c.open) > maxConnections {
			_ = c.open[0].Close()
			c.open = c.open[1:]
		}
	case http.StateClosed, http.StateHijacked:
		c.open = slices.DeleteFunc(c.open, func(other net.Conn) bool { return other == connection })
	case http.StateActive, http.StateIdle:
	}
}

// serve answers HTTP until ctx ends.
func (s *Server) serve(ctx context.Context, listener net.Listener, handler http.Handler, config string) error {
	server := page.NewServer(handler)
	server.ConnState = new(connections).follow
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	defer func() { _ = listener.Close() }() // A bad web configuration file leaves it open.
	if config == "" {
		return server.Serve(listener)
	}
	return toolkit.Serve(listener, server, &toolkit.FlagConfig{WebConfigFile: &config}, s.Logger)
}

// probes returns the handler of the kubelet's probes.
func probes(ready http.HandlerFunc) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", ready)
	return mux
}

// maxRequests is how many requests each path answers at a time; others get 503.
const maxRequests = 8

func limited(handler http.HandlerFunc) http.Handler { return page.Limited(maxRequests, handler) }

// handler serves all paths on loopback, where kubectl port-forward connects after the API server has
// authorized it. Every pod of the cluster may reach the other addresses, so they serve only probes and
// metrics.
func (s *Server) handler() http.Handler {
	metrics := s.metrics()
	all := s.pages(metrics)
	open := probes(s.readyWithoutReasons)
	open.Handle("GET /metrics", metrics)
	open.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, onlyLoopback, http.StatusNotFound)
	})
	return split(all, open)
}

// split serves all to loopback requests and open to others.
func split(all, open http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if byLoopback(r) {
			all.ServeHTTP(w, r)
			return
		}
		open.ServeHTTP(w, r)
	})
}

const onlyLoopback = "only /metrics, /healthz and /readyz are served here; for the pages, run kubectl port-forward " +
	"to this pod and port, and open localhost"

// byLoopback reports whether a request came to a loopback address and its Host names one. The kernel
// drops packets from outside to such an address, and the Host excludes a site whose name points there
// (DNS rebinding).
func byLoopback(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && local.IP.IsLoopback() && page.IsLoopback(r.RemoteAddr) && page.IsLoopback(r.Host)
}

func (s *Server) metrics() http.Handler {
	registry := s.Node.Metrics()
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		Registry:            registry,
		MaxRequestsInFlight: maxRequests,
		CoalesceGather:      true,
		// An error in one series is no reason to lose the others.
		ErrorHandling: promhttp.ContinueOnError,
		ErrorLog:      slog.NewLogLogger(s.Logger.Handler(), slog.LevelWarn),
	})
}

// Handler returns the handler for all paths, whoever asks.
func (s *Server) Handler() *http.ServeMux { return s.pages(s.metrics()) }

func (s *Server) pages(metrics http.Handler) *http.ServeMux {
	mux := probes(s.ready)
	mux.Handle("GET /plan", limited(s.showPlan))
	mux.Handle("GET /status", page.Secured(limited(s.showPage())))
	page.ServeFiles(mux)
	mux.Handle("GET /{$}", http.RedirectHandler("/status", http.StatusFound))
	mux.Handle("GET /api/v1/status",
		limited(func(w http.ResponseWriter, r *http.Request) { writeJSON(w, s.Node.Status(r.Context())) }))
	mux.Handle("GET /api/v1/forecast", s.showForecast())
	mux.Handle("GET /metrics", metrics)
	if s.Profiling { // For go tool pprof, within the 30 s that an answer may take.
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// showPage shows the status to people.
func (s *Server) showPage() http.HandlerFunc {
	// Parsed at the first request, because parsing it earlier would delay the start.
	templates := sync.OnceValue(func() page.Templates { return page.NewTemplates("") })
	return func(w http.ResponseWriter, r *http.Request) {
		node := page.NewNode(s.Node.Status(r.Context()), time.Now(), page.Colours{})
		page.SendHTML(w, r, templates().Draw("page", node))
	}
}

// ready answers 200 if every planned resource is registered and has its stream, and otherwise 503
// with the reasons, one per line. A switch that waits for pods does not make the node unready,
// because it would hold up a rollout; the answer only mentions it.
func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	if reasons := s.Node.Unready(); len(reasons) > 0 {
		http.Error(w, strings.Join(reasons, "\n"), http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
	for _, text := range s.Node.Waiting() {
		_, _ = fmt.Fprintln(w, nodereport.ProfileSwitching, "waits:", text)
	}
}

// readyWithoutReasons answers only the code of ready, because the reasons name pods and profiles.
func (s *Server) readyWithoutReasons(w http.ResponseWriter, _ *http.Request) {
	if len(s.Node.Unready()) > 0 {
		http.Error(w, "not ready; virgate status in this container says why", http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}

func (s *Server) showPlan(w http.ResponseWriter, _ *http.Request) {
	plan, known := s.Node.Plan()
	if !known {
		http.Error(w, "no plan yet", http.StatusServiceUnavailable)
		return
	}
	writeJSON(w, plan.Summary())
}

const (
	// forecastTimeout is how long the kubelet and the driver may take for a forecast. forecastPause
	// is the shortest time between two forecasts: a forecast may make the driver list partitions.
	forecastTimeout = 5 * time.Second
	forecastPause   = 200 * time.Millisecond
)

func (s *Server) showForecast() http.Handler {
	pace := rate.NewLimiter(rate.Every(forecastPause), 1)
	return limited(func(w http.ResponseWriter, r *http.Request) {
		label, value := r.URL.Query().Get("label"), r.URL.Query().Get("value")
		if label == "" || value == "" {
			http.Error(w, "expected ?label=NAME&value=VALUE: which label of the Node would change, and to what",
				http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), forecastTimeout)
		defer cancel()
		if err := pace.Wait(ctx); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		writeJSON(w, s.Node.Forecast(ctx, label, value))
	})
}
