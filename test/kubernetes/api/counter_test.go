package api

import (
	"context"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
)

// counter counts what goes over one node's connections, and can cut them.
type counter struct {
	read, written atomic.Int64
	mu            sync.Mutex
	requests      []request
	dials         []time.Time
	open          map[net.Conn]bool
	cut           bool
}

// request is one that was made.
type request struct {
	at time.Time
	// what is its method and URL.
	what string
	// answer is the status; 0 while there is none, or when there was none. It came
	// at answered.
	answer   int
	answered time.Time
}

// writes says that it changes something.
func (r request) writes() bool { return !strings.HasPrefix(r.what, http.MethodGet) }

// into has what is asked with the configuration counted. All that use it share
// one connection, as they do in the program.
func (c *counter) into(config *rest.Config) *rest.Config {
	c.open = map[net.Conn]bool{}
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut {
			return nil, net.ErrClosed
		}
		c.dials = append(c.dials, time.Now())
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c.open[conn] = true
		return counted{conn, c}, nil
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return trip(func(r *http.Request) (*http.Response, error) {
			c.mu.Lock()
			place := len(c.requests)
			c.requests = append(c.requests, request{at: time.Now(), what: r.Method + " " + r.URL.RequestURI()})
			c.mu.Unlock()
			answer, err := next.RoundTrip(r)
			if err == nil {
				c.mu.Lock()
				c.requests[place].answer, c.requests[place].answered = answer.StatusCode, time.Now()
				c.mu.Unlock()
			}
			return answer, err
		})
	})
	shared, err := rest.TransportFor(config)
	if err != nil {
		panic(err) // The configuration is the test's own.
	}
	return &rest.Config{Host: config.Host, Transport: shared, QPS: -1}
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

// made are the requests so far.
func (c *counter) made() []request {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.requests)
}

// dialled is when connections were asked for.
func (c *counter) dialled() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.dials)
}

func (c *counter) seen() []string {
	var all []string
	for _, r := range c.made() {
		all = append(all, r.what)
	}
	return all
}

func (c *counter) answered(status int) int {
	count := 0
	for _, r := range c.made() {
		if r.answer == status {
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
