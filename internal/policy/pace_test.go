package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

func TestPace(t *testing.T) {
	busy := apierrors.NewTooManyRequests("busy", 3)
	gone := fmt.Errorf("%w: %w", errGarbled, apierrors.NewResourceExpired("too old"))
	away := errors.New("away")
	tests := []struct {
		name   string
		chance float64
		// lasted are the attempts, which all end with err.
		lasted []time.Duration
		err    error
		want   []time.Duration
	}{
		{
			"it doubles up to 30 s", 0.5, make([]time.Duration, 8), away,
			[]time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second, 30 * time.Second},
		},
		{"half of it at least", 0, make([]time.Duration, 2), away, []time.Duration{250 * time.Millisecond, 500 * time.Millisecond}},
		{
			"what lived for long begins anew", 0, []time.Duration{0, 0, time.Minute, 0}, away,
			[]time.Duration{250 * time.Millisecond, 500 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond},
		},
		{"a watch that ended in its time", 0, []time.Duration{time.Hour}, nil, []time.Duration{250 * time.Millisecond}},
		{"a watch that was cut is not spread at the least", 0, []time.Duration{time.Hour}, errCut, []time.Duration{250 * time.Millisecond}},
		{"a watch that was cut", 0.5, []time.Duration{time.Hour}, errCut, []time.Duration{3 * time.Second}},
		{"a watch that broke", 0.5, []time.Duration{time.Hour}, errGarbled, []time.Duration{3 * time.Second}},
		{"a version that is forgotten", 0.5, make([]time.Duration, 2), gone, []time.Duration{500 * time.Millisecond, 500 * time.Millisecond}},
		{"a server that asks for time", 0, make([]time.Duration, 2), busy, []time.Duration{3250 * time.Millisecond, 3500 * time.Millisecond}},
		{"which is not the same for all", 0.5, make([]time.Duration, 2), fmt.Errorf("list: %w", busy), []time.Duration{5 * time.Second, 5500 * time.Millisecond}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := newPace(0, 0)
			p.chance = func() float64 { return test.chance }
			var waits []time.Duration
			for _, lasted := range test.lasted {
				waits = append(waits, p.after(lasted, test.err))
			}
			if !slices.Equal(waits, test.want) {
				t.Errorf("waits %v, want %v", waits, test.want)
			}
		})
	}
}

// TestNodesComeBackApart: of a thousand nodes whose watches are cut at once, no
// second sees many more than its share of the spread.
func TestNodesComeBackApart(t *testing.T) {
	const nodes = 1000
	second := map[int]int{}
	for range nodes {
		second[int(newPace(0, 0).after(time.Hour, errCut).Seconds())]++
	}
	for at, count := range second {
		if count > nodes/3 {
			t.Errorf("%d nodes come back in second %d: %v", count, at, second)
		}
	}
}

// TestRequestsAreMadeOnce: a server that asks for time is asked once, not again
// by the library after exactly that time.
func TestRequestsAreMadeOnce(t *testing.T) {
	var asked, metadata atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if strings.Contains(r.Header.Get("Accept"), "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata") {
			metadata.Add(1)
		}
		w.Header().Set("Retry-After", "1")
		http.Error(w, "too many requests", http.StatusTooManyRequests)
	}))
	defer server.Close()
	api, err := NewAPI(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	feeds := map[string]*feed{
		"node":      api.node("n1", nil, slog.New(slog.DiscardHandler)),
		"ConfigMap": api.objects("profiles", "configmaps", "gpu", byName("profiles"), nil, slog.New(slog.DiscardHandler)),
	}
	for name, f := range feeds {
		requests := map[string]func() error{
			"list":  func() error { _, err := f.list(t.Context(), metav1.ListOptions{}); return err },
			"watch": func() error { _, err := f.watch(t.Context(), metav1.ListOptions{ResourceVersion: "1"}); return err },
		}
		for kind, request := range requests {
			t.Run(name+" "+kind, func(t *testing.T) {
				asked.Store(0)
				err := request()
				if seconds, ok := apierrors.SuggestsClientDelay(err); !ok || seconds != 1 {
					t.Errorf("the error %v asks for %d s, %t", err, seconds, ok)
				}
				if got := asked.Load(); got != 1 {
					t.Errorf("asked %d times", got)
				}
			})
		}
	}
	if got := metadata.Load(); got != 2 {
		t.Errorf("%d requests are for metadata alone, want those of the Node", got)
	}
}

// TestCutWatchGoesOn: a watch that is cut goes on from where it was, without a
// list and without a complaint.
func TestCutWatchGoesOn(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	opened := make(chan string, 10)
	var complaints atomic.Int32
	c := followed(t, server, func(f *feed) {
		f.into = complaining{f.into, &complaints}
		open := f.watch
		f.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			opened <- options.ResourceVersion
			return open(ctx, options)
		}
	})
	sees(t, c, four)
	<-opened
	server.change("profiles", fakeConfigMap(map[string]string{"a": ten}))
	sees(t, c, ten)
	server.drop()
	if version := <-opened; version != "3" {
		t.Errorf("watched again from version %s", version)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if server.lists != 1 {
		t.Errorf("%d lists", server.lists)
	}
	if got := complaints.Load(); got != 0 {
		t.Errorf("%d complaints", got)
	}
}

// complaining counts why objects could not be followed.
type complaining struct {
	sink
	count *atomic.Int32
}

func (c complaining) fail(err error) {
	if err != nil {
		c.count.Add(1)
	}
	c.sink.fail(err)
}

// TestCutIsSeen: a watch that ends before its time was cut.
func TestCutIsSeen(t *testing.T) {
	server := newFakeServer()
	server.change("profiles", fakeConfigMap(map[string]string{"a": four}))
	log := slog.New(slog.DiscardHandler)
	c := newConfigMap("gpu", "profiles", log, func(what string, into sink) *feed { return server.feed(what, into, log) })
	c.data.changed = func() {}
	opened := make(chan struct{})
	open := c.feed.watch
	c.feed.watch = func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
		defer close(opened)
		return open(ctx, options)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := c.feed.follow(t.Context(), "")
		ended <- err
	}()
	<-opened
	server.drop()
	if err := <-ended; !errors.Is(err, errCut) {
		t.Errorf("ended with %v", err)
	}
}
