package agent

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
)

// BenchmarkView is what is shown of a node whose devices are all held, by one
// pod each, or all free: it reports the bytes, and for metrics the series.
// docs/scale.md has its table.
func BenchmarkView(b *testing.B) {
	for _, node := range []struct {
		replicas int
		held     bool
	}{{1, true}, {10, true}, {48, true}, {100, true}, {10, false}, {1000, false}} {
		w, pods := newWatch(b, "l40sx8", node.replicas), 0
		if node.held {
			w, pods = crowded(b, node.replicas), 8*node.replicas
		}
		handler := w.handler()
		for _, path := range []string{"/metrics", "/status", "/api/v1/status"} {
			b.Run(fmt.Sprintf("gpus=8/devices=%d/pods=%d%s", 8*node.replicas, pods, path), func(b *testing.B) {
				b.ReportAllocs()
				var seen []byte
				for b.Loop() {
					recorder := httptest.NewRecorder()
					handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
					if recorder.Code != http.StatusOK {
						b.Fatal(recorder.Code)
					}
					seen = recorder.Body.Bytes()
				}
				b.ReportMetric(float64(len(seen)), "shown-B")
				if path == "/metrics" {
					b.ReportMetric(float64(bytes.Count(seen, []byte("\n"))-bytes.Count(seen, []byte("\n#"))), "series")
				}
			})
		}
	}
}
