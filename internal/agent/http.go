package agent

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/virgate/virgate/sharing/metrics"
)

// registry has what a scrape shows. Where there is too much, it lacks the last
// of them.
func (a *agent) registry() *prometheus.Registry {
	show := []prometheus.Collector{newCollector(a), newCallCollector(a), newProfileCollector(a), newLayoutCollector(a)}
	if a.Health != nil {
		show = append(show, metrics.NewHealthCollector(a.Health))
	}
	show = append(show, metrics.NewUseCollector(source{a}), metrics.NewCollector(source{a}))
	if !a.HTTP.NoContainers {
		show = append(show, metrics.NewContainerCollector(source{a}, source{a}))
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		metrics.Limit(cmp.Or(a.HTTP.MaxSeries, defaultMaxSeries), show...),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}

// maxScrapes is how many are answered at a time; others get 503.
const maxScrapes = 8

func (a *agent) handler() http.Handler {
	registry := a.registry()
	mux := http.NewServeMux()
	a.handleHealth(mux)
	mux.HandleFunc("GET /plan", a.showPlan)
	mux.HandleFunc("GET /status", a.showPage())
	mux.Handle("GET /{$}", http.RedirectHandler("/status", http.StatusFound))
	mux.HandleFunc("GET /api/v1/status", a.showStatus)
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		Registry: registry, MaxRequestsInFlight: maxScrapes, CoalesceGather: true,
		// What is wrong with one series is no reason to lose the others.
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slog.NewLogLogger(a.Logger.Handler(), slog.LevelWarn),
	}))
	if a.HTTP.Profiling {
		handleProfiling(mux)
	}
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

// source shows the agent's state to the sharing metrics.
type source struct{ *agent }
