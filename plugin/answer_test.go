package plugin_test

import (
	"context"
	"go/parser"
	"go/token"
	"log/slog"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// stuck is a store and a log that, once stopped, do not answer until they are
// freed.
type stuck struct {
	slog.Handler
	stopped atomic.Bool
	freed   chan struct{}
	// saved and logged say that a call hangs.
	saved, logged chan struct{}
}

func (s *stuck) wait(hit chan struct{}) {
	if s.stopped.Load() {
		select {
		case hit <- struct{}{}:
		default:
		}
		<-s.freed
	}
}

func (s *stuck) Enabled(context.Context, slog.Level) bool { return true }
func (s *stuck) WithAttrs([]slog.Attr) slog.Handler       { return s }

func (s *stuck) Handle(context.Context, slog.Record) error {
	s.wait(s.logged)
	return nil
}

func (s *stuck) Load() (plugin.Lists, error) { return nil, nil }

func (s *stuck) Save(plugin.Lists) error {
	s.wait(s.saved)
	return nil
}

// TestAllocateWaitsForNobody has everything hang that the program waits for but
// the kubelet's call itself: no grant and no refusal waits for it.
func TestAllocateWaitsForNobody(t *testing.T) {
	s := &stuck{Handler: slog.DiscardHandler, freed: make(chan struct{}), saved: make(chan struct{}, 1), logged: make(chan struct{}, 1)}
	defer close(s.freed)
	client, manager := dialOptions(t, plugin.Options{Logger: slog.New(s), Store: s}, plan(gpu, 2, 2))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := client.Allocate(ctx, allocate("GPU-0001::0")); err != nil {
		t.Fatal(err)
	}
	s.stopped.Store(true)
	// More refusals than can wait for the log.
	for range 200 {
		if _, err := client.Allocate(ctx, allocate("GPU-0009::0")); status.Code(err) != codes.NotFound {
			t.Fatalf("error is %v", err)
		}
	}
	manager.SetHost(plugin.Host{})
	manager.Apply(by(plan(gpu, 3, 2), sharing.CDICRI))
	for _, hit := range []chan struct{}{s.logged, s.saved} {
		select {
		case <-hit:
		case <-ctx.Done():
			t.Fatal("nothing hangs")
		}
	}
	for range 20 {
		if _, err := client.Allocate(ctx, allocate("GPU-0001::0")); err != nil {
			t.Fatal(err)
		}
	}
}

// TestGrantsTouchNothing holds that what makes an answer has no means to do I/O
// or to take a lock.
func TestGrantsTouchNothing(t *testing.T) {
	allowed := map[string]bool{}
	for _, path := range []string{
		"cmp", "crypto/sha256", "encoding/hex", "slices", "strings", "time",
		"google.golang.org/grpc/codes", "google.golang.org/grpc/status", "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1",
		"github.com/virgate/virgate/sharing",
	} {
		allowed[path] = true
	}
	for _, name := range []string{"answer.go", "grant.go", "host.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range file.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil || !allowed[path] {
				t.Errorf("%s imports %s", name, spec.Path.Value)
			}
		}
	}
}
