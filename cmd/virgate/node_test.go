package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml/driver"
	"github.com/virgate/virgate/internal/usage"
	"github.com/virgate/virgate/test/await"
)

// program runs a command line to its end.
func program(t *testing.T, arguments ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, complaint buffer
	nothing := func(string) (string, bool) { return "", false }
	code = run(t.Context(), append([]string{"virgate"}, arguments...), nothing, &out, &complaint)
	return code, out.String(), complaint.String()
}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func write(t *testing.T, lines ...string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestProcessesHidden checks that the PID namespace and capabilities of --proc count, or this process's for
// commands without that flag.
func TestProcessesHidden(t *testing.T) {
	own := !usage.InInitialNamespace(os.DirFS("/proc"))
	for namespace, want := range map[string]bool{"pid:[4026531836]": false, "pid:[4026532199]": true, "": own} {
		var flags []cli.Flag
		if namespace != "" {
			proc := t.TempDir()
			if err := errors.Join(os.MkdirAll(filepath.Join(proc, "self/ns"), 0o755), os.Symlink(namespace, filepath.Join(proc, "self/ns/pid")),
				os.WriteFile(filepath.Join(proc, "self/status"), []byte("CapEff:\t00000000a80425fb\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
			flags = append(flags, &cli.StringFlag{Name: "proc", Value: proc})
		}
		command := &cli.Command{Flags: append(flags, flagTable.Of(nil, "[node]")...), Action: func(_ context.Context, cmd *cli.Command) error {
			gpus, err := openGPUs(cmd, configs.StartupSettings{}, slog.New(slog.DiscardHandler))
			if err == nil && gpus.ProcessesHidden != want {
				t.Errorf("in %q: processes are hidden: %t, want %t", namespace, gpus.ProcessesHidden, want)
			}
			if _, none := os.Stat("/dev/nvidia-caps/nvidia-cap1"); err == nil && namespace != "" && gpus.NotPermitted() != (none != nil) {
				t.Errorf("without SYS_ADMIN: not permitted: %t", gpus.NotPermitted())
			}
			return err
		}}
		if err := command.Run(t.Context(), []string{"virgate"}); err != nil && !errors.Is(err, driver.ErrNoCgo) {
			t.Error(err)
		}
	}
}

func TestNodeErrors(t *testing.T) {
	tests := []struct {
		name, node string
		code       int
		want       string
	}{
		{"an unknown kind", "real", 2, "none of auto, nvml, trace:FILE, sim:NAME, sim:FILE"},
		{"no trace", "trace:" + filepath.Join(t.TempDir(), "none"), 1, "no such file"},
		{"a bad trace", "trace:" + write(t, `{"trace":1}`, `{"call":"Reset"}`), 1, `trace.jsonl: trace: line 2: no call "Reset"`},
		{"no simulated node", "sim:dgx", 1, `no simulated node "dgx"`},
		{"an unknown world", "sim:t4 --sim-world passthrough,moon", 2, `--sim-world: no world "moon": there are unprivileged, monitor-only, passthrough, client=NAME, own-pids, moving-minors, late-profiles, no-subscription, old-driver, fabric, confidential, lazy, persistence`},
		{"a client without a name", "sim:t4 --sim-world client=", 2, `no world "client="`},
		{"an empty world", "sim:t4 --sim-world own-pids,", 2, `no world ""`},
		{"a world for a driver", "nvml --sim-world passthrough", 2, `--sim-world "passthrough" goes with a simulated node, not with --node nvml`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			code, _, stderr := program(t, append([]string{"plan", "--node"}, strings.Fields(test.node)...)...)
			if code != test.code || !strings.Contains(stderr, test.want) {
				t.Errorf("exit code %d, %q, want %d and %q", code, stderr, test.code, test.want)
			}
		})
	}
}

// TestNodeRecord checks that a node's recording gives the same node.
func TestNodeRecord(t *testing.T) {
	for _, masked := range []string{"true", "false"} {
		t.Run("masked "+masked, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "recording")
			common := []string{"plan", "-o", "wide", "--mig-strategy", "mixed", "--node"}
			_, want, _ := program(t, append(common, "sim:mixed", "--record", path, "--record-mask="+masked)...)
			code, got, stderr := program(t, append(common, "trace:"+path)...)
			if code != 0 {
				t.Fatal(stderr)
			}
			if diff := cmp.Diff(want, got); diff != "" || !strings.Contains(got, "mig-1g.5gb") {
				t.Errorf("plan (-node +recording):\n%s", diff)
			}
			data, err := os.ReadFile(path)
			if err != nil || !strings.HasPrefix(string(data), `{"trace":1,"masked":`+masked) {
				t.Errorf("recording begins %.40q, %v", data, err)
			}
		})
	}
}

// late is a driver that works at the second try.
func late(t *testing.T) string {
	return "trace:" + write(t, `{"trace":1}`,
		`{"call":"Init","error":{"call":"Init","return":9}}`, `{"call":"Init"}`,
		`{"call":"DeviceGetCount","answer":0}`)
}

// TestNodeFailOnInitError checks that a program whose driver cannot be opened
// ends at once, as NVIDIA's plugin does by default.
func TestNodeFailOnInitError(t *testing.T) {
	// The meter opens the driver too, maybe first.
	never := "trace:" + write(t, `{"trace":1}`, `{"call":"Init","error":{"call":"Init","return":9}}`)
	code, _, stderr := program(t, "run", "--node", never, "--device-plugin-dir", t.TempDir(), "--control-socket", "", "--listen", "")
	if code != 1 || !strings.Contains(stderr, "open the driver: nvml: Init: DRIVER_NOT_LOADED") || !strings.Contains(stderr, "--fail-on-init-error=false") {
		t.Errorf("exit code %d, %q, want 1 and what to do", code, stderr)
	}
}

// TestNodeDriverWaitedFor checks that the program can also wait for its driver, logs that, and then plans.
func TestNodeDriverWaitedFor(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var stderr buffer
	ended := make(chan int, 1)
	arguments := []string{
		"virgate", "run", "--node", late(t), "--fail-on-init-error=false",
		"--device-plugin-dir", t.TempDir(), "--pod-resources-socket", "", "--control-socket", "", "--listen", "127.0.0.1:0",
	}
	nothing := func(string) (string, bool) { return "", false }
	go func() { ended <- run(ctx, arguments, nothing, io.Discard, &stderr) }()
	address := regexp.MustCompile(`address=(\S+)`)
	plan := func() bool {
		at := address.FindStringSubmatch(stderr.String())
		if at == nil {
			return false
		}
		response, err := http.Get("http://" + at[1] + "/plan")
		if err != nil {
			return false
		}
		return response.Body.Close() == nil && response.StatusCode == http.StatusOK
	}
	await.Until(t, "a plan", func() error {
		select {
		case code := <-ended:
			return await.Never("it ended with exit code %d:\n%s", code, stderr.String())
		default:
		}
		if !plan() {
			return fmt.Errorf("the log is\n%s", stderr.String())
		}
		return nil
	})
	if !strings.Contains(stderr.String(), "DRIVER_NOT_LOADED") {
		t.Errorf("the log does not say that there was no driver:\n%s", stderr.String())
	}
	stop()
	if code := <-ended; code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

func TestNodeFileMustBeRegular(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, node := range []string{"sim:" + fifo, "trace:" + fifo} {
		if _, err := openLibrary(node, "", configs.StartupSettings{}); err == nil || err.Error() != "read --node: "+fifo+" is not a regular file" {
			t.Errorf("--node %s: %v", node, err)
		}
	}
}
