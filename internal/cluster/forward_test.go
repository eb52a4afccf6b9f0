package cluster

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/test/portforward"
)

// TestForward checks that each request uses TLS and the caller's token and reaches a port on the pod's loopback,
// and that an error names the side that refused.
func TestForward(t *testing.T) {
	var resumed, asked atomic.Int32
	var dial func(port string) (net.Conn, error)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS.DidResume {
			resumed.Add(1)
		}
		asked.Add(1)
		switch {
		case r.Header.Get("Authorization") != "Bearer secret", r.Method != http.MethodGet:
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status:   "Failure",
				Code:     http.StatusForbidden,
			})
		case r.URL.Path != "/api/v1/namespaces/virgate/pods/virgate-n1/portforward":
			http.NotFound(w, r)
		default:
			_ = portforward.Serve(w, r, dial) // Its error is that the client has gone.
		}
	}))
	t.Cleanup(server.Close)
	client := func(token string) *Client {
		c, err := NewClient(&rest.Config{
			Host:            server.URL,
			BearerToken:     token,
			TLSClientConfig: rest.TLSClientConfig{CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})},
		})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	says := func(handler http.HandlerFunc) func(string) (net.Conn, error) {
		return func(port string) (net.Conn, error) {
			if port != "9400" {
				return nil, fmt.Errorf("port %s", port)
			}
			return portforward.Pipe(handler), nil
		}
	}
	page := says(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" || r.Host != "localhost" {
			t.Errorf("the pod is asked with %v of %q", r.Header, r.Host)
		}
		_ = json.NewEncoder(w).Encode(status.Status{Node: "n1"})
	})
	pod := Pod{
		Namespace:  "virgate",
		Name:       "virgate-n1",
		Node:       "n1",
		StatusPort: 9400,
	}
	good := client("secret")
	closed := make(chan struct{})
	defer close(closed)
	other := pod
	other.Name = "another"
	for _, test := range []struct {
		name   string
		client *Client
		pod    Pod
		dial   func(string) (net.Conn, error)
		want   string
	}{
		{"a page", good, pod, page, ""},
		{"the next", good, pod, page, ""},
		{"another token", client("guess"), pod, page, "the API server answers 403 Forbidden"},
		{"no pod", good, other, page, "websocket: bad handshake (404 Not Found): 404 page not found"},
		{"nobody listens", good, pod, func(string) (net.Conn, error) { return nil, errors.New("dial tcp4: refused") }, "read the answer: the kubelet cannot connect: dial tcp4: refused"},
		{"an end", good, pod, says(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), "read the answer: unexpected EOF"},
		{"no page", good, pod, says(http.NotFound), "the answer is 404 Not Found"},
		{"nothing", good, pod, says(func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-r.Context().Done():
			case <-closed:
			}
		}), "no answer within 1s"},
		{"no end of words", good, pod, func(string) (net.Conn, error) { return nil, errors.New(strings.Repeat("x", 1<<20)) }, "read the answer: the kubelet cannot connect: xxx"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dial = test.dial
			limit := limit
			if test.name == "nothing" {
				limit = time.Second
			}
			page, err := test.client.status(t.Context(), test.pod, limit)
			if fmt.Sprint(err) != test.want && (test.want == "" || !strings.HasPrefix(fmt.Sprint(err), test.want)) && (test.want != "" || err != nil) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if err == nil && page.Node != "n1" {
				t.Errorf("%+v", page)
			}
		})
	}
	if resumed.Load() < asked.Load()/2 {
		t.Errorf("%d of %d connections without a whole handshake", resumed.Load(), asked.Load())
	}
}

// TestStatusPort checks that only the port named http is used.
func TestStatusPort(t *testing.T) {
	for _, test := range []struct {
		ports []corev1.ContainerPort
		want  int32
	}{
		{nil, 0},
		{[]corev1.ContainerPort{{Name: "http", ContainerPort: 9500}}, 9500},
		{[]corev1.ContainerPort{{Name: "other", ContainerPort: 22}}, 0},
	} {
		pod := virgatePod("n1")
		pod.Spec.Containers[0].Ports = test.ports
		if kept, _ := trimPod(&pod, "nvidia.com", "virgate"); kept.StatusPort != test.want {
			t.Errorf("%v: port %d, want %d", test.ports, kept.StatusPort, test.want)
		}
	}
}
