package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
)

// noHealth has no unit that could be cleared.
type noHealth struct{}

func (noHealth) Health() sharing.HealthReport { return sharing.HealthReport{} }

func (noHealth) ClearHealth(_ context.Context, s sharing.Selector) ([]sharing.UnitHealth, error) {
	return []sharing.UnitHealth{{Unit: s.String()}}, nil
}

// FuzzControl holds that the control socket answers any request with a code that
// is known, and an error with a text that a terminal can be shown.
func FuzzControl(f *testing.F) {
	for _, request := range []string{
		"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "POST /health/clear?gpu=0 HTTP/1.1\r\nHost: x\r\n\r\n", "POST /health/clear?gpu=0-99999 HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /sim/xid?gpu=0&code=79 HTTP/1.1\r\nHost: x\r\n\r\n", "POST /sim/xid?gpu=0&gpu=1&code=\x1b HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /sim/add HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 5\r\n\r\nb=t4;",
		"POST /health/clear HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 99\r\n\r\n--b\r\n", "PUT /sim/%2f HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		f.Add([]byte(request))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		request, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(data)))
		if err != nil {
			return
		}
		node, err := simnode.New("t4")
		if err != nil {
			t.Fatal(err)
		}
		recorder := httptest.NewRecorder()
		controlHandler(noHealth{}, node).ServeHTTP(recorder, request)
		switch recorder.Code {
		case http.StatusOK, http.StatusNoContent:
		case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusMovedPermanently, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		default:
			t.Errorf("%s %s is answered %d", request.Method, request.URL, recorder.Code)
		}
	})
}

// FuzzAnswers holds that whatever a running program answers is shown, and has
// nothing in it that a terminal obeys.
func FuzzAnswers(f *testing.F) {
	text, err := json.Marshal(agent.Status{
		Node: "n", Warnings: []string{"\x1b]0;title\a"},
		GPUs: []agent.GPUStatus{{UUID: "GPU-a", Units: []agent.UnitStatus{{ID: "GPU-a", Holders: []agent.Holder{{Pod: "\u202epod\x1b[2J"}}}}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"units":[{"unit":"\u001b","reason":"a\tb\nc"}],"monitors":[{"gpu":"\u0007","degraded":"\r"}]}`))
	f.Add([]byte(`{"profile":{"applied":{}},"resources":[{"held":-1}],"layouts":[{}],"elsewhere":[{"holders":null}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var status agent.Status
		var report sharing.HealthReport
		var shown strings.Builder
		if json.Unmarshal(data, &status) == nil {
			if err := printPlain(&shown, func(w io.Writer) error { return printStatus(w, status) }); err != nil {
				t.Error(err)
			}
		}
		if json.Unmarshal(data, &report) == nil {
			if err := printPlain(&shown, func(w io.Writer) error { return printHealth(w, report) }); err != nil {
				t.Error(err)
			}
		}
		if strings.ContainsFunc(shown.String(), func(r rune) bool {
			return r != '\n' && r != '\t' && unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)
		}) {
			t.Errorf("a terminal obeys %q", shown.String())
		}
	})
}

// FuzzFlags holds that a flag or a variable of NVIDIA's plugin with any value is
// taken, or ends the program with an error and its exit code. The node is
// simulated, and no flag that names a file is among them.
func FuzzFlags(f *testing.F) {
	settings := configs.Settings()
	for i, s := range settings {
		for _, value := range append([]string{s.Default, "", "true", "-1", "--", "\x1b", "a,b", "/", "10h"}, s.Choices...) {
			f.Add(uint8(i), value, false)
			f.Add(uint8(i), value, true)
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, value string, variable bool) {
		setting := settings[int(which)%len(settings)]
		args := []string{"/usr/bin/virgate", "plan", "--node", "sim:t4"}
		none := func(string) (string, bool) { return "", false }
		environment := none
		if variable {
			environment = func(name string) (string, bool) { return value, name == setting.Env }
		} else {
			args = append(args, "--"+setting.Flag+"="+value)
		}
		var stdout, stderr strings.Builder
		code := run(t.Context(), args, environment, &stdout, &stderr)
		if (code == 0) != (stderr.Len() == 0) || code < 0 || code > 2 {
			t.Errorf("%s=%q ends with %d: %s", setting.Flag, value, code, stderr.String())
		}
	})
}
