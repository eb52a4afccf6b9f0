package api

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/client-go/rest"
)

// counter counts what goes over one node's connections, and can cut them.
type counter struct {
	read, written atomic.Int64
	mu            sync.Mutex
	requests      []string // method and URL
	answers       []int
	open          map[net.Conn]bool
	cut           bool
}

// into has the configuration counted.
func (c *counter) into(config *rest.Config) *rest.Config {
	c.open = map[net.Conn]bool{}
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut {
			return nil, net.ErrClosed
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c.open[conn] = true
		return counted{conn, c}, nil
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return trip(func(request *http.Request) (*http.Response, error) {
			c.mu.Lock()
			c.requests = append(c.requests, request.Method+" "+request.URL.RequestURI())
			c.mu.Unlock()
			answer, err := next.RoundTrip(request)
			if err == nil {
				c.mu.Lock()
				c.answers = append(c.answers, answer.StatusCode)
				c.mu.Unlock()
			}
			return answer, err
		})
	})
	return config
}

// setCut cuts the network, or mends it.
func (c *counter) setCut(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	if cut {
		for conn := range c.open {
			_ = conn.Close()
		}
	}
}

func (c *counter) seen() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.requests)
}

func (c *counter) answered(status int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	count := 0
	for _, answer := range c.answers {
		if answer == status {
			count++
		}
	}
	return count
}

type trip func(*http.Request) (*http.Response, error)

func (t trip) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

type counted struct {
	net.Conn
	counter *counter
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.counter.read.Add(int64(n))
	return n, err
}

func (c counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.counter.written.Add(int64(n))
	return n, err
}

func (c counted) Close() error {
	c.counter.mu.Lock()
	delete(c.counter.open, c.Conn)
	c.counter.mu.Unlock()
	return c.Conn.Close()
}
