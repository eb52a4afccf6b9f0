package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/configsource"
	"github.com/virgate/virgate/internal/daemon"
	"github.com/virgate/virgate/internal/kube"
	"github.com/virgate/virgate/internal/nodestatus"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/shortdir"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// world performs a schedule.
type world struct {
	t        *testing.T
	ctx      context.Context
	site     site
	kubelet  *kubelettest.Kubelet
	cluster  *cluster
	observer *observer
	pods     *pods
	program  *program
	// runs counts the runs of the program.
	runs  int
	uuids []string
	// scripts are functions that end the driver's faults.
	scripts []func()
	// missed are the GPUs that may have had a fatal error and were not seen in
	// use since. The value is true if their reset may go unseen.
	missed map[int]bool
	// mayMiss is true if a reset may not count at any time: the program gives up all handles when the
	// GPUs cannot be listed, and learns of an error late when the wait for events is slow.
	mayMiss bool
	// settled is the result of the last settle.
	settled *restCheck
	// streams are the counts at the last calm operation on streams.
	streams map[string][2]int
	figures figures
	// patience is how long the node may take to come to rest. The program's own pauses are long: up to 6 s
	// after an API server was away twice, 5 s and more after the driver has refused to partition a GPU. The
	// machine may be busy, too.
	patience time.Duration
}

// figures are for the report.
type figures struct {
	kinds       map[kind]int
	slowestStop time.Duration
	slowestRest time.Duration
	reconnected time.Duration
	stops       int
}

func newWorld(t *testing.T, ctx context.Context, log *slog.Logger) *world {
	t.Helper()
	dir := shortdir.New(t)
	node, err := simnode.Load("soak.yaml", []byte(nodeYAML))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, ctx: ctx, observer: newObserver(node.GPUs), figures: figures{kinds: map[kind]int{}}, missed: map[int]bool{}}
	for _, gpu := range node.GPUs() {
		w.uuids = append(w.uuids, gpu.UUID)
	}
	w.site = site{
		dir: filepath.Join(dir, "dp"), podResources: filepath.Join(dir, "pr.sock"), root: filepath.Join(dir, "host"),
		node: node, log: log,
	}
	if err := os.MkdirAll(w.site.root, 0o750); err != nil {
		t.Fatal(err)
	}
	w.cluster, w.site.kubeconfig = newCluster(t, dir)
	w.kubelet = kubelettest.New(simkubelet.Options{
		Dir: w.site.dir, PodResourcesSocket: w.site.podResources, DelayPods: true, AllowOverlap: true, OnEvent: w.observer.take, Logger: log,
	})
	w.pods = newPods(w.kubelet)

	running, stop := context.WithCancel(context.Background())
	var children sync.WaitGroup
	children.Go(func() { _ = w.kubelet.Run(running) })
	children.Go(func() { w.pods.run(running) })
	t.Cleanup(func() {
		stop()
		close(w.pods.queue)
		children.Wait()
	})
	if w.program, err = w.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = w.program.stop() })
	return w
}

// wrong returns everything that the observer, the pods and the kubelet complain of.
func (w *world) wrong() []string {
	return slices.Concat(w.observer.check(), w.pods.check(), w.kubelet.Violations())
}

// gpuAt returns the driver's index of the GPU; -1 if it was pulled.
func (w *world) gpuAt(ordinal int) (index int, gpu simnode.GPU) {
	gpu = w.site.node.GPUs()[ordinal]
	return gpu.Index, gpu
}

// resetGPU resets the GPU, which must be in the node.
func (w *world) resetGPU(gpu simnode.GPU) error {
	w.observer.resets(gpu)
	return w.site.node.Heal(gpu.Index)
}

// await waits until missing returns ""; otherwise its error contains what missing returns.
func (w *world) await(what string, missing func() string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	patient := time.NewTimer(w.patience)
	defer patient.Stop()
	for {
		reason := missing()
		if reason == "" {
			return nil
		}
		if wrong := w.wrong(); len(wrong) > 0 {
			return fmt.Errorf("%s: %s", what, strings.Join(wrong, "\n"))
		}
		select {
		case <-tick.C:
		case <-patient.C:
			return fmt.Errorf("%s: not in %s: %s", what, w.patience, reason)
		case <-w.ctx.Done():
			return fmt.Errorf("%s: %w: %s", what, w.ctx.Err(), reason)
		}
	}
}

// steady is how many scans of the GPUs the program must begin while everything is as it should be: more
// than an effect under way can take to show. On a busy machine both take longer.
const steady = 4

// scans counts the scans of the GPUs that all programs have begun, and the attempts to open the driver for
// one.
func (w *world) scans() int {
	return w.site.node.Calls("DeviceGetCount") + w.site.node.Calls("Init")
}

// missedAfter is the number of scans after which an event without effect counts as missed.
const missedAfter = 25

// unsettled is not a valid number of scans.
const unsettled = -1

// rest waits until everything is as it should be, and stays so.
func (w *world) rest(o operation) error {
	began := time.Now()
	var lists int
	since, healed, pause := unsettled, w.scans(), 3*missedAfter
	err := w.await(o.String(), func() string {
		if missing := w.program.seen.missing(*o.wish); missing != "" && !o.rejected {
			since = unsettled
			return missing
		}
		if underway := w.underway(); underway != "" {
			since = unsettled
			return underway
		}
		node := w.now(o)
		now := judge(node)
		if len(now.wrong) > 0 {
			since = unsettled
			if w.scans()-healed > pause {
				w.resetAgain(o.conditions)
				healed, pause = w.scans(), 2*pause
			}
			return strings.Join(now.wrong, "\n")
		}
		if unnoticed := w.unnoticed(node.kubelet); unnoticed != "" {
			since = unsettled
			return unnoticed
		}
		if received := w.observer.tally().lists; since == unsettled || received != lists {
			since, lists = w.scans(), received
		}
		w.settled = now
		if w.scans()-since <= steady {
			return "it does not last"
		}
		return ""
	})
	if err == nil {
		w.recovered()
	}
	w.figures.slowestRest = max(w.figures.slowestRest, elapsed(began))
	return err
}

// now returns the node as it is, and the state it should reach.
func (w *world) now(o operation) rest {
	return rest{*o.wish, o.conditions, w.site.node.GPUs(), w.kubelet.Snapshot(), w.observer.resetPartitions()}
}

// unnoticed describes a resource whose number of streams differs between the kubelet and the program; empty
// if all agree. The kubelet has not noticed yet that a program or session has ended, and will drop the next
// one's stream when it does. Until then its lists may be those of the one that has ended.
func (w *world) unnoticed(kubelet simkubelet.Snapshot) string {
	code, body, err := w.program.page(w.ctx, "/api/v1/status")
	if err != nil || code != http.StatusOK {
		return fmt.Sprint("status: ", code, " ", err)
	}
	var status struct {
		Resources []struct {
			Name    string
			Streams int
		}
	}
	if err := json.Unmarshal([]byte(body), &status); err != nil {
		return err.Error()
	}
	streams := map[string]int{}
	for _, resource := range status.Resources {
		streams[resource.Name] = resource.Streams
	}
	for name, resource := range kubelet.Resources {
		if resource.Streams != streams[name] {
			return fmt.Sprintf("%s has %d streams for the kubelet, %d for Virgate", name, resource.Streams, streams[name])
		}
	}
	return ""
}

// unsaved returns a complaint while the profile with the edit is not saved for a restart: a program that is
// killed before that comes back with the previous profile. Empty when it is saved.
func (w *world) unsaved(edit int) string {
	data, err := os.ReadFile(filepath.Join(w.site.dir, "virgate_state.json"))
	if err != nil {
		return err.Error()
	}
	var file struct {
		Sections struct {
			Profile struct{ Documents map[string]string }
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return err.Error()
	}
	for _, text := range file.Sections.Profile.Documents {
		if written := editLine.FindStringSubmatch(text); written != nil && written[1] == strconv.Itoa(edit) {
			return ""
		}
	}
	return fmt.Sprintf("profile: edit %d is in force and not kept for a restart yet", edit)
}

// underway returns a complaint while a GPU is being repartitioned; a profile without a layout lets that
// finish. Empty if none is.
func (w *world) underway() string {
	data, err := os.ReadFile(filepath.Join(w.site.dir, "virgate_state.json"))
	if err != nil {
		return err.Error()
	}
	var file struct {
		Sections struct {
			Journal struct {
				Underway []struct{ GPU string }
			}
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return err.Error()
	}
	for ordinal, gpu := range w.site.node.GPUs() {
		for _, change := range file.Sections.Journal.Underway {
			if change.GPU == gpu.UUID && gpu.Index >= 0 && !gpu.Lost {
				return fmt.Sprintf("GPU %d is being cut", ordinal)
			}
		}
	}
	return ""
}

// stop ends the program and looks for leftovers.
func (w *world) stop() error {
	took, err := w.program.stop()
	w.figures.stops++
	w.figures.slowestStop = max(w.figures.slowestStop, took)
	if err != nil {
		return err
	}
	return leaked()
}

func (w *world) restart() error {
	if err := w.stop(); err != nil {
		return err
	}
	next, err := w.start()
	w.program = next
	return err
}

// succeed starts a second program, which stands by, and ends the first.
func (w *world) succeed() error {
	next, err := w.start()
	if err != nil {
		return err
	}
	took, err := w.program.stop()
	w.figures.stops++
	w.figures.slowestStop = max(w.figures.slowestStop, took)
	w.program = next
	return err
}

const (
	nodeName      = "soak"
	configMapName = "gpu/profiles"
	profileLabel  = "nvidia.com/device-plugin.config"
	layoutLabel   = "nvidia.com/mig.config"
)

// cluster is the part of an API server that Virgate uses: a Node and a ConfigMap that can be listed and
// watched. It accepts and ignores what is written to it.
type cluster struct {
	server *httptest.Server

	mu      sync.Mutex
	version int
	// forgotten is the version before which no watch can begin.
	forgotten int
	away      bool
	labels    map[string]string
	documents map[string]string
	history   []change
	// moved is closed and replaced at every change, broken when all connections must end.
	moved, broken chan struct{}
}

// change is an object from a version on.
type change struct {
	version  int
	resource string
	object   any
}

func newCluster(t *testing.T, dir string) (*cluster, string) {
	t.Helper()
	c := &cluster{
		version: 1, labels: map[string]string{}, documents: map[string]string{},
		moved: make(chan struct{}), broken: make(chan struct{}),
	}
	c.server = httptest.NewServer(c)
	t.Cleanup(func() {
		c.cut()
		c.server.Close()
	})
	kubeconfig := filepath.Join(dir, "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: soak\n"+
		"clusters: [{name: soak, cluster: {server: %q}}]\ncontexts: [{name: soak, context: {cluster: soak, user: soak}}]\n"+
		"users: [{name: soak, user: {}}]\n", c.server.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return c, kubeconfig
}

// setLabel sets a label of the Node; "" removes it.
func (c *cluster) setLabel(name, value string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.labels, name)
	if value != "" {
		c.labels[name] = value
	}
	c.record("nodes")
}

func (c *cluster) setDocument(name, text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.documents[name] = text
	c.record("configmaps")
}

func (c *cluster) record(resource string) {
	c.version++
	c.history = append(c.history, change{c.version, resource, c.object(resource)})
	close(c.moved)
	c.moved = make(chan struct{})
}

// cut breaks every connection and refuses all requests until mend.
func (c *cluster) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = true
	close(c.broken)
	c.broken = make(chan struct{})
}

func (c *cluster) mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = false
}

// expire ends every watch, and none can resume.
func (c *cluster) expire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	c.forgotten, c.history = c.version, nil
	close(c.broken)
	c.broken = make(chan struct{})
}

// object returns the one object of the resource, as it is now.
func (c *cluster) object(resource string) any {
	version := strconv.Itoa(c.version)
	if resource == "nodes" {
		labels := map[string]string{}
		for name, value := range c.labels {
			labels[name] = value
		}
		return metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
			ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "soak", ResourceVersion: version, Labels: labels},
		}
	}
	documents := map[string]string{}
	for name, text := range c.documents {
		documents[name] = text
	}
	return corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "profiles", UID: "profiles", ResourceVersion: version},
		Data:       documents,
	}
}

// ServeHTTP implements http.Handler.
func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	away := c.away
	c.mu.Unlock()
	if away {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	resource, one := "configmaps", r.URL.Path == "/api/v1/nodes/"+nodeName
	if strings.HasPrefix(r.URL.Path, "/api/v1/nodes") {
		resource = "nodes"
	}
	switch {
	case r.Method != http.MethodGet || one && strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata"):
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1<<20))
		c.mu.Lock()
		object := c.object("nodes")
		c.mu.Unlock()
		_ = json.NewEncoder(w).Encode(object)
	case one:
		_ = json.NewEncoder(w).Encode(corev1.Node{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "soak"},
		})
	case r.URL.Query().Get("watch") != "":
		c.watch(w, r, resource)
	default:
		c.list(w, resource)
	}
}

func (c *cluster) list(w http.ResponseWriter, resource string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := map[string]any{
		"apiVersion": "v1", "kind": "ConfigMapList",
		"metadata": map[string]string{"resourceVersion": strconv.Itoa(c.version)},
		"items":    []any{c.object(resource)},
	}
	if resource == "nodes" {
		list["apiVersion"], list["kind"] = "meta.k8s.io/v1", "PartialObjectMetadataList"
	}
	_ = json.NewEncoder(w).Encode(list)
}

// watch sends what happened after the requested version, and goes on.
func (c *cluster) watch(w http.ResponseWriter, r *http.Request, resource string) {
	from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	if from < c.forgotten {
		c.mu.Unlock()
		w.WriteHeader(http.StatusGone)
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
			Status:   metav1.StatusFailure, Reason: metav1.StatusReasonExpired, Code: http.StatusGone, Message: "too old",
		})
		return
	}
	broken := c.broken
	c.mu.Unlock()
	encoder, flush := json.NewEncoder(w), http.NewResponseController(w).Flush
	for {
		c.mu.Lock()
		var news []change
		for _, change := range c.history {
			if change.version > from && change.resource == resource {
				news = append(news, change)
			}
		}
		moved := c.moved
		c.mu.Unlock()
		for _, change := range news {
			if err := encoder.Encode(map[string]any{"type": "MODIFIED", "object": change.object}); err != nil {
				return
			}
			from = change.version
		}
		if err := flush(); err != nil {
			return
		}
		select {
		case <-moved:
		case <-broken:
			panic(http.ErrAbortHandler)
		case <-r.Context().Done():
			return
		}
	}
}

// The program's intervals, short enough for thousands of operations. quiet stays well above the time that a
// kubelet here takes to read a list, and stopAfter above the time to keep and read one on a busy machine.
const (
	quiet       = 400 * time.Millisecond
	retireAfter = 300 * time.Millisecond
	stopAfter   = time.Second
	healthQuiet = 100 * time.Millisecond
	probe       = 60 * time.Millisecond
	rescan      = 120 * time.Millisecond
)

// site is where a program runs.
type site struct {
	// dir is the device-plugins directory, with the state file.
	dir, podResources, kubeconfig string
	// root is the directory that the program uses as the host's file system.
	root string
	node *simnode.Node
	log  *slog.Logger
}

// program is one run of virgate run, with the times above.
type program struct {
	reach  environment
	seen   *seenPolicy
	look   chan os.Signal
	cancel context.CancelFunc
	// ended is closed when the program has ended; err is then its error.
	ended chan struct{}
	err   error
	// address is known once HTTP is served.
	address chan string
}

// start returns at once; stop returns the error if the program cannot start.
func start(at environment) *program {
	ctx, cancel := context.WithCancel(context.Background())
	p := &program{
		reach: at,
		seen:  &seenPolicy{}, look: make(chan os.Signal, 1), cancel: cancel,
		ended: make(chan struct{}), address: make(chan string, 1),
	}
	go func() {
		defer close(p.ended)
		defer at.driver.exit()
		p.err = p.run(ctx, at)
	}()
	return p
}

func (p *program) run(ctx context.Context, s environment) error {
	log := slog.New(addressHandler{s.log.Handler(), p.address})
	config, err := kube.RESTConfig(s.kubeconfig)
	if err != nil {
		return err
	}
	api, err := kube.NewClient(config)
	if err != nil {
		return err
	}
	reporter, err := nodestatus.New(nodestatus.Options{
		Config: config, Node: nodeName, Events: true, Condition: true, Annotations: true, Logger: log,
	})
	if err != nil {
		return err
	}
	return daemon.Run(ctx, daemon.Options{
		GPUs: func(configs.StartupSettings) (daemon.GPUs, error) { return daemon.Simulated(s.node, s.driver), nil },
		Profile: daemon.ProfileOptions{
			Source:  configsource.NewConfigMap(api, "gpu", "profiles", log),
			Labels:  configsource.NewNodeLabels(api, nodeName, profileLabel, log),
			Observe: p.seen.see,
			// The program waits for a driver that answers late or with errors at the start.
			Overrides: configs.Overrides{"flags.failOnInitError": {Value: "false", Source: "the soak"}},
		},
		PluginDir: s.dir, PodResourcesSocket: s.podResources,
		Timing: plugin.Timing{RemovalDelay: quiet, RetireAfter: retireAfter, StopAfter: stopAfter, ListInterval: 5 * time.Millisecond},
		Rescan: rescan, Probe: probe, DriverBackoff: 20 * time.Millisecond, BootID: "soak",
		HealthRules: func(rules sharing.HealthRules) sharing.HealthRules {
			rules.RecoverAfter, rules.MaxRecoverAfter = healthQuiet, healthQuiet // Shorter than a profile may set.
			rules.XIDs[fatalXIDOfPartition] = sharing.FatalError
			return rules
		},
		HostRoot: s.root, Reporter: reporter,
		Settings: agent.Settings{
			SampleInterval: 500 * time.Millisecond, Listen: "127.0.0.1:0", Reload: p.look, Logger: log, Version: "soak", NodeName: nodeName,
		},
	})
}

// hangup acts as SIGHUP.
func (p *program) hangup() {
	select {
	case p.look <- syscall.SIGHUP:
	default:
	}
}

// stop acts as SIGTERM. It returns how long the end took.
func (p *program) stop() (time.Duration, error) {
	began := time.Now()
	p.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	select {
	case <-p.ended:
		if p.err != nil {
			return elapsed(began), fmt.Errorf("virgate run: %w", p.err)
		}
		return elapsed(began), nil
	case <-ctx.Done():
		return elapsed(began), fmt.Errorf("invariant 10: virgate run has not ended %s after SIGTERM", await.Patience)
	}
}

// elapsed is only for the report, not for a verdict.
func elapsed(began time.Time) time.Duration {
	return time.Since(began) //nolint:forbidigo // measured for the report, not judged
}

// scrape reads every page.
func (p *program) scrape(ctx context.Context) error {
	for _, path := range []string{"/healthz", "/metrics", "/plan", "/status", "/api/v1/status"} {
		code, _, err := p.page(ctx, path)
		if err != nil {
			return err
		}
		// Before the first profile there is no plan.
		if code != http.StatusOK && (path != "/plan" || code != http.StatusServiceUnavailable) {
			return fmt.Errorf("%s: %d", path, code)
		}
	}
	return nil
}

// page returns the program's HTTP response for the path.
func (p *program) page(ctx context.Context, path string) (code int, body string, err error) {
	var address string
	select {
	case address = <-p.address:
		p.address <- address
	default:
		return 0, "", errors.New("http is not served yet")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return 0, "", err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// addressHandler passes log records on, and sends the HTTP address to address.
type addressHandler struct {
	slog.Handler
	address chan string
}

func (h addressHandler) Handle(ctx context.Context, record slog.Record) error {
	if record.Message == "http listens" {
		record.Attrs(func(a slog.Attr) bool {
			if a.Key == "address" {
				h.address <- a.Value.String()
			}
			return true
		})
	}
	return h.Handler.Handle(ctx, record)
}

// ours are the packages of which no goroutine may run when no program does. Driver calls are left behind at
// the end by design, so internal/nvml is not listed.
var ours = []string{
	"/internal/agent.", "/internal/cdi.", "/internal/configsource.", "/internal/drapath.", "/internal/gpusettings.", "/internal/host.",
	"/internal/memoryguard.", "/internal/mpsshare.", "/internal/nodestatus.", "/internal/podresources.", "/internal/release.", "/internal/state.",
	"/internal/web.", "virgate/plugin.",
}

// leaked returns an error with the goroutines that an ended program left.
func leaked() error {
	// A goroutine that was waited for may not have ended completely.
	return await.Condition(nil, func() error {
		if left := running(); len(left) > 0 {
			return fmt.Errorf("invariant 10: %d goroutines outlive the program:\n%s", len(left), strings.Join(left, "\n\n"))
		}
		return nil
	})
}

func running() []string {
	stacks := make([]byte, 1<<20)
	for {
		n := runtime.Stack(stacks, true)
		if n < len(stacks) {
			stacks = stacks[:n]
			break
		}
		stacks = make([]byte, 2*len(stacks))
	}
	var found []string
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		for _, name := range ours {
			if strings.Contains(stack, name) && !strings.Contains(stack, "soak.running(") {
				found = append(found, stack)
				break
			}
		}
	}
	return found
}
