package api

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// asServer makes this test binary an API server.
const asServer = "VIRGATE_TEST_API_SERVER"

func TestMain(m *testing.M) {
	if os.Getenv(asServer) != "" {
		go func() { // A test that is killed takes its server with it.
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(1)
		}()
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	}
	os.Exit(m.Run())
}

const (
	adminToken, virgateToken, strangerToken = "admin-token", "virgate-token", "stranger-token"
	// startTimeout is generous: the machine may be busy.
	startTimeout = 90 * time.Second
)

// server is an API server with its etcd.
type server struct {
	t       *testing.T
	dir     string
	port    int
	etcd    *url.URL
	process *exec.Cmd
	admin   *kubernetes.Clientset
}

// startServer starts both and stops them at the end of the test.
func startServer(t *testing.T) *server {
	t.Helper()
	s := &server{t: t, dir: t.TempDir(), port: freePort(t)}
	s.startEtcd()
	write(t, filepath.Join(s.dir, "tokens.csv"), adminToken+`,admin,1,"system:masters"
`+virgateToken+`,virgate,2,"system:serviceaccounts"
`+strangerToken+",stranger,3\n")
	writeKey(t, s.path("accounts.key"))
	s.start()
	admin, err := kubernetes.NewForConfig(s.config(adminToken))
	if err != nil {
		t.Fatal(err)
	}
	s.admin = admin
	return s
}

func (s *server) path(name string) string { return filepath.Join(s.dir, name) }

// config logs in with the token.
func (s *server) config(token string) *rest.Config {
	return &rest.Config{
		Host: "https://127.0.0.1:" + strconv.Itoa(s.port), BearerToken: token, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, // It signs its own certificate.
	}
}

func (s *server) startEtcd() {
	s.t.Helper()
	config := embed.NewConfig()
	config.Dir, config.LogLevel, config.LogOutputs = s.path("etcd"), "error", []string{s.path("etcd.log")}
	config.UnsafeNoFsync = true
	local := func() url.URL {
		return url.URL{Scheme: "http", Host: "127.0.0.1:" + strconv.Itoa(freePort(s.t))}
	}
	client, peer := local(), local()
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(etcd.Close)
	select {
	case <-etcd.Server.ReadyNotify():
	case <-time.After(startTimeout):
		s.t.Fatal("etcd does not start")
	}
	s.etcd = &client
}

// start starts the API server and waits until it is ready.
func (s *server) start() {
	s.t.Helper()
	log, err := os.OpenFile(s.path("server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	s.process = exec.Command(self,
		"--etcd-servers="+s.etcd.String(), "--cert-dir="+s.path("certificates"),
		"--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(s.port), "--endpoint-reconciler-type=none",
		"--authorization-mode=RBAC", "--token-auth-file="+s.path("tokens.csv"), "--anonymous-auth=false",
		"--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://accounts.test",
		"--service-account-signing-key-file="+s.path("accounts.key"), "--service-account-key-file="+s.path("accounts.key"),
		"--disable-admission-plugins=ServiceAccount", "--shutdown-delay-duration=0s",
	)
	s.process.Env = append(os.Environ(), asServer+"=1")
	s.process.Stdout, s.process.Stderr = log, log
	_, err = s.process.StdinPipe()
	if err == nil {
		err = s.process.Start()
	}
	_ = log.Close()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(s.stop)
	client, err := rest.HTTPClientFor(s.config(adminToken))
	if err != nil {
		s.t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	s.await(startTimeout, "the API server to be ready", func() bool {
		request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.config("").Host+"/readyz", nil)
		if err != nil {
			return false
		}
		answer, err := client.Do(request)
		if err != nil {
			return false
		}
		defer func() { _ = answer.Body.Close() }()
		return answer.StatusCode == http.StatusOK
	})
}

// stop kills the API server, which is what a machine that fails does. Stopping
// again does nothing.
func (s *server) stop() {
	if s.process == nil || s.process.Process == nil {
		return
	}
	_ = s.process.Process.Kill()
	_ = s.process.Wait()
	s.process = nil
	if s.t.Failed() {
		if log, err := os.ReadFile(s.path("server.log")); err == nil {
			s.t.Logf("API server's log ends:\n%s", log[max(0, len(log)-2000):])
		}
	}
}

// await waits for the condition.
func (s *server) await(limit time.Duration, what string, condition func() bool) {
	s.t.Helper()
	await(s.t, limit, what, condition)
}

func await(t *testing.T, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited %s for %s", limit, what)
		case <-tick.C:
		}
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	return port
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
