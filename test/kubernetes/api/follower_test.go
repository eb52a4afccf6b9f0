package api

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/policy"
)

const (
	namespace, configMap = "gpu", "profiles"
	label                = "nvidia.com/device-plugin.config"
)

// follower is a node's policy, and what it would have had applied.
type follower struct {
	counter
	policy *policy.Node
	stop   func()

	mu sync.Mutex
	// applied are the names and generations in force one after another, rejected
	// is why the wanted one is not, "" if it is.
	applied  []string
	rejected string
}

// follow starts a policy for the named Node.
func (s *server) follow(t *testing.T, node, token string, change func(*policy.Node)) *follower {
	t.Helper()
	f := &follower{}
	api, err := policy.NewAPI(f.into(s.config(token)))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	started, err := configs.Parse("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.policy = &policy.Node{
		Shelf: policy.NewConfigMap(api, namespace, configMap, log), Labels: policy.NewLabels(api, node, label, log),
		Started: started.Process,
	}
	if change != nil {
		change(f.policy)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.policy.Watch(ctx, f.look) }()
	f.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(10 * time.Second):
			t.Error("the policy does not end")
		}
	})
	t.Cleanup(f.stop)
	return f
}

// look does what the agent's loop does.
func (f *follower) look() {
	f.mu.Lock()
	defer f.mu.Unlock()
	selected, err := f.policy.Profile()
	f.rejected = ""
	if err != nil {
		f.rejected = err.Error()
		return
	}
	next := selected.Name + "@" + selected.Generation
	if len(f.applied) == 0 || f.applied[len(f.applied)-1] != next {
		f.applied = append(f.applied, next)
	}
}

// state returns the profile in force as name@generation, and why the wanted one
// is not.
func (f *follower) state() (inForce, rejected string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.applied) > 0 {
		inForce = f.applied[len(f.applied)-1]
	}
	return inForce, f.rejected
}

// awaits waits until the profile is in force, "" for any, and the reason for
// rejecting another one, "" for none, holds the text.
func (f *follower) awaits(t *testing.T, inForce, rejected string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			have, why := f.state()
			t.Logf("in force %q, rejected %q, requests %q", have, why, f.seen())
		}
	}()
	await(t, 60*time.Second, inForce+" in force, rejected: "+rejected, func() bool {
		have, why := f.state()
		return have == inForce && (rejected == "") == (why == "") && strings.Contains(why, rejected)
	})
}

func (f *follower) history() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.applied...)
}

// document offers every GPU so many times.
func document(replicas string) string {
	return "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: " + replicas + "}]}}\n"
}

// is names a profile as state does.
func is(t *testing.T, name, text string) string {
	t.Helper()
	config, err := configs.Parse("", []byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	return name + "@" + configs.Generation(config.Profile)
}
