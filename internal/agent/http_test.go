package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// listening tells where HTTP is served, by what the log says of it.
type listening struct {
	slog.Handler
	addresses map[string]chan string
}

func newListening() listening {
	return listening{slog.DiscardHandler, map[string]chan string{"http listens": make(chan string, 10), "health listens": make(chan string, 10)}}
}

func (l listening) Enabled(context.Context, slog.Level) bool { return true }

func (l listening) Handle(_ context.Context, record slog.Record) error {
	if told, ok := l.addresses[record.Message]; ok {
		record.Attrs(func(attr slog.Attr) bool {
			told <- attr.Value.String()
			return true
		})
	}
	return nil
}

// await is the address, once it is told.
func (l listening) await(t *testing.T, message string) net.Addr {
	t.Helper()
	address, err := net.ResolveTCPAddr("tcp", <-l.addresses[message])
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// serving is an agent that answers HTTP as the options say.
func serving(t *testing.T, options HTTP) (main, health net.Addr) {
	t.Helper()
	log := newListening()
	options.HealthListen = "127.0.0.1:0"
	a := newAgent(withIdle(Options{
		Settings: Settings{Listen: "127.0.0.1:0", HTTP: options, Logger: slog.New(log)}, Plugin: plugin.NewManager(plugin.Options{}),
	}))
	ctx, cancel := context.WithCancel(context.Background())
	servers, err := a.servers()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, len(servers))
	for _, server := range servers {
		go func() { ended <- server(ctx) }()
	}
	t.Cleanup(func() {
		cancel()
		for range servers {
			if err := <-ended; err != nil {
				t.Errorf("ended with %v", err)
			}
		}
	})
	return log.await(t, "http listens"), log.await(t, "health listens")
}

// TestListensWhenServing has a program stand by beside one that has its address and its
// control socket: it takes them when it serves, and its probes are answered from the start.
func TestListensWhenServing(t *testing.T) {
	t.Parallel()
	claimed, standing, controlled := make(chan struct{}), make(chan struct{}), make(chan struct{})
	log := newListening()
	newRig(t, func(r *rig) {
		r.options.Listen, r.options.HTTP, r.options.ListenWhenServing = "127.0.0.1:0", HTTP{HealthListen: "127.0.0.1:0"}, true
		r.options.Logger = slog.New(log)
		r.options.Control = func(ctx context.Context, _ http.Handler) error {
			close(controlled)
			<-ctx.Done()
			return nil
		}
		r.options.AcquireLock = func(ctx context.Context, standBy func()) error {
			standBy()
			close(standing)
			select {
			case <-claimed:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	<-standing
	health := log.await(t, "health listens").String()
	for range 3 { // What was started before the answers would have come to listen.
		if code, body := answer(t, http.DefaultClient, "http://"+health+"/readyz", "", ""); code != http.StatusOK {
			t.Fatalf("standing by, it is not ready: %d %s", code, body)
		}
	}
	select {
	case address := <-log.addresses["http listens"]:
		t.Errorf("standing by, it listens at %s", address)
	case <-controlled:
		t.Error("standing by, it serves the control socket")
	default:
	}
	close(claimed)
	if code, body := answer(t, http.DefaultClient, "http://"+log.await(t, "http listens").String()+"/api/v1/status", "", ""); code != http.StatusOK || !strings.Contains(body, `"role": "serving"`) {
		t.Errorf("serving, it answers %d %s", code, body)
	}
	<-controlled
}

// answer asks for a URL, with a name and a password if there is a name.
func answer(t *testing.T, client *http.Client, url, name, password string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if name != "" {
		request.SetBasicAuth(name, password)
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// write puts a file into a folder of its own, and returns its path.
func write(t *testing.T, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// users is a web configuration file with the user scraper, whose password is
// "open sesame".
const users = "basic_auth_users:\n  scraper: $2a$04$norqsI6IOY7PgtakPTYtyu2m.hu5L4Dobc8sTfnDZnhA6jhR3.axC\n"

func TestBasicAuthenticationLeavesHealthOpen(t *testing.T) {
	t.Parallel()
	config := write(t, "web.yaml", []byte(users))
	main, health := serving(t, HTTP{ConfigFile: config})
	for _, test := range []struct {
		name, url, user, password string
		code                      int
	}{
		{"no name", "http://" + main.String() + "/metrics", "", "", 401},
		{"wrong password", "http://" + main.String() + "/metrics", "scraper", "sesame", 401},
		{"right password", "http://" + main.String() + "/metrics", "scraper", "open sesame", 200},
		{"health is behind it too", "http://" + main.String() + "/healthz", "", "", 401},
		{"health has an address of its own", "http://" + health.String() + "/healthz", "", "", 200},
		{"readiness too", "http://" + health.String() + "/readyz", "", "", 503},
		{"which has nothing else", "http://" + health.String() + "/metrics", "", "", 404},
	} {
		t.Run(test.name, func(t *testing.T) {
			if code, body := answer(t, http.DefaultClient, test.url, test.user, test.password); code != test.code {
				t.Errorf("answer %d %s, want %d", code, body, test.code)
			}
		})
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	// The certificate of a test server is as good as any.
	borrowed := httptest.NewTLSServer(http.NotFoundHandler())
	defer borrowed.Close()
	certificate, key := pems(t, borrowed.TLS.Certificates[0])
	config := write(t, "web.yaml", []byte("tls_server_config:\n  cert_file: "+write(t, "tls.crt", certificate)+"\n  key_file: "+write(t, "tls.key", key)+"\n"))
	main, health := serving(t, HTTP{ConfigFile: config})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: borrowed.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs}}}
	defer client.CloseIdleConnections()
	if code, body := answer(t, client, "https://"+main.String()+"/healthz", "", ""); code != 200 {
		t.Errorf("with TLS: %d %s", code, body)
	}
	if code, _ := answer(t, http.DefaultClient, "http://"+main.String()+"/healthz", "", ""); code == 200 {
		t.Error("without TLS: an answer")
	}
	if code, body := answer(t, http.DefaultClient, "http://"+health.String()+"/healthz", "", ""); code != 200 {
		t.Errorf("health: %d %s", code, body)
	}
}

// TestCertificateIsRenewed checks that a certificate which was replaced on disk is
// the one of the next connection.
func TestCertificateIsRenewed(t *testing.T) {
	t.Parallel()
	certificate, key := filepath.Join(t.TempDir(), "tls.crt"), filepath.Join(t.TempDir(), "tls.key")
	issue(t, 1, certificate, key)
	main, _ := serving(t, HTTP{ConfigFile: write(t, "web.yaml", []byte("tls_server_config:\n  cert_file: "+certificate+"\n  key_file: "+key+"\n"))})
	for number := int64(1); number <= 2; number++ {
		if number > 1 { // The server may be reading the first one.
			issue(t, number, certificate, key)
		}
		//nolint:gosec // it is looked at, not trusted
		connection, err := tls.Dial("tcp", main.String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		if got := connection.ConnectionState().PeerCertificates[0].SerialNumber.Int64(); got != number {
			t.Errorf("certificate %d, want %d", got, number)
		}
		_ = connection.Close()
	}
}

func TestBadConfigurationFile(t *testing.T) {
	t.Parallel()
	for name, path := range map[string]string{
		"absent":      filepath.Join(t.TempDir(), "none.yaml"),
		"unknown key": write(t, "web.yaml", []byte("tls: {}\n")),
	} {
		if err := (HTTP{ConfigFile: path}).Validate(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want an error that names the file", name, err)
		}
	}
	if err := (HTTP{}).Validate(); err != nil {
		t.Errorf("no file: %v", err)
	}
}

func TestProfilingIsAsked(t *testing.T) {
	t.Parallel()
	for profiling, want := range map[bool]int{true: 200, false: 404} {
		main, _ := serving(t, HTTP{Profiling: profiling})
		if code, _ := answer(t, http.DefaultClient, "http://"+main.String()+"/debug/pprof/cmdline", "", ""); code != want {
			t.Errorf("profiling %t: answer %d, want %d", profiling, code, want)
		}
	}
}

// taken has an address that another program has until it is closed.
func taken(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// TestListenAddressInUse has both addresses taken at the start: the GPUs are served all the
// same, Kubernetes is told why HTTP is not, and it is as soon as an address is free.
func TestListenAddressInUse(t *testing.T) {
	main, health := taken(t), taken(t)
	reporter, log := newFakeReporter(), newListening()
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Logger = reporter, slog.New(log)
		r.options.Listen, r.options.HTTP = main.Addr().String(), HTTP{HealthListen: health.Addr().String()}
	})
	r.shows(8)
	says := func(what string, refused ...string) {
		t.Helper()
		reporter.await(t, what, func(n nodereport.Report) bool {
			return n.Ready == nodereport.ConditionTrue && n.Reason == "Serving" && strings.Count(n.Message, "not served") == len(refused) &&
				!slices.ContainsFunc(refused, func(text string) bool { return !strings.Contains(n.Message, text) })
		})
	}
	says("both", "listen for HTTP: listen tcp "+main.Addr().String()+": bind: address already in use",
		"listen for health: listen tcp "+health.Addr().String()+": bind: address already in use")

	_ = main.Close()
	says("that one is served", "listen for health")
	answers := log.await(t, "http listens").String()
	if code, _ := answer(t, http.DefaultClient, "http://"+answers+"/readyz", "", ""); code != http.StatusOK || answers != main.Addr().String() {
		t.Errorf("/readyz on %s: %d", answers, code)
	}
	_ = health.Close()
	says("that both are served")
	r.policy.set(profile(5), nil)
	r.shows(10)
}

// TestOneAddressTwice checks that the second use of it is told, and ends nothing.
func TestOneAddressTwice(t *testing.T) {
	probe := taken(t)
	_ = probe.Close()
	reporter := newFakeReporter()
	r := newRig(t, func(r *rig) {
		r.options.Reporter, r.options.Listen = reporter, probe.Addr().String()
		r.options.HTTP.HealthListen = probe.Addr().String()
	})
	r.shows(8)
	reporter.await(t, "one of them", func(n nodereport.Report) bool { return strings.Count(n.Message, "address already in use") == 1 })
}

// TestStopsWhileAnAddressIsTaken checks that the wait between two tries ends, too.
func TestStopsWhileAnAddressIsTaken(t *testing.T) {
	t.Parallel()
	listener := taken(t)
	a := newAgent(withIdle(Options{Settings: Settings{Listen: listener.Addr().String()}, Plugin: plugin.NewManager(plugin.Options{})}))
	servers, err := a.servers()
	if err != nil || len(servers) != 1 {
		t.Fatalf("%d servers, error %v", len(servers), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- servers[0](ctx) }()
	<-a.reportWake // It has failed once.
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestConfigurationFileIsMended: a file that was broken after the start keeps HTTP away only
// until it is right again.
func TestConfigurationFileIsMended(t *testing.T) {
	config := write(t, "web.yaml", []byte("tls_server_config: {cert_file: gone, key_file: gone}\n"))
	address := taken(t)
	_ = address.Close()
	a := newAgent(withIdle(Options{Settings: Settings{Listen: address.Addr().String(), HTTP: HTTP{ConfigFile: config}}, Plugin: plugin.NewManager(plugin.Options{})}))
	servers, err := a.servers()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- servers[0](ctx) }()
	unserved := func() error {
		if why := a.unserved[0].Load(); why != nil {
			return *why
		}
		return nil
	}
	for unserved() == nil {
		<-a.reportWake
	}
	if err := os.WriteFile(config, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	for served := false; !served; {
		if err := unserved(); errors.Is(err, syscall.EADDRINUSE) {
			t.Fatalf("its own listener is in the way: %v", err)
		} else if err != nil {
			<-a.reportWake
			continue
		}
		response, err := http.Get("http://" + a.Listen + "/healthz")
		if served = err == nil; served {
			_ = response.Body.Close()
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestNoAddress: what cannot be an address is a mistake, and waiting does not mend it.
func TestNoAddress(t *testing.T) {
	t.Parallel()
	for what, options := range map[string]Options{
		"listen for HTTP":   {Settings: Settings{Listen: "localhost:99999"}},
		"listen for health": {Settings: Settings{HTTP: HTTP{HealthListen: "localhost"}}},
	} {
		options.Plugin = plugin.NewManager(plugin.Options{Dir: t.TempDir()})
		if err := Run(t.Context(), withIdle(options)); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: got %v", what, err)
		}
	}
}

func TestServesHTTP(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	a := newAgent(withIdle(Options{Settings: Settings{Listen: "localhost:0"}, Plugin: plugin.NewManager(plugin.Options{})}))
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", a.Listen)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- a.serve(ctx, listener, a.handler(), "") }()
	response, err := http.Get("http://" + listener.Addr().String() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if string(body) != "ok\n" {
		t.Errorf("body %q", body)
	}
	cancel()
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		t.Errorf("ended with %v", err)
	}
}

// pems are the certificate and its key as files have them.
func pems(t *testing.T, certificate tls.Certificate) (public, private []byte) {
	t.Helper()
	key, err := x509.MarshalPKCS8PrivateKey(certificate.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[0]}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})
}

// issue makes a certificate of that number and writes it with its key to the
// two files.
func issue(t *testing.T, number int64, certificate, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(number), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	public, secret := pems(t, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private})
	for path, data := range map[string][]byte{certificate: public, key: secret} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNotReadyReasons(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		change func(*rig)
		want   string
	}{
		{"no profile", func(r *rig) {
			r.policy = fakePolicy{newInput(sharing.Profile{}, errors.New("line 3"))}
			r.options.ConfigSource = r.policy
		}, "no profile: line 3"},
		{"no driver", func(r *rig) {
			r.node = fakeNode{newInput[[]sharing.GPU](nil, errors.New("no driver"))}
			r.options.Node = r.node
		}, "GPUs not read: no driver"},
		{"silent kubelet", func(r *rig) { r.kubelet.HangRegister(true) }, "nvidia.com/gpu: not registered"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, test.change)
			r.awaitBody("/readyz", 503, test.want)
		})
	}
}

func TestReadyWhenServed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.awaitBody("/readyz", 200, "ok")
	r.shows(8)
	if code, body := r.get("/healthz"); code != 200 {
		t.Errorf("healthz %d %s", code, body)
	}
	code, body := r.get("/plan")
	var got sharing.Summary
	if err := json.Unmarshal([]byte(body), &got); code != 200 || err != nil {
		t.Fatalf("plan %d %s", code, body)
	}
	if len(got.Resources) != 1 || got.Resources[0].Devices != 8 || got.Warnings == nil {
		t.Errorf("plan %+v", got)
	}
}

func TestReadyWithoutGPUs(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput([]sharing.GPU{}, nil)}; r.options.Node = r.node })
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, `"resources": []`)
}

func TestNotReadyBeforeTheClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) {
		r.options.AcquireLock = func(ctx context.Context, _ func()) error {
			<-ctx.Done()
			return ctx.Err()
		}
	})
	r.awaitBody("/readyz", 503, "not serving yet")
}

// TestReadyWhileANewNameWaits renames a resource whose only unit a pod holds:
// the new name has nothing to serve, and nothing is wrong.
func TestReadyWhileANewNameWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.node = fakeNode{newInput(gpus(""), nil)}; r.options.Node = r.node })
	r.shows(4)
	_, err := r.kubelet.AddPod(r.ctx, simkubelet.Pod{Namespace: "n", Name: "p", Containers: []simkubelet.Container{
		{Name: "c", Requests: map[string]int{gpuResource: 1}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	renamed := profile(4)
	renamed.TimeSlicing[0].Rename = gpuResource + ".shared"
	r.policy.set(renamed, nil)
	r.shows(0)
	r.awaitBody("/readyz", 200, "ok")
	r.awaitBody("/plan", 200, "nvidia.com/gpu.shared")
	r.awaitBody("/metrics", 200, "virgate_kubelet_state_known 1")
}

// fakeHealth is one GPU with a fatal error until it is cleared.
type fakeHealth struct{ cleared []string }

func (f *fakeHealth) unit() sharing.UnitHealth {
	u := sharing.UnitHealth{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: sharing.Unhealthy, Reason: "XID 79"}
	if len(f.cleared) > 0 {
		u.State = sharing.Recovering
	}
	return u
}

func (f *fakeHealth) Health() sharing.HealthReport {
	return sharing.HealthReport{Units: []sharing.UnitHealth{f.unit()}, Monitors: []sharing.HealthMonitor{{GPU: "GPU-a", Degraded: "deaf"}}}
}

func (f *fakeHealth) ClearHealth(_ context.Context, selector sharing.Selector) ([]sharing.UnitHealth, error) {
	if !selector.MatchGPU(sharing.GPU{UUID: "GPU-a", Index: 0}) {
		return nil, errors.New("no such GPU or partition: " + selector.String())
	}
	f.cleared = append(f.cleared, selector.String())
	return []sharing.UnitHealth{f.unit()}, nil
}

func TestHealthHandler(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, method, path string
		code               int
		state              sharing.HealthState
		says               string
	}{
		{"shown", http.MethodGet, "/health", 200, sharing.Unhealthy, ""},
		{"cleared", http.MethodPost, "/health/clear?gpu=0", 200, sharing.Recovering, ""},
		{"cleared by reading", http.MethodGet, "/health/clear?gpu=0", 405, "", "Method Not Allowed\n"},
		{"of no GPU", http.MethodPost, "/health/clear?gpu=1", 400, "", "no such GPU or partition: 1\n"},
		{"of nothing", http.MethodPost, "/health/clear", 400, "", "gpu: \"\" names no GPU or partition: want a GPU index (0), a MIG index (0:1), a UUID (GPU-…, MIG-…) or a PCI bus ID (00000000:3B:00.0)\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			health := &fakeHealth{}
			recorder := httptest.NewRecorder()
			HealthHandler(health).ServeHTTP(recorder, httptest.NewRequest(test.method, test.path, nil))
			if recorder.Code != test.code {
				t.Errorf("code %d, want %d", recorder.Code, test.code)
			}
			if test.code != 200 {
				if diff := cmp.Diff(test.says, recorder.Body.String()); diff != "" || len(health.cleared) > 0 {
					t.Errorf("cleared %v, answer (-want +got):\n%s", health.cleared, diff)
				}
				return
			}
			var report sharing.HealthReport
			if err := json.Unmarshal(recorder.Body.Bytes(), &report); err != nil {
				t.Fatal(err)
			}
			if len(report.Units) != 1 || report.Units[0].State != test.state {
				t.Errorf("answer %+v", report)
			}
		})
	}
}

func TestHealthMetrics(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) { r.options.Health = &fakeHealth{} })
	r.awaitBody("/metrics", 200, `virgate_unit_health_state{gpu_uuid="GPU-a",state="unhealthy",unit_uuid="GPU-a"} 1`)
	r.awaitBody("/metrics", 200, `virgate_health_monitor_up{gpu_uuid="GPU-a"} 0`)
	r.awaitBody("/readyz", 200, "ok") // Degraded is not unready.
}

// TestOnProfile checks that it is called with each profile that comes into force,
// once, and with no other.
func TestOnProfile(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var seen []int
	r := newRig(t, func(r *rig) {
		r.options.SetHealthRules = func(p sharing.Profile) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, p.TimeSlicing[0].Replicas)
		}
	})
	r.shows(8)
	r.node.set(gpus("", "", ""), nil)
	r.shows(12)
	r.policy.set(sharing.Profile{}, errors.New("line 3"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	r.policy.set(profile(5), nil)
	r.shows(15)
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(seen, []int{4, 5}) {
		t.Errorf("called with %v, want 4 and 5", seen)
	}
}

// TestTakesOverBeforeServing checks that what the last program left is in the
// first list already.
func TestTakesOverBeforeServing(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(r *rig) {
		r.options.RestoreHealth = func(context.Context) error {
			r.node.set(gpus("", "XID 79"), nil)
			return nil
		}
	})
	r.shows(4)
	if lists := r.agent.Plugin.Status().Resources[0].Lists; lists != 1 {
		t.Errorf("%d lists, want one", lists)
	}
}

func TestTakeOverFailureEndsRun(t *testing.T) {
	t.Parallel()
	failure := errors.New("no health")
	r := newRig(t, nil)
	options := r.options
	options.Plugin = plugin.NewManager(plugin.Options{Dir: t.TempDir(), Kubelet: r.sight, Logger: options.Logger})
	options.RestoreHealth = func(context.Context) error { return failure }
	options.Node, options.ConfigSource = fakeNode{newInput(gpus(""), nil)}, fakePolicy{newInput(profile(1), nil)}
	if err := Run(t.Context(), options); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
}

// TestNextPause checks that the pause grows while an address fails at once, and not from
// where it was when it has been served meanwhile.
func TestNextPause(t *testing.T) {
	t.Parallel()
	pause := firstPause
	for n := range 20 {
		next := nextPause(pause, pause)
		if next <= pause && pause < longestPause || next > longestPause {
			t.Errorf("pause %d is %s, after %s", n, next, pause)
		}
		pause = next
	}
	if next := nextPause(pause, time.Hour); next != firstPause {
		t.Errorf("%s after an hour of service, want %s", next, firstPause)
	}
}
