package prometheus

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/shortdir"
)

// TestQuietClusterRaisesNoAlert runs each profile that the chart ships, and none, on a simulated node that
// fits it, with the chart's default values otherwise, so it does not watch the pods. A pod holds and uses a GPU.
// promtool then evaluates the rules over the resulting scrape for more than an hour, and no alert may ever
// fire.
func TestQuietClusterRaisesNoAlert(t *testing.T) {
	tool(t, "promtool")
	const exclusive, shared = "dgx-a100", "h100x2"
	fits := map[string]string{
		"/": exclusive, "grants-driver-mounts": "", // Without the folder that an installer fills no GPU is ready.
		"memory-guard":    "",                                      // With default values nothing watches what containers use, and the alert says so.
		"mps":             "",                                      // It requires the chart's mps.enabled: without it the profile is refused.
		"dra-time-slices": "", "dra-partitions": "", "dra-mps": "", // It requires the chart's dra.enabled: without it the plan warns, and the alert says so.
		"mig-mixed": "dgx-a100+all-balanced", "mig-replicas": "boards: [{model: a100-40, layout: all-1g.5gb}, {model: a100-80, layout: all-1g.10gb}]", "mig-single": "dgx-a100+all-1g.5gb",
		"mig-balanced": exclusive, "mig-layouts": exclusive, "names-by-model": exclusive, "side-by-side": "boards: [{model: a100-40, count: 3}, {model: a100-40, layout: all-1g.5gb}]",
	}
	files, err := filepath.Glob(repository + "/charts/virgate/[pe]*/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	for _, file := range append(files, "") {
		name := strings.TrimSuffix(filepath.Base("/"+file), ".yaml")
		node, special := fits[name]
		if !special {
			node = shared
		}
		if node == "" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address, held := runQuietNode(t, file, node)
			// A node that has just started reports for a while what it does not know yet.
			alerts := "the pod is not seen to hold and use anything"
			if !poll(t, func() bool {
				exposition := scrape(t, address)
				if held.MatchString(exposition) {
					alerts = playQuietHour(t, exposition)
				}
				return alerts == ""
			}) {
				t.Error(alerts)
			}
		})
	}
}

var underWay = regexp.MustCompile(`virgate_mig_layout_state\{.*state="(pending|blocked)"\} 1`)

// runQuietNode runs a node until the test ends. address has its metrics; they come to match held, because a
// pod holds and uses a GPU.
func runQuietNode(t *testing.T, profile, name string) (address string, held *regexp.Regexp) {
	t.Helper()
	dir := shortdir.New(t)
	node, err := simnode.New(name)
	if strings.HasPrefix(name, "boards:") {
		node, err = simnode.Load("node.yaml", []byte(name))
	}
	if err != nil {
		t.Fatal(err)
	}
	kubelet := simkubelet.New(simkubelet.Options{Dir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"), StatusPeriod: 50 * time.Millisecond})
	var log lockedBuffer
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		running.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	running.Go(func() { _ = kubelet.Run(ctx) })
	running.Go(func() {
		err := daemon.Run(ctx, daemon.Options{
			GPUs: func(configs.StartupSettings) (daemon.GPUs, error) {
				gpus := daemon.Simulated(node, node)
				gpus.Containers = nil
				return gpus, nil
			},
			Profile: daemon.ProfileOptions{Path: profile}, PluginDir: dir, PodResourcesSocket: filepath.Join(dir, "pr.sock"),
			HostRoot: dir, CDIDir: filepath.Join(dir, "cdi"),
			Settings: agent.Settings{
				SampleInterval: 50 * time.Millisecond, Listen: "127.0.0.1:0", Logger: slog.New(slog.NewTextHandler(&log, nil)), Version: "test",
			},
		})
		if err != nil {
			t.Errorf("the program ends: %v", err)
		}
	})
	if !poll(t, func() bool {
		found := listens.FindStringSubmatch(log.String())
		if found != nil {
			address = found[1]
		}
		return found != nil
	}) {
		t.Fatal("HTTP is not served")
	}
	resource := ""
	if !poll(t, func() bool {
		shown := scrape(t, address)
		if !strings.Contains(shown, `virgate_config_state{state="applied"} 1`) || underWay.MatchString(shown) {
			return false
		}
		most := 0
		for name, r := range kubelet.Snapshot().Resources {
			if r.Allocatable > most {
				most, resource = r.Allocatable, name
			}
		}
		return most > 1
	}) {
		t.Fatal("nothing is offered")
	}
	pod, err := kubelet.AddPod(ctx, simkubelet.Pod{Namespace: "team-a", Name: "trainer", Containers: []simkubelet.Container{{Name: "main", Requests: map[string]int{resource: 1}}}})
	if err != nil {
		t.Fatal(err)
	}
	seen := `(?s)virgate_allocation_info\{[^}]*pod="trainer"`
	unit, _, _ := sharing.ParseDeviceID(pod.Containers[0].Grants[0].Devices[0])
	for _, gpu := range node.GPUs() {
		if gpu.UUID != unit { // The driver does not report how much a partition is used.
			continue
		}
		if err := node.Do("process-add", map[string]string{"gpu": strconv.Itoa(gpu.Index), "pid": "100", "bytes": "1000000", "sm": "50"}); err != nil {
			t.Fatal(err)
		}
		seen += `.*virgate_gpu_sm_utilization_ratio\{gpu_uuid="` + unit + `"\} 0.5\n`
	}
	return address, regexp.MustCompile(seen)
}

func scrape(t *testing.T, address string) string {
	t.Helper()
	answer, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// playQuietHour has promtool evaluate all alerts over an unchanging scrape. It returns promtool's findings,
// empty if no alert ever fires.
func playQuietHour(t *testing.T, exposition string) string {
	t.Helper()
	const target = `instance="10.0.0.1:9400",job="virgate/virgate",node="n1"`
	type series struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	constant := func(name, labels, value string) series {
		return series{fmt.Sprintf("%s{%s}", name, strings.Trim(labels+","+target, ",")), value + "x90"}
	}
	played := []series{constant("up", "", "1"), {`kube_node_info{job="kube-state-metrics",node="n1"}`, "1x90"}}
	for line := range strings.Lines(exposition) {
		if strings.HasPrefix(line, "virgate_") {
			sample, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
			name, labels, labelled := strings.Cut(sample, "{")
			if !labelled {
				name, value, _ = strings.Cut(sample, " ")
			}
			played = append(played, constant(name, labels, value))
		}
	}
	type expectation struct {
		At       string           `json:"eval_time"`
		Alert    string           `json:"alertname"`
		Expected []map[string]any `json:"exp_alerts"`
	}
	var quiet []expectation
	for _, rule := range allRules(t) {
		for at := 10; rule.Alert != "" && at <= 90; at += 10 {
			quiet = append(quiet, expectation{fmt.Sprintf("%dm", at), rule.Alert, []map[string]any{}})
		}
	}
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	data, err := yaml.Marshal(map[string]any{
		"rule_files": []string{rules}, "evaluation_interval": "1m",
		"tests": []any{map[string]any{"interval": "1m", "input_series": played, "alert_rule_test": quiet}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "quiet.test.yaml")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	output, err := exec.Command(tool(t, "promtool"), "test", "rules", path).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%v\n%s", err, output)
	}
	return ""
}

// lockedBuffer is a log that may be read while it is written.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(text []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(text)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
