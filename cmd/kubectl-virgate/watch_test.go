package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/term"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/test/await"
)

// watchPatience is how long a test waits; the machine may be busy.
const watchPatience = await.Patience

func nodeJSON(name string, allocatable int) string {
	return fmt.Sprintf(`{"kind":"Node","apiVersion":"v1","metadata":{"name":%q,"resourceVersion":"2"},"status":{"capacity":{"nvidia.com/gpu":"8"},"allocatable":{"nvidia.com/gpu":"%d"}}}`, name, allocatable)
}

// watchedAPI is an API server with the nodes n1 and n2 and no pods, which sends the events.
func watchedAPI(t *testing.T, events <-chan string) (url string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch kind := strings.TrimPrefix(r.URL.Path, "/api/v1/"); {
		case r.URL.Query().Get("watch") != "":
			w.(http.Flusher).Flush()
			if kind != "nodes" {
				<-r.Context().Done()
			}
			for {
				select {
				case <-r.Context().Done():
					return
				case event := <-events:
					_, _ = fmt.Fprintln(w, event)
					w.(http.Flusher).Flush()
				}
			}
		case kind == "nodes":
			_, _ = fmt.Fprintf(w, `{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[%s,%s]}`, nodeJSON("n1", 8), nodeJSON("n2", 8))
		case kind == "pods":
			_, _ = fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.CloseClientConnections)
	return server.URL
}

// screen collects output, for tests that wait for it.
type screen struct {
	mutex sync.Mutex
	text  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.text.String()
}

// until waits for text after the first from bytes.
func (s *screen) until(t *testing.T, from int, text string) (length int) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(watchPatience); ; <-tick.C {
		if all := s.String(); strings.Contains(all[from:], text) {
			return len(all)
		} else if time.Now().After(deadline) {
			t.Fatalf("no %q in %q", text, all[from:])
		}
	}
}

// TestClusterWatch checks the lines for a log, JSON and YAML, and that Ctrl-C is no error.
func TestClusterWatch(t *testing.T) {
	for _, test := range []struct{ words, first, changed, gone string }{
		{"", "TIME                  NODE", "  n2    -       -        -      ?     nvidia.com/gpu  3 ", "  n1  gone\n"},
		{" -o json", `"name":"n2",`, `"allocatable":3,"unhealthy":5,"held":0,"free":3`, `"nodes":[{"name":"n2",`},
		{" -o yaml", "---\nat: ", "- allocatable: 3\n", "---\n"},
	} {
		events := make(chan string)
		kubeconfig := kubeconfigOf(t, watchedAPI(t, events))
		ctx, cancel := context.WithCancel(t.Context())
		var out, errors screen
		ended := make(chan int, 1)
		go func() {
			ended <- run(ctx, strings.Fields("kubectl-virgate --watch -v --status-timeout 0s --kubeconfig "+kubeconfig+test.words), os.LookupEnv, &out, &errors)
		}()
		at := out.until(t, 0, test.first)
		events <- `{"type":"MODIFIED","object":` + nodeJSON("n2", 3) + `}`
		at = out.until(t, at, test.changed)
		if test.words == "" && strings.Count(out.String(), "  n1 ") != 1 {
			t.Errorf("a line that has not changed: %s", out.String())
		}
		events <- `{"type":"DELETED","object":` + nodeJSON("n1", 8) + `}`
		out.until(t, at, test.gone)
		cancel()
		if code := <-ended; code != 0 {
			t.Errorf("%s: exit code %d", test.words, code)
		}
		if got := errors.String(); !strings.HasPrefix(got, "4 requests for lists and rights, 0 for status pages") {
			t.Errorf("%s: %q", test.words, got)
		}
		if test.words == " -o json" && strings.Count(out.String(), "\n") != 3 {
			t.Errorf("want a line for each change: %s", out.String())
		}
	}
	var out, errors screen
	if code := run(t.Context(), strings.Fields("kubectl-virgate gpus -w -o name --kubeconfig "+clusterAPI(t)), os.LookupEnv, &out, &errors); code != 2 || !strings.Contains(errors.String(), "--watch prints no names") {
		t.Errorf("-o name: %d, %s", code, errors.String())
	}
	if code := run(t.Context(), strings.Fields("kubectl-virgate nodes -w n9 --kubeconfig "+clusterAPI(t)), os.LookupEnv, &out, &errors); code != 1 || !strings.Contains(errors.String(), "there is no such node") {
		t.Errorf("a name that is none: %d, %s", code, errors.String())
	}
}

func TestChangedLines(t *testing.T) {
	at := time.Date(2026, 11, 23, 6, 0, 0, 0, time.UTC)
	c := changedLines{keys: 2}
	for i, step := range []struct{ table, want string }{
		{"NODE  GPU  USE\nn1  0  5%\nn1  1  5%\n", "TIME                  NODE  GPU  USE\n2026-11-23T06:00:00Z  n1  0  5%\n2026-11-23T06:00:00Z  n1  1  5%\n"},
		{"NODE    GPU  USE\nn1      0    5%\nn1      1    5%\n", ""},
		{"NODE  GPU  USE\nn1  0  6%\nn1  1  5%\nn2  1  5%\n", "2026-11-23T06:00:00Z  n1  0  6%\n2026-11-23T06:00:00Z  n2  1  5%\n"},
		{"NODE  GPU  USE\nn1  0  6%\n", "2026-11-23T06:00:00Z  n1  1  gone\n2026-11-23T06:00:00Z  n2  1  gone\n"},
		{"NODE  GPU  USE\nn1  0  6%  30s ago\n", "2026-11-23T06:00:00Z  n1  0  6%  30s ago\n"},
		{"NODE  GPU  USE\nn1  0  6%  1m0s ago\n", ""},
		{"NODE  GPU  USE\nn1  0  7% nothing heard for 16m0s\n", "2026-11-23T06:00:00Z  n1  0  7% nothing heard for 16m0s\n"},
		{"NODE  GPU  USE\nn1  0  7% nothing heard for 17m0s\n", ""},
	} {
		if diff := cmp.Diff(step.want, c.next(step.table, at)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

func TestChangedDocument(t *testing.T) {
	var before string
	for i, step := range []struct {
		at, heartbeat string
		free          int
		want          string
	}{
		{"1", "a", 1, `{"at":"1","nodes":[{"free":1,"heartbeat":"a"}]}` + "\n"},
		{"2", "a", 1, ""},
		{"3", "b", 1, ""},
		{"4", "b", 2, `{"at":"4","nodes":[{"free":2,"heartbeat":"b"}]}` + "\n"},
	} {
		got, err := changedDocument(&before, map[string]any{"at": step.at, "nodes": []any{map[string]any{"heartbeat": step.heartbeat, "free": step.free}}}, "json")
		if err != nil || string(got) != step.want {
			t.Errorf("step %d: %v, %s", i, err, got)
		}
	}
}

func TestFrame(t *testing.T) {
	const begin = "\x1b[H\x1b[2K"
	for name, test := range map[string]struct {
		lines         []string
		width, height int
		colours       bool
		want          string
	}{
		"fits":              {[]string{"a", "b"}, 3, 4, false, begin + "a\r\n\x1b[2Kb\r\n\x1b[J"},
		"as wide and high":  {[]string{"abc", "äöü"}, 3, 2, false, begin + "abc\r\n\x1b[2Käöü"},
		"too wide":          {[]string{"abcd"}, 3, 1, false, begin + "ab…"},
		"too high":          {[]string{"a", "b", "c", "d"}, 20, 3, false, begin + "a\r\n\x1b[2Kb\r\n\x1b[2K… 2 more"},
		"one line":          {[]string{"a", "b", "c"}, 20, 1, false, begin + "… 3 more"},
		"one column":        {[]string{"ab"}, 1, 1, false, begin + "…"},
		"no size":           {[]string{"ab", "c"}, 0, 0, false, begin + "ab\r\n\x1b[2Kc"},
		"colours":           {[]string{"n1 Unhealthy", "n2 switching"}, 20, 2, true, begin + "n1 \x1b[31mUnhealthy\x1b[0m\r\n\x1b[2Kn2 \x1b[33mswitching\x1b[0m"},
		"no colours wanted": {[]string{"n1 Unhealthy"}, 20, 1, false, begin + "n1 Unhealthy"},
	} {
		if got := string(frame(test.lines, test.width, test.height, test.colours)); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// pseudoTerminal is a terminal of that size: typed at one end, read at the other.
func pseudoTerminal(t *testing.T, width, height uint16) (keyboard, terminal *os.File, resize func(width, height uint16)) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = keyboard.Close() })
	control := func(request uintptr, argument unsafe.Pointer) {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, keyboard.Fd(), request, uintptr(argument)); errno != 0 {
			t.Skip("no pseudo terminals here: ", errno)
		}
	}
	var locked, number int32
	control(syscall.TIOCSPTLCK, unsafe.Pointer(&locked))
	control(syscall.TIOCGPTN, unsafe.Pointer(&number))
	resize = func(width, height uint16) {
		size := [4]uint16{height, width}
		control(syscall.TIOCSWINSZ, unsafe.Pointer(&size))
	}
	resize(width, height)
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = terminal.Close() })
	return keyboard, terminal, resize
}

// TestLiveTable checks that on a terminal the table is redrawn when its content or the size changes, until q,
// Ctrl-C, the context's end or an error, and that the terminal is then restored.
func TestLiveTable(t *testing.T) {
	for _, end := range []string{"q", "\x03", "context", "error"} {
		keyboard, terminal, resize := pseudoTerminal(t, 40, 10)
		var out screen
		go func() { // Ends with the terminal.
			for part := make([]byte, 4096); ; {
				n, err := keyboard.Read(part)
				if err != nil {
					return
				}
				_, _ = out.Write(part[:n])
			}
		}()
		before, err := term.GetState(int(terminal.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		events := make(chan string)
		url := watchedAPI(t, events)
		if end == "error" {
			url += "/none"
		}
		config, _, err := kube.UserConfig(kubeconfigOf(t, url), "")
		if err != nil {
			t.Fatal(err)
		}
		client, err := cluster.NewClient(config)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			ended <- liveTable(ctx, client.NewWatcher(cluster.Options{Domain: "nvidia.com"}), terminal, command.Terminal{File: terminal, Colours: true}, func(v cluster.View) string {
				var table text
				table.clusterNodes(v, false)
				return status.Plain(table.String())
			})
		}()
		if end != "error" {
			at := out.until(t, 0, "\x1b[2Kn2    -       -        -      ?     nvi…\r\n\x1b[J")
			events <- `{"type":"DELETED","object":` + nodeJSON("n1", 8) + `}`
			at = out.until(t, at, "  1 nodes  (q ends)\r\n\x1b[2KNODE")
			resize(10, 2)
			_ = syscall.Kill(os.Getpid(), syscall.SIGWINCH)
			out.until(t, at, "\r\n\x1b[2K… 2 more")
			if end == "context" {
				cancel()
			} else if _, err := keyboard.WriteString("x" + end); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-ended; (err != nil) != (end == "error") {
			t.Errorf("%q: %v", end, err)
		}
		out.until(t, 0, endLive)
		if !strings.Contains(out.String(), beginLive) {
			t.Errorf("%q", out.String())
		}
		after, err := term.GetState(int(terminal.Fd()))
		if err != nil || *after != *before {
			t.Errorf("%q: the terminal is another: %v, %v, %v", end, before, after, err)
		}
	}
}
