package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/virgate/virgate/internal/features"
	"github.com/virgate/virgate/test/await"
)

// parsed are the labels in a file for NFD.
func parsed(t *testing.T, text string) map[string]string {
	t.Helper()
	labels := map[string]string{}
	for line := range strings.Lines(text) {
		label, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if !ok || labels[label] != "" {
			t.Errorf("line %q", line)
		}
		labels[strings.TrimPrefix(label, "nvidia.com/")] = value
	}
	return labels
}

const shared4 = "version: v1\nflags: {migStrategy: mixed, useNodeFeatureAPI: false, gfd: {oneshot: true, noTimestamp: true}}\n" +
	"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"

// TestFeatureDiscoveryOnce checks which of flag, variable and profile counts.
func TestFeatureDiscoveryOnce(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	profile, machine := put("profile", shared4), put("product_name", "NVIDIA DGX A100\n")
	once := []string{"--oneshot", "--use-node-feature-api=false", "--output-file="}
	for _, test := range []struct {
		name string
		args []string
		env  map[string]string
		want map[string]string // Empty for a label that must be missing.
		err  string
		code int
	}{
		{"flags", append(once, "--mig-strategy=mixed", "--machine-type-file", machine), nil, map[string]string{
			"gpu.count": "8", "gpu.replicas": "1", "mig.strategy": "mixed", "gpu.machine": "NVIDIA-DGX-A100", "cuda.driver-version.major": "580",
		}, "", 0},
		{"variables", []string{"--output-file="}, map[string]string{
			"GFD_ONESHOT": "true", "GFD_NO_TIMESTAMP": "1", "GFD_USE_NODE_FEATURE_API": "false", "USE_NODE_FEATURE_API": "true", "MIG_STRATEGY": "mixed", "GFD_MIG_STRATEGY": "single",
			"GFD_MACHINE_TYPE_FILE": machine,
		}, map[string]string{"gpu.count": "8", "mig.strategy": "single", "gpu.machine": "NVIDIA-DGX-A100", "gfd.timestamp": ""}, "", 0},
		{"profile", []string{"--output-file="}, map[string]string{"CONFIG_FILE": profile}, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.replicas": "4", "mig.strategy": "mixed", "gfd.timestamp": "",
		}, "", 0},
		{"a variable over the profile", []string{"--output-file="}, map[string]string{"GFD_CONFIG_FILE": profile, "CONFIG_FILE": "/none", "MIG_STRATEGY": "single"}, map[string]string{"mig.strategy": "single", "gpu.replicas": "4"}, "", 0},
		{"a flag over the variable", append(once, "--mig-strategy", "none", "--config-file", profile), map[string]string{"MIG_STRATEGY": "single"}, map[string]string{"mig.strategy": "", "gpu.replicas": "4"}, "", 0},

		{"no profile", append(once, "--config-file", "/none"), nil, nil, "/none", 1},
		{"a wrong profile", append(once, "--config-file", put("wrong", "version: v1\nflags: {gfd: {sleepInterval: soon}}")), nil, nil, "flags.gfd.sleepInterval: expected a duration such as 60s", 1},
		{"a wrong variable", once, map[string]string{"MIG_STRATEGY": "double"}, nil, "$MIG_STRATEGY: flags.migStrategy: expected none, single or mixed", 1},
		{"a wrong flag", append(once, "--sleep-interval=soon"), nil, nil, `--sleep-interval: flags.gfd.sleepInterval: expected a duration such as 60s, or infinite (got "soon")`, 1},
		{"a misspelt key", append(once, "--config-file", put("misspelt", "flags: {gfd: {oneShot: true}}")), nil, nil, "flags.gfd.oneShot: unknown key, did you mean oneshot?", 1},
		{"for ever, by the flag", append(once, "--sleep-interval=infinite"), nil, map[string]string{"gpu.count": "8"}, "", 0},
		{"for ever, by the variable", once, map[string]string{"GFD_SLEEP_INTERVAL": "infinite"}, map[string]string{"gpu.count": "8"}, "", 0},
		{"for ever, by the profile", append(once, "--config-file", put("infinite", "flags: {gfd: {sleepInterval: infinite}}")), nil, map[string]string{"gpu.count": "8"}, "", 0},
		{"a number", append(once, "--config-file", put("number", "flags: {gfd: {sleepInterval: 60}}")), nil, map[string]string{"gpu.count": "8"}, "interval=60ns used=1s", 0},
		{"no node", []string{"--oneshot"}, nil, nil, "--use-node-feature-api needs --node-name", 2},
		{"no folder", []string{"--oneshot", "--use-node-feature-api=false", "-o", filepath.Join(dir, "none", "gfd")}, nil, nil, filepath.Join(dir, "none"), 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			args := append([]string{"/usr/bin/gpu-feature-discovery", "--node", "sim:dgx-a100"}, test.args...)
			variable := func(name string) (string, bool) { value, ok := test.env[name]; return value, ok }
			if code := run(t.Context(), args, variable, &stdout, &stderr); code != test.code || !strings.Contains(stderr.String(), test.err) {
				t.Fatalf("exit code %d, want %d and %q:\n%s", code, test.code, test.err, stderr.String())
			}
			labels := parsed(t, stdout.String())
			for label, want := range test.want {
				if got := labels[label]; got != want {
					t.Errorf("%s is %q, want %q", label, got, want)
				}
			}
		})
	}
}

// TestFeatureDiscoveryWithoutDriver checks that without a driver the program waits for it or ends, as configured.
func TestFeatureDiscoveryWithoutDriver(t *testing.T) {
	root := t.TempDir()
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("this machine has a driver")
	}
	for wait, want := range map[string]int{"--fail-on-init-error": 1, "--fail-on-init-error=false": 0} {
		var stdout, stderr bytes.Buffer
		args := []string{"gpu-feature-discovery", "--oneshot", "--use-node-feature-api=false", "-o=", "--nvidia-driver-root", root, "--driver-root-ctr-path", root, wait}
		code := run(t.Context(), args, func(string) (string, bool) { return "", false }, &stdout, &stderr)
		if labels := parsed(t, stdout.String()); code != want || want == 0 && (len(labels) != 1 || labels["gfd.timestamp"] == "") {
			t.Errorf("%s: exit code %d with %v, want %d:\n%s", wait, code, labels, want, stderr.String())
		}
	}
}

// TestFeatureDiscoveryOfAnotherVersion checks that the program ends after 10 s if the libraries and the loaded
// module differ in version, even if it waits for a driver: a new container may have other libraries.
func TestFeatureDiscoveryOfAnotherVersion(t *testing.T) {
	t.Parallel()
	var stdout, stderr bytes.Buffer
	args := []string{
		"gpu-feature-discovery", "--node", "sim:t4", "--sim-world", "other-module=570.124.06", "--use-node-feature-api=false",
		"-o=", "--sleep-interval=1s", "--fail-on-init-error=false",
	}
	code := run(t.Context(), args, func(string) (string, bool) { return "", false }, &stdout, &stderr)
	if want := "the loaded kernel module is of 570.124.06: reload the module, or reboot the node (it has been so for 10s"; code != 1 || !strings.Contains(stderr.String(), want) {
		t.Errorf("exit code %d, want 1 and %s:\n%s", code, want, stderr.String())
	}
}

func TestPause(t *testing.T) {
	failed := errors.New("no API server")
	for _, test := range []struct {
		interval time.Duration
		err      error
		want     time.Duration
	}{
		{30 * time.Second, nil, 30 * time.Second},
		{math.MaxInt64, nil, math.MaxInt64},
		{60, nil, time.Second},
		{-1, nil, time.Second},
		{30 * time.Second, failed, 30 * time.Second},
		{math.MaxInt64, failed, time.Minute},
	} {
		if got := pause(test.interval, test.err); got != test.want {
			t.Errorf("%s after %v is %s, want %s", test.interval, test.err, got, test.want)
		}
	}
}

// TestFeatureDiscoveryFollows changes the profile, breaks and repairs it, sends SIGHUP and ends the program.
func TestFeatureDiscoveryFollows(t *testing.T) {
	dir := t.TempDir()
	profile, output := filepath.Join(dir, "profile"), filepath.Join(dir, "gfd")
	write := func(replicas string) {
		text := strings.NewReplacer("replicas: 4", "replicas: "+replicas, "oneshot: true, noTimestamp: true", "sleepInterval: infinite").Replace(shared4)
		if err := os.WriteFile(profile+".next", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(profile+".next", profile); err != nil {
			t.Fatal(err)
		}
	}
	awaitLabels := func(what string, holds func(labels map[string]string) bool) {
		t.Helper()
		await.True(t, what, func() bool {
			data, err := os.ReadFile(output)
			return err == nil && holds(parsed(t, string(data)))
		})
	}
	write("2")
	ctx, end := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var stderr bytes.Buffer
	running.Go(func() {
		args := []string{"gpu-feature-discovery", "--node", "sim:t4", "--config-file", profile, "--output-file", output}
		if code := run(ctx, args, func(string) (string, bool) { return "", false }, &bytes.Buffer{}, &stderr); code != 0 {
			t.Errorf("exit code %d", code)
		}
	})
	replicas := func(want string) func(map[string]string) bool {
		return func(labels map[string]string) bool {
			return labels["gpu.replicas"] == want && labels["gfd.timestamp"] != ""
		}
	}
	awaitLabels("written", replicas("2"))
	write("3")
	awaitLabels("changed", replicas("3"))
	write("-1")
	write("5")
	awaitLabels("mended", replicas("5"))
	if err := os.Remove(output); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	awaitLabels("written at SIGHUP", replicas("5"))
	end()
	running.Wait()
	if _, err := os.Stat(output); !os.IsNotExist(err) {
		t.Errorf("the file is left: %v\n%s", err, stderr.String())
	}
}

// TestFeatureDiscoveryObject checks which NodeFeature is requested, by namespace and name.
func TestFeatureDiscoveryObject(t *testing.T) {
	asked := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case asked <- r.Method + " " + r.URL.Path:
		default:
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n" +
		"clusters: [{name: c, cluster: {server: " + server.URL + "}}]\nusers: [{name: u, user: {}}]\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	variables := map[string]string{"KUBECONFIG": kubeconfig, "NODE_NAME": "n1", "NAMESPACE": "gpu-operator", "GFD_ONESHOT": "true"}
	var stderr bytes.Buffer
	code := run(t.Context(), []string{"gpu-feature-discovery", "--node", "sim:t4"}, func(name string) (string, bool) { value, ok := variables[name]; return value, ok }, &bytes.Buffer{}, &stderr)
	want := "GET /apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu-operator/nodefeatures/nvidia-features-for-n1"
	if got := <-asked; got != want || code != 1 || !strings.Contains(stderr.String(), "NodeFeature gpu-operator/nvidia-features-for-n1") {
		t.Errorf("asked %q, want %q; exit code %d:\n%s", got, want, code, stderr.String())
	}
}

// TestVGPUs checks which PCI devices are read, and the message in a container without SYS_ADMIN.
func TestVGPUs(t *testing.T) {
	config := make([]byte, features.PCIConfigSize)
	config[0x06], config[0x34] = 0x10, 0x40
	copy(config[0x40:], "\x09\x00\x1bVF\x00\x16550.90\x00\x00\x00\x00r550_90")
	device := func(vendor string, config []byte) fstest.MapFS {
		return fstest.MapFS{"vendor": {Data: []byte(vendor + "\n")}, "config": {Data: config}}
	}
	for _, test := range []struct {
		name   string
		device fstest.MapFS
		want   []features.VGPU
		said   bool
	}{
		{"vGPU", device("0x10de", config), []features.VGPU{{HostVersion: "550.90", HostBranch: "r550_90"}}, false},
		{"another vendor's", device("0x8086", config), nil, false},
		{"whole GPU", device("0x10de", make([]byte, features.PCIConfigSize)), nil, false},
		{"without SYS_ADMIN", device("0x10de", config[:64]), nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			machine := fstest.MapFS{}
			for name, file := range test.device {
				machine["0000:3b:00.0/"+name] = file
			}
			var log bytes.Buffer
			got := vgpus(machine, slog.New(slog.NewTextHandler(&log, nil)))
			if said := strings.Contains(log.String(), "requires SYS_ADMIN"); !slices.Equal(got, test.want) || said != test.said {
				t.Errorf("%v, want %v; the log: %q", got, test.want, log.String())
			}
		})
	}
}
