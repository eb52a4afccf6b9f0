package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/virgate/virgate/plugin"
)

// serving is an agent that answers HTTP as the options say.
func serving(t *testing.T, options HTTP) (main, health net.Addr) {
	t.Helper()
	var log strings.Builder
	options.HealthListen = "127.0.0.1:0"
	a := newAgent(Options{
		Listen: "127.0.0.1:0", HTTP: options, Plugin: plugin.NewManager(plugin.Options{}),
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	ctx, cancel := context.WithCancel(context.Background())
	servers, err := a.listenAll(ctx)
	if err != nil {
		t.Fatal(err)
	}
	addresses := []net.Addr{}
	for line := range strings.Lines(log.String()) {
		_, text, _ := strings.Cut(strings.TrimSpace(line), "address=")
		address, err := net.ResolveTCPAddr("tcp", text)
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, address)
	}
	ended := make(chan error, len(servers))
	for _, server := range servers {
		go func() { ended <- server(ctx) }()
	}
	t.Cleanup(func() {
		cancel()
		for range servers {
			if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
				t.Errorf("ended with %v", err)
			}
		}
	})
	return addresses[0], addresses[1]
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

// TestCertificateIsRenewed holds that a certificate which was replaced on disk is
// the one of the next connection.
func TestCertificateIsRenewed(t *testing.T) {
	certificate, key := filepath.Join(t.TempDir(), "tls.crt"), filepath.Join(t.TempDir(), "tls.key")
	issue(t, 1, certificate, key)
	main, _ := serving(t, HTTP{ConfigFile: write(t, "web.yaml", []byte("tls_server_config:\n  cert_file: "+certificate+"\n  key_file: "+key+"\n"))})
	for number := int64(1); number <= 2; number++ {
		issue(t, number, certificate, key)
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
	for profiling, want := range map[bool]int{true: 200, false: 404} {
		main, _ := serving(t, HTTP{Profiling: profiling})
		if code, _ := answer(t, http.DefaultClient, "http://"+main.String()+"/debug/pprof/cmdline", "", ""); code != want {
			t.Errorf("profiling %t: answer %d, want %d", profiling, code, want)
		}
	}
}

func TestListenAddressInUse(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	err := Run(t.Context(), Options{Listen: strings.TrimPrefix(server.URL, "http://"), Logger: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "listen for HTTP") {
		t.Errorf("got %v", err)
	}
}

func TestServesHTTP(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	a := newAgent(Options{Listen: "localhost:0", Logger: slog.New(slog.DiscardHandler), Plugin: plugin.NewManager(plugin.Options{})})
	listener, err := listen(ctx, a.Listen)
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
