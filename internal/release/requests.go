package release

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"time"

	"github.com/virgate/virgate/internal/decide"
	"github.com/virgate/virgate/sharing"
)

// maxRelease is the longest time of a release, so that a forgotten GPU comes back.
const maxRelease = 24 * time.Hour

// begin releases the selected GPU for that long. A release under way gets the new time, counted
// from now.
func (m *Manager) begin(selector sharing.Selector, length time.Duration, reset bool) (Release, error) {
	gpu, err := m.selectGPU(selector)
	pause, _ := m.Paused()
	switch {
	case err != nil:
		return Release{}, err
	case reset && m.Reset == nil:
		return Release{}, errors.New(decide.MayNotReset)
	case reset && pause.Any():
		return Release{}, errors.New(pause.Text())
	case length <= 0 || length > maxRelease:
		return Release{}, fmt.Errorf("for: %s is not more than 0 and at most %s", length, maxRelease)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := maps.Clone(m.gpus)
	r := m.put(gpu)
	last := r.Release
	r.Until, r.Reset = time.Now().Add(length).Round(0), r.Reset || reset
	r.Pause, r.Why = false, "" // From now on, it does not end with a pause.
	if err := m.keep(); err != nil {
		r.Release, m.gpus = last, before
		m.wake.Notify() // Replace what the store may have saved of it.
		return Release{}, err
	}
	r.wake.Notify()
	m.wake.Notify()
	return r.Release, nil
}

// selectGPU returns the GPU that the selector names.
func (m *Manager) selectGPU(selector sharing.Selector) (sharing.GPU, error) {
	if !m.Serving() {
		return sharing.GPU{}, errors.New("this Virgate does not serve the node: ask the one that does")
	}
	for _, gpu := range m.GPUs() {
		if selector.MatchGPU(gpu) {
			return gpu, nil
		}
		for _, p := range gpu.Partitions {
			if selector.MatchPartition(gpu, p) {
				return sharing.GPU{}, fmt.Errorf(
					"%s is a partition: only a GPU as a whole can be released, which is %d",
					selector, gpu.Index)
			}
		}
	}
	return sharing.GPU{}, fmt.Errorf("no such GPU: %s", selector)
}

// restore ends the release of the GPU that the selector names.
func (m *Manager) restore(selector sharing.Selector) (Release, error) {
	gpu, err := m.selectGPU(selector)
	if err != nil {
		return Release{}, err
	}
	pause, _ := m.Paused()
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.gpus[gpu.UUID]
	switch {
	case r == nil || r.State == Restored:
		return Release{}, fmt.Errorf("GPU %d is not released", gpu.Index)
	case pause.Any():
		return Release{}, errors.New(pause.Text())
	}
	r.Until = time.Now()
	r.wake.Notify()
	return r.Release, nil
}

// Handler serves the control socket. It answers with JSON:
//
//	GET /gpu           the releases of this run
//	POST /gpu/release  with gpu=SELECTOR and for=DURATION, the Release
//	POST /gpu/reset    with gpu=SELECTOR and for=DURATION, the Release
//	POST /gpu/restore  with gpu=SELECTOR, the Release
func (m *Manager) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /gpu", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, m.List()) })
	mux.HandleFunc("POST /gpu/{verb}", func(w http.ResponseWriter, r *http.Request) {
		selector, err := sharing.ParseSelector(r.FormValue("gpu"))
		if err != nil {
			err = fmt.Errorf("gpu: %w", err)
		}
		var answer Release
		switch verb := r.PathValue("verb"); {
		case err != nil:
		case verb == "restore":
			answer, err = m.restore(selector)
		case verb == "release" || verb == "reset":
			var length time.Duration
			length, err = time.ParseDuration(r.FormValue("for"))
			if err != nil {
				err = fmt.Errorf("for: expected a time such as 10m (got %q)", r.FormValue("for"))
			} else {
				answer, err = m.begin(selector, length, verb == "reset")
			}
		default:
			http.NotFound(w, r)
			return
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		writeJSON(w, answer)
	})
	return mux
}

// writeJSON answers with the value, indented for people.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(value)
}
