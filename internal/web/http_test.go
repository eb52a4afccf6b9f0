package web

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
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// listening learns the HTTP addresses from the log.
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

// await waits for the address in this log message.
func (l listening) await(t *testing.T, message string) net.Addr {
	t.Helper()
	address, err := net.ResolveTCPAddr("tcp", <-l.addresses[message])
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// shown is a node without any data.
func shown() Node {
	return Node{
		Status:   func(context.Context) status.Status { return status.Status{} },
		Unready:  func() []string { return []string{"not serving yet"} },
		Waiting:  func() []string { return nil },
		Plan:     func() (sharing.Plan, bool) { return sharing.Plan{}, true },
		Forecast: func(context.Context, string, string) nodereport.Forecast { return nodereport.Forecast{} },
		Metrics:  prometheus.NewRegistry,
	}
}

// newServer is a server of such a node, and a channel that receives when its addresses change.
func newServer(listen string, options HTTP, log slog.Handler) (*Server, <-chan struct{}) {
	changed := make(chan struct{}, 1)
	tell := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	return New(Options{HTTP: options, Listen: listen, Changed: tell, Node: shown(), Logger: slog.New(log)}), changed
}

// run runs the server until the test ends, or the returned function is called.
func run(t *testing.T, s *Server) (end func()) {
	t.Helper()
	if err := s.CheckAddresses(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("ended with %v", err)
		}
	})
	t.Cleanup(end)
	return end
}

// serving is a server with these options.
func serving(t *testing.T, options HTTP) (main, health net.Addr) {
	t.Helper()
	log := newListening()
	options.HealthListen = "127.0.0.1:0"
	s, _ := newServer("127.0.0.1:0", options, log)
	run(t, s)
	return log.await(t, "http listens"), log.await(t, "health listens")
}

// answer gets a URL, with a user name and password if the name is set.
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

// write creates a file in a new folder, and returns its path.
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
	// The certificate of any test server will do.
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

// TestCertificateIsRenewed checks that a certificate replaced on disk is used for the next connection.
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

// taken listens on an address, as another program would, until it is closed.
func taken(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// TestStopsWhileAnAddressIsTaken checks that the wait between two tries ends, too.
func TestStopsWhileAnAddressIsTaken(t *testing.T) {
	t.Parallel()
	s, changed := newServer(taken(t).Addr().String(), HTTP{}, slog.DiscardHandler)
	end := run(t, s)
	<-changed // It has failed once.
	end()
}

// TestConfigurationFileIsMended checks that a file that breaks after the start stops HTTP only until it is valid
// again.
func TestConfigurationFileIsMended(t *testing.T) {
	config := write(t, "web.yaml", []byte("tls_server_config: {cert_file: gone, key_file: gone}\n"))
	address := taken(t)
	_ = address.Close()
	s, changed := newServer(address.Addr().String(), HTTP{ConfigFile: config}, slog.DiscardHandler)
	run(t, s)
	for len(s.Unserved()) == 0 {
		<-changed
	}
	if err := os.WriteFile(config, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	for served := false; !served; {
		if why := s.Unserved(); len(why) > 0 && errors.Is(why[0], syscall.EADDRINUSE) {
			t.Fatalf("its own listener is in the way: %v", why[0])
		} else if len(why) > 0 {
			<-changed
			continue
		}
		response, err := http.Get("http://" + s.Listen + "/healthz")
		if served = err == nil; served {
			_ = response.Body.Close()
		}
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

// fakeHealth has one GPU with a fatal error until it is cleared.
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

// TestRetry checks that the pause grows while an address fails at once, and starts over once it has been served.
func TestRetry(t *testing.T) {
	t.Parallel()
	retry, last := newRetry(), time.Duration(0)
	for n := range 20 {
		pause := retry.Step()
		if pause <= last && last < 10*time.Second || pause > 10*time.Second {
			t.Errorf("pause %d is %s, after %s", n, pause, last)
		}
		retry, last = retryAfter(retry, pause), pause
	}
	retry = retryAfter(retry, time.Hour)
	if pause := retry.Step(); pause != 100*time.Millisecond {
		t.Errorf("%s after an hour of service", pause)
	}
}
