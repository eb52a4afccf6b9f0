package daemon

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/migcaps"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/sharing"
)

// TestDriverComesLater checks that CDI specs are made for the current driver, not for the state at the program's
// start.
func TestDriverComesLater(t *testing.T) {
	mounted := filepath.Join(t.TempDir(), "driver-root")
	options := driverOptions(configs.StartupSettings{
		DriverRoot: "/run/nvidia/driver", DevRoot: "/run/nvidia/driver", ContainerDriverRoot: mounted,
		CDIHookPath: "/opt/hook", CDIFeatures: "one,two", CDIDisableHooks: "update-ldcache,chmod",
	}, "", slog.New(slog.DiscardHandler))
	finds := func(want cdi.Roots) {
		t.Helper()
		if diff := cmp.Diff(want, options.Find()); diff != "" {
			t.Errorf("roots (-want +got):\n%s", diff)
		}
	}
	finds(cdi.Roots{Driver: "/run/nvidia/driver", Dev: "/"})
	for _, step := range []struct {
		folder string
		want   cdi.Roots
	}{
		{mounted, cdi.Roots{Driver: mounted, Dev: "/"}},
		{filepath.Join(mounted, "dev"), cdi.Roots{Driver: mounted, Dev: mounted}},
	} {
		if err := os.MkdirAll(step.folder, 0o755); err != nil {
			t.Fatal(err)
		}
		finds(step.want)
	}
	if diff := cmp.Diff(cdi.Roots{Driver: "/run/nvidia/driver", Dev: "/run/nvidia/driver"}, options.Host); diff != "" {
		t.Errorf("the host's (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"one", "two"}, options.Features); diff != "" || options.HookPath != "/opt/hook" {
		t.Errorf("features (-want +got):\n%s\nhook %s", diff, options.HookPath)
	}
	if diff := cmp.Diff([]string{"update-ldcache", "chmod"}, options.DisabledHooks); diff != "" {
		t.Errorf("disabled hooks (-want +got):\n%s", diff)
	}
	if options := driverOptions(configs.StartupSettings{}, "", nil); options.Features != nil || options.DisabledHooks != nil {
		t.Errorf("features %q and disabled hooks %q of none", options.Features, options.DisabledHooks)
	}
}

// TestHostMounts has the host visible wholly, partly and not at all.
func TestHostMounts(t *testing.T) {
	there := t.TempDir()
	for _, test := range []struct {
		name, hostRoot string
		startup        configs.StartupSettings
		want           []cdi.Mount
	}{
		{"nothing mounted", "", configs.StartupSettings{DriverRoot: "/", ContainerDriverRoot: there + "/none"}, []cdi.Mount{{Host: "/", Here: "/"}}},
		{"the driver root", "", configs.StartupSettings{DriverRoot: "/run/nvidia/driver", ContainerDriverRoot: there}, []cdi.Mount{{Host: "/run/nvidia/driver", Here: there}}},
		{"both", "/host", configs.StartupSettings{DriverRoot: "/", ContainerDriverRoot: there}, []cdi.Mount{{Host: "/", Here: "/host"}, {Host: "/", Here: there}}},
		{"the host's", "/host", configs.StartupSettings{ContainerDriverRoot: there + "/none"}, []cdi.Mount{{Host: "/", Here: "/host"}}},
	} {
		if diff := cmp.Diff(test.want, hostMounts(test.startup, test.hostRoot)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

// TestHookPath has hosts with toolkits of several releases, seen in several ways.
func TestHookPath(t *testing.T) {
	const newer, older = "/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-ctk"
	host := func(programs ...string) string {
		root := t.TempDir()
		for _, program := range programs {
			if err := os.MkdirAll(filepath.Dir(root+program), 0o755); err != nil {
				t.Fatal(err)
			}
			// As in a container, the link's target is missing.
			if err := os.Symlink("/opt/toolkit/bin", root+program); err != nil {
				t.Fatal(err)
			}
		}
		return root
	}
	both, old, none := host(newer, older), host(older), host()
	for _, test := range []struct {
		name, root string
		startup    configs.StartupSettings
		want       string
	}{
		{"1.16 or later", both, configs.StartupSettings{DriverRoot: "/", ContainerDriverRoot: "/none"}, newer},
		{"before 1.16", old, configs.StartupSettings{DriverRoot: "/", ContainerDriverRoot: "/none"}, older},
		{"not seen", none, configs.StartupSettings{DriverRoot: "/", ContainerDriverRoot: "/none"}, older},
		{"seen with the driver", none, configs.StartupSettings{DriverRoot: "/", ContainerDriverRoot: both}, newer},
		{"a driver of its own is not the host", none, configs.StartupSettings{DriverRoot: "/run/nvidia/driver", ContainerDriverRoot: both}, older},
		{"said", both, configs.StartupSettings{DriverRoot: "/", CDIHookPath: older}, older},
	} {
		if got := hookPath(test.startup, test.root); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}

// TestApplyMIGNeedsAPluginDir checks that the directory is required, even if the flag is empty: without it, the
// command knows neither what pods hold nor whether a Virgate serves the node.
func TestApplyMIGNeedsAPluginDir(t *testing.T) {
	node, err := simnode.New("h100+all-1g.10gb")
	if err != nil {
		t.Fatal(err)
	}
	wanted := sharing.MIGConfig{Name: "all-disabled", Manage: true}
	for _, dir := range []string{"", filepath.Join(t.TempDir(), "missing")} {
		layouts, err := ApplyMIG(t.Context(), MIGOptions{GPUs: Simulated(node, node), PluginDir: dir, Logger: slog.New(slog.DiscardHandler)}, wanted)
		if !errors.Is(err, os.ErrNotExist) || layouts != nil {
			t.Errorf("in %q: %v, error %v", dir, layouts, err)
		}
	}
}

// TestApplyMIGMakesNodes checks that after a change the nodes of all partitions are requested. Data that the
// driver's files lack is logged, and does not stop the change.
func TestApplyMIGMakesNodes(t *testing.T) {
	node, err := simnode.New("h100")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	write := func(file, content string) {
		t.Helper()
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(migcaps.Folder+"/mig/config", "DeviceFileMinor: 1\nDeviceFileMode: 256\n")
	write("/proc/devices", "Character devices:\n508 nvidia-caps\n")
	apply := func() (asked []string, log string) {
		t.Helper()
		gpus, text := Simulated(node, node), &strings.Builder{}
		gpus.MakeNodes = func(_ context.Context, files []string) error { asked = files; return nil }
		layouts, err := ApplyMIG(t.Context(), MIGOptions{
			GPUs: gpus, Simulated: true, Capabilities: migcaps.NewReader(root), Logger: slog.New(slog.NewTextHandler(text, &slog.HandlerOptions{Level: slog.LevelWarn})),
		}, sharing.MIGConfig{Name: "all-3g.40gb", Manage: true})
		if err != nil || len(layouts) != 1 {
			t.Fatalf("%v, error %v", layouts, err)
		}
		return asked, text.String()
	}
	if asked, log := apply(); asked != nil || !strings.Contains(log, "device nodes of partitions not made") || !strings.Contains(log, "/access: no such file") {
		t.Errorf("without the driver's files: asked for %q, logged %s", asked, log)
	}
	gpus, err := nvml.Scan(node)
	if err != nil || len(gpus[0].Partitions) == 0 {
		t.Fatalf("%v, error %v", gpus, err)
	}
	var want []string
	for _, p := range gpus[0].Partitions {
		for i, file := range []string{fmt.Sprintf("gi%d/access", p.GI), fmt.Sprintf("gi%d/ci%d/access", p.GI, p.CI)} {
			want = append(want, fmt.Sprintf("%s/gpu%d/mig/%s", migcaps.Folder, gpus[0].Minor, file))
			write(want[len(want)-1], fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\n", 12+i))
		}
	}
	if asked, log := apply(); !slices.Equal(asked, want) || log != "" {
		t.Errorf("asked for %q, want %q, logged %s", asked, want, log)
	}
}

// noHealth has no unit to clear.
type noHealth struct{}

func (noHealth) Health() sharing.HealthReport { return sharing.HealthReport{} }

func (noHealth) ClearHealth(_ context.Context, s sharing.Selector) ([]sharing.UnitHealth, error) {
	return []sharing.UnitHealth{{Unit: s.String()}}, nil
}

// FuzzControl checks that the control socket answers any request with a known code, and that an error's text is
// safe for a terminal.
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
		controlHandler(noHealth{}, http.NotFoundHandler(), node.Handler()).ServeHTTP(recorder, request)
		switch recorder.Code {
		case http.StatusOK, http.StatusNoContent:
		case http.StatusBadRequest, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusMovedPermanently, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		default:
			t.Errorf("%s %s is answered %d", request.Method, request.URL, recorder.Code)
		}
	})
}

// TestStandbyOpensNoDriver checks that a program that waits for the lock prevents no GPU's reset, and finds out
// that its driver cannot be opened only when it serves.
func TestStandbyOpensNoDriver(t *testing.T) {
	node, err := simnode.New("h100x2")
	if err != nil {
		t.Fatal(err)
	}
	node.InjectFault("Init", simnode.Fault{Return: nvml.DriverNotLoaded})
	dir := t.TempDir()
	lock, err := state.Acquire(t.Context(), dir, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	said, reload := make(logLines, 100), make(chan os.Signal)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(t.Context(), Options{
			GPUs:      func(configs.StartupSettings) (GPUs, error) { return Simulated(node, node), nil },
			PluginDir: dir, HostRoot: dir,
			Settings: agent.Settings{Reload: reload, SampleInterval: time.Millisecond, Logger: slog.New(slog.NewTextHandler(said, nil))},
		})
	}()
	for line := ""; !strings.Contains(line, "standing by"); {
		select {
		case line = <-said:
		case err := <-ended:
			t.Fatalf("ended before it could stand by: %v", err)
		}
	}
	for range 3 { // Each is taken when the loop has decided about the one before.
		select {
		case reload <- syscall.SIGHUP:
		case err := <-ended:
			t.Fatalf("ended while standing by: %v", err)
		}
	}
	if n := node.Calls("Init"); n != 0 {
		t.Errorf("opened the driver %d times while standing by", n)
	}
	if err := lock.Release(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, nvml.DriverNotLoaded) || !strings.Contains(err.Error(), "--fail-on-init-error=false") {
		t.Errorf("ended with %v", err)
	}
}

// TestLeavingIsSaidByTheLast checks that an ending program reports its end before another can serve the node, and
// does not report it while another one stands by.
func TestLeavingIsSaidByTheLast(t *testing.T) {
	dir := t.TempDir()
	node := func() *nodeLock {
		return &nodeLock{dir: dir, file: state.NewFile(dir, slog.New(slog.DiscardHandler)), log: slog.New(slog.DiscardHandler)}
	}
	first, second := node(), node()
	if err := first.acquire(t.Context(), func() { t.Error("the first stands by") }); err != nil {
		t.Fatal(err)
	}
	standing, acquired := make(chan bool), make(chan error)
	go func() { acquired <- second.acquire(t.Context(), func() { close(standing) }) }()
	<-standing
	first.leave(func() { t.Error("left to nobody, and another stands by") })
	if err := <-acquired; err != nil {
		t.Fatal(err)
	}
	said := false
	second.leave(func() {
		said = true
		if _, last := state.AcquireLast(dir); last {
			t.Error("a successor can serve before it is said that there is none")
		}
	})
	if !said {
		t.Error("nobody serves the node, and nobody says so")
	}
	if err := node().acquire(t.Context(), func() { t.Error("the lock was kept") }); err != nil {
		t.Fatal(err)
	}
}

// TestRemoveHostFiles removes only what Virgate creates, once no Virgate serves the node. Its directories then
// look as if it had never been there.
func TestRemoveHostFiles(t *testing.T) {
	dir, cdiDir, features := t.TempDir(), t.TempDir(), t.TempDir()
	featureFile := filepath.Join(features, "virgate")
	theirs := []string{filepath.Join(dir, "kubelet.sock"), filepath.Join(features, "gfd"), filepath.Join(dir, "nvidia-gpu.sock"), filepath.Join(dir, "kubelet_internal_checkpoint"), filepath.Join(cdiDir, "nvidia.yaml")}
	ours := []string{
		featureFile, filepath.Join(cdiDir, "k8s.device-plugin.nvidia.com-gpu.json"), filepath.Join(dir, "cdi", "k8s.device-plugin.nvidia.com-gpu.json"),
		filepath.Join(dir, "virgate-nvidia.com_gpu-0123abcd.sock"), filepath.Join(dir, state.Name), filepath.Join(dir, state.Name+".bad"), filepath.Join(dir, state.StandbyName),
	}
	if err := os.Mkdir(filepath.Join(dir, "cdi"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range append(theirs, ours...) {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lock, err := state.Acquire(t.Context(), dir, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	if removed, err := RemoveHostFiles(t.Context(), dir, cdiDir, featureFile); !errors.Is(err, state.ErrLocked) || len(removed) > 0 {
		t.Errorf("removed %q while another serves: %v", removed, err)
	}
	for _, path := range append(theirs, ours...) {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if err := lock.Release(); err != nil {
		t.Fatal(err)
	}
	removed, err := RemoveHostFiles(t.Context(), dir, cdiDir, featureFile)
	if err != nil || len(removed) != len(ours)+2 { // The lock, and the folder cdi.
		t.Errorf("removed %q: %v", removed, err)
	}
	var left []string
	for _, folder := range []string{dir, cdiDir, features} {
		entries, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			left = append(left, filepath.Join(folder, e.Name()))
		}
	}
	slices.Sort(theirs)
	slices.Sort(left)
	if !slices.Equal(left, theirs) {
		t.Errorf("left %q, want %q", left, theirs)
	}
	if again, err := RemoveHostFiles(t.Context(), dir, cdiDir, featureFile); err != nil || len(again) > 0 { // Nor was the lock there for a moment.
		t.Errorf("from a clean node it removed %q: %v", again, err)
	}
	if _, err := RemoveHostFiles(t.Context(), filepath.Join(dir, "missing"), cdiDir, featureFile); err == nil {
		t.Error("a missing folder is no error")
	}
}

// logLines are the lines of a log, as far as there is room.
type logLines chan string

func (l logLines) Write(line []byte) (int, error) {
	select {
	case l <- string(line):
	default:
	}
	return len(line), nil
}

// TestMountedDev checks where the dev of containers' nodes is visible: in the mounted driver root, if that has
// it.
func TestMountedDev(t *testing.T) {
	for _, test := range []struct{ driver, dev, want string }{
		{"/", "/", "/driver-root"}, {"/run/nvidia/driver", "/run/nvidia/driver/", "/driver-root"}, {"", "", "/driver-root"},
		{"/home/kubernetes/bin/nvidia", "/", ""},
	} {
		got := mountedDev(configs.StartupSettings{DriverRoot: test.driver, DevRoot: test.dev, ContainerDriverRoot: "/driver-root"})
		if got != test.want {
			t.Errorf("driver root %q, dev root %q: %q, want %q", test.driver, test.dev, got, test.want)
		}
	}
}

// TestNodesNeedTheRight checks that the driver's program is run neither in a pause nor by a program that may not
// make nodes, and that the error names the chart's value.
func TestNodesNeedTheRight(t *testing.T) {
	permitted, ran := false, 0
	node := nvml.NewNode(nil, nvml.Options{})
	rights := Privileged{node: node, gpus: GPUs{
		NotPermitted: func() bool { return !permitted },
		MakeNodes: func(context.Context, []string) error {
			ran++
			return nil
		},
	}}
	if err := rights.MakeNodes(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "mig.manage") || ran != 0 {
		t.Errorf("without the right: %v, run %d times", err, ran)
	}
	permitted = true
	if err := rights.MakeNodes(t.Context(), nil); err != nil || ran != 1 {
		t.Errorf("with the right: %v, run %d times", err, ran)
	}
	node.Pause(nil)
	if err := rights.MakeNodes(t.Context(), nil); err == nil || ran != 1 {
		t.Errorf("in a pause: %v, run %d times", err, ran)
	}
}
