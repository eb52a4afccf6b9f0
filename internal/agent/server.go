package agent

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/exporter-toolkit/web"

	"github.com/virgate/virgate/plugin"
)

// HTTP is how the program answers on HTTP, beside the address. The zero HTTP is
// plain and shows all series.
type HTTP struct {
	// ConfigFile protects the address with TLS and basic authentication, as the
	// web configuration file of Prometheus's exporters says; empty for plain HTTP.
	// Certificates and users are read anew while serving.
	ConfigFile string
	// HealthListen is another address, for /healthz and /readyz alone and always
	// plain; empty for none.
	HealthListen string
	// Profiling adds /debug/pprof/.
	Profiling bool
	// NoContainers leaves out the series that name pods.
	NoContainers bool
	// MaxSeries is how many of Virgate's series a scrape may have; 10000 when 0.
	MaxSeries int
}

// defaultMaxSeries leaves room for 8 boards with 200 replicas each.
const defaultMaxSeries = 10000

// Validate says what is wrong with the configuration file.
func (h HTTP) Validate() error {
	if err := web.Validate(h.ConfigFile); err != nil {
		return fmt.Errorf("read the web configuration file %s: %w", h.ConfigFile, err)
	}
	return nil
}

// listenAll opens the addresses and returns what serves them, which ends with
// its context.
func (a *agent) listenAll(ctx context.Context) (servers []func(context.Context) error, err error) {
	var open []net.Listener
	defer func() {
		if err != nil {
			for _, listener := range open {
				_ = listener.Close()
			}
		}
	}()
	if a.Listen != "" {
		listener, err := listen(ctx, a.Listen)
		if err != nil {
			return nil, fmt.Errorf("listen for HTTP: %w", err)
		}
		a.Logger.Info("http listens", "address", listener.Addr().String())
		open = append(open, listener)
		servers = append(servers, func(ctx context.Context) error {
			return a.serve(ctx, listener, a.handler(), a.HTTP.ConfigFile)
		})
	}
	if a.HTTP.HealthListen != "" {
		listener, err := listen(ctx, a.HTTP.HealthListen)
		if err != nil {
			return nil, fmt.Errorf("listen for health: %w", err)
		}
		a.Logger.Info("health listens", "address", listener.Addr().String())
		open = append(open, listener)
		servers = append(servers, func(ctx context.Context) error {
			return a.serve(ctx, listener, a.healthHandler(), "")
		})
	}
	return servers, nil
}

func listen(ctx context.Context, address string) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return plugin.LimitConnections(listener, mostConnections), nil
}

// mostConnections bounds what clients that say nothing, or say it slowly, take of
// this program's memory and descriptors. A few scrapers and people need a few.
const mostConnections = 256

// serve answers HTTP until ctx ends. It only reads: nothing about the node can
// be changed here.
func (a *agent) serve(ctx context.Context, listener net.Listener, handler http.Handler, config string) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if config == "" {
		return server.Serve(listener)
	}
	return web.Serve(listener, server, &web.FlagConfig{WebConfigFile: &config}, a.Logger)
}

// healthHandler answers probes.
func (a *agent) healthHandler() http.Handler {
	mux := http.NewServeMux()
	a.handleHealth(mux)
	return mux
}

func (a *agent) handleHealth(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
}

// handleProfiling answers go tool pprof. A profile may take as long as an answer
// may: 30 s.
func handleProfiling(mux *http.ServeMux) {
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
}
