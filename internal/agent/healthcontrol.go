package agent

import (
	"net/http"

	"github.com/virgate/virgate/sharing"
)

// longestOrder bounds the body of an order, in bytes.
const longestOrder = 64 << 10

// HealthHandler answers GET /health with the health of all units, and POST
// /health/clear?gpu=SELECTOR with that of those which were cleared, both as
// JSON: a sharing.HealthReport. It answers 400 when there is no such unit. It is
// for the control socket: HTTP elsewhere only reads.
func HealthHandler(health Health) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, health.Health())
	})
	mux.HandleFunc("POST /health/clear", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, longestOrder)
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
