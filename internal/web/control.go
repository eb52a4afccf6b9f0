package web

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"time"

	"github.com/virgate/virgate/sharing"
)

// writeJSON answers with the value, indented for people.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(value)
}

// ServeControl answers requests on the control socket until ctx ends. Only there can a running
// Virgate be changed, so the listener must keep out clients that may not do that.
func ServeControl(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{
		Handler:           http.MaxBytesHandler(handler, maxControlBody),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		MaxHeaderBytes:    16 << 10,
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	return server.Serve(listener)
}

// maxControlBody limits the body of a request on the control socket, in bytes.
const maxControlBody = 64 << 10

// Health reads and changes the health of units.
type Health interface {
	// Health returns the health of all units as last seen. It may be called from any goroutine.
	Health() sharing.HealthReport
	// ClearHealth makes the selected units healthy because an operator says so, and returns their
	// health after that. It returns an error if there are no such units, or if ctx ends.
	ClearHealth(ctx context.Context, selector sharing.Selector) ([]sharing.UnitHealth, error)
}

// HealthHandler answers GET /health with the health of all units, and POST /health/clear?gpu=SELECTOR
// with the health of the units that it cleared, both as a sharing.HealthReport in JSON. It answers 400
// if there is no such unit. It is for the control socket: on the other addresses nothing can be changed.
func HealthHandler(health Health) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, health.Health())
	})
	mux.HandleFunc("POST /health/clear", func(w http.ResponseWriter, r *http.Request) {
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
