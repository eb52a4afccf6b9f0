package web

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// outside is an address of this machine that isn't loopback's.
func outside(t *testing.T) net.IP {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range addresses {
		if ip, is := address.(*net.IPNet); is && ip.IP.IsGlobalUnicast() {
			return ip.IP
		}
	}
	t.Skip("this machine has no address but loopback's")
	return nil
}

// TestPodNetwork attacks every listener from the pod network: by any host name, no answer names a pod, a GPU or a
// profile there, while everything is available where kubectl port-forward arrives.
func TestPodNetwork(t *testing.T) {
	const secret = "research/train-0"
	node := shown()
	node.Status = func(context.Context) status.Status { return status.Status{Node: secret} }
	node.Unready = func() []string { return []string{secret} }
	node.Plan = func() (sharing.Plan, bool) { return sharing.Plan{Warnings: []string{secret}}, true }
	node.Forecast = func(context.Context, string, string) nodereport.Forecast { return nodereport.Forecast{Node: secret} }
	log := newListening()
	s, _ := newServer("[::]:0", HTTP{HealthListen: "[::]:0", Profiling: true}, log)
	s.Node = node
	run(t, s)
	ports := map[string]int{}
	for _, message := range []string{"http listens", "health listens"} {
		ports[message] = log.await(t, message).(*net.TCPAddr).Port
	}
	ask := func(host net.IP, port int, method, path, name string) (int, string) {
		t.Helper()
		url := "http://" + net.JoinHostPort(host.String(), fmt.Sprint(port)) + path
		request, err := http.NewRequestWithContext(t.Context(), method, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if name != "" {
			request.Host = name
		}
		client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return response.StatusCode, string(body)
	}
	pages := []string{"/", "/status", "/api/v1/status", "/plan", "/api/v1/forecast?label=l&value=v", "/debug/pprof/", "/debug/pprof/cmdline"}
	detours := []string{"//status", "/./status", "/metrics/../status", "/%73tatus", "/healthz/../api/v1/status", "/debug/pprof/heap", "/control", "/gpu", "/sim/xid"}
	open := regexp.MustCompile(`^/(metrics|healthz|readyz)$`)
	for what, port := range ports {
		for _, path := range append(append([]string{"/metrics", "/healthz", "/readyz"}, pages...), detours...) {
			for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodConnect} {
				for _, name := range []string{"", "localhost", "127.0.0.1", fmt.Sprint("localhost:", port)} {
					if method == http.MethodConnect && name != "" {
						continue
					}
					code, body := ask(outside(t), port, method, path, name)
					if strings.Contains(body, secret) || code < 400 && code != http.StatusTemporaryRedirect && code != http.StatusMovedPermanently && !open.MatchString(path) {
						t.Errorf("%s: %s %s of %q: %d %s", what, method, path, name, code, body)
					}
				}
			}
		}
		// A foreign name that points to loopback.
		if code, body := ask(net.IPv4(127, 0, 0, 1), port, http.MethodGet, "/readyz", "evil.example"); code != 503 || strings.Contains(body, secret) {
			t.Errorf("%s: /readyz of evil.example: %d %s", what, code, body)
		}
		for _, loopback := range []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback} {
			if code, body := ask(loopback, port, http.MethodGet, "/readyz", ""); code != 503 || !strings.Contains(body, secret) {
				t.Errorf("%s: /readyz by %s: %d %s", what, loopback, code, body)
			}
		}
	}
	port := ports["http listens"]
	for _, path := range pages {
		if code, body := ask(net.IPv4(127, 0, 0, 1), port, http.MethodGet, path, "localhost"); code != 200 && code != 302 {
			t.Errorf("%s by loopback: %d %s", path, code, body)
		}
		if code, body := ask(net.IPv4(127, 0, 0, 1), port, http.MethodGet, path, "evil.example"); code != 404 || body != onlyLoopback+"\n" {
			t.Errorf("%s of evil.example: %d %s", path, code, body)
		}
		if code, body := ask(outside(t), port, http.MethodGet, path, ""); code != 404 || body != onlyLoopback+"\n" {
			t.Errorf("%s from outside: %d %s", path, code, body)
		}
	}
}
