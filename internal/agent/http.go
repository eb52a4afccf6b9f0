package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

func (a *agent) listen(ctx context.Context) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", a.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen for HTTP: %w", err)
	}
	a.Logger.Info("http listens", "address", listener.Addr().String())
	return listener, nil
}

// serve answers HTTP until ctx ends. It only reads: nothing about the node can
// be changed here.
func (a *agent) serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler:           a.handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	return server.Serve(listener)
}

func (a *agent) registry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		metrics.NewCollector(source{a}), newCollector(a),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	if a.Health != nil {
		registry.MustRegister(metrics.NewHealthCollector(a.Health))
	}
	return registry
}

func (a *agent) handler() http.Handler {
	registry := a.registry()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", a.ready)
	mux.HandleFunc("GET /plan", a.showPlan)
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry, ErrorHandling: promhttp.ContinueOnError}))
	return mux
}

// ready answers 200 when every planned resource is registered and the kubelet
// listens, and else 503 with the reasons, one a line.
func (a *agent) ready(w http.ResponseWriter, _ *http.Request) {
	if reasons := a.unready(); len(reasons) > 0 {
		http.Error(w, strings.Join(reasons, "\n"), http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
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
	for _, r := range status.Resources {
		if r.Streams != 1 {
			reasons = append(reasons, r.Name+": not registered with the kubelet")
		}
	}
	return reasons
}

func (a *agent) showPlan(w http.ResponseWriter, _ *http.Request) {
	s := a.state.Load()
	if !s.planned {
		http.Error(w, "no plan yet", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(s.plan.Summary())
}

// source shows the agent's state to the sharing metrics.
type source struct{ *agent }

func (s source) GPUs() []sharing.GPU           { return s.state.Load().gpus }
func (s source) Resources() []sharing.Resource { return s.state.Load().plan.Resources }
func (s source) Allocations() ([]sharing.Allocation, bool) {
	if held := s.allocations.Load(); held != nil {
		return *held, true
	}
	return nil, false
}
