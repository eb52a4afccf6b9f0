package hostile

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// dial opens a connection that the test closes.
func dial(t *testing.T, network, address string) net.Conn {
	t.Helper()
	connection, err := net.Dial(network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// isClosed says that the other side has closed the connection within the time.
func isClosed(connection net.Conn, patience time.Duration) bool {
	_ = connection.SetReadDeadline(time.Now().Add(patience))
	buffer := make([]byte, 512)
	for {
		if _, err := connection.Read(buffer); err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
	}
}

// heap is what the process has in use, in bytes.
func heap() uint64 {
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return memory.HeapAlloc + memory.StackInuse
}

// TestSlowClients holds that clients which begin a request and never end it are
// bounded, and that others are answered meanwhile.
func TestSlowClients(t *testing.T) {
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	before := heap()
	var slow []net.Conn
	for range 1500 {
		connection := dial(t, "tcp", p.address())
		_, _ = fmt.Fprintf(connection, "GET /status HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		slow = append(slow, connection)
	}
	for _, path := range []string{"/healthz", "/readyz", "/status", "/metrics", "/api/v1/status"} {
		if body := p.get(path); body == "" {
			t.Errorf("%s is answered with nothing", path)
		}
	}
	for _, i := range []int{0, 100, 1000} {
		if !isClosed(slow[i], 3*time.Second) {
			t.Errorf("slow client %d of 1500 is still waited for", i)
		}
	}
	// Of those that are left each costs a goroutine and its buffers.
	if after := heap(); after > before+32<<20 {
		t.Errorf("%d MiB more than before", (after-before)>>20)
	}
	if !isClosed(slow[1499], patience) {
		t.Error("the last slow client is waited for without end")
	}
}

// TestHugeRequests holds that headers and addresses have a bound, and bodies are
// not read.
func TestHugeRequests(t *testing.T) {
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	long := strings.Repeat("x", 1<<20)
	for _, test := range []struct {
		name, request string
		want          int
	}{
		{"a header", "GET /status HTTP/1.1\r\nHost: x\r\nX-Long: " + long + "\r\n\r\n", http.StatusRequestHeaderFieldsTooLarge},
		{"an address", "GET /" + long + " HTTP/1.1\r\nHost: x\r\n\r\n", http.StatusRequestHeaderFieldsTooLarge},
		{"a body", "POST /status HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + long, http.StatusMethodNotAllowed},
		{"no HTTP", long, http.StatusRequestHeaderFieldsTooLarge},
		{"another protocol", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", http.StatusBadRequest},
	} {
		t.Run(test.name, func(t *testing.T) {
			connection := dial(t, "tcp", p.address())
			go func() { _, _ = connection.Write([]byte(test.request)) }() // It may not be read to its end.
			_ = connection.SetReadDeadline(time.Now().Add(patience))
			answer, err := http.ReadResponse(bufio.NewReader(connection), nil)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close()
			if answer.StatusCode != test.want {
				t.Errorf("answered %s, want %d", answer.Status, test.want)
			}
		})
	}
	p.shows(gpu, 4)
}
