package api

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

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
	config *rest.Config
	policy *policy.Node
	// applies is called with what comes into force; nil for nobody.
	applies func(configs.Selected)
	stop    func()

	mu sync.Mutex
	// applied are the names and generations in force one after another, at when
	// the last of them came; rejected is why the wanted one is not in force, "" if
	// it is.
	applied  []string
	at       time.Time
	rejected string
}

// follow starts a policy for the named Node.
func (s *server) follow(t *testing.T, node, token string, change func(*policy.Node)) *follower {
	t.Helper()
	return s.followBy(t, node, token, func(f *follower) {
		if change != nil {
			change(f.policy)
		}
	})
}

// followBy is follow with a follower that is changed before it starts.
func (s *server) followBy(t *testing.T, node, token string, change func(*follower)) *follower {
	t.Helper()
	f := &follower{}
	f.config = f.into(s.config(token))
	api, err := policy.NewAPI(f.config)
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
	change(f)
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
		f.applied, f.at = append(f.applied, next), time.Now()
		if f.applies != nil {
			f.applies(selected)
		}
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

// followTimeout covers two waits of a node that had no API server for long, up
// to 45 s each, and requests to a busy one that time out between them.
const followTimeout = 3 * time.Minute

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
	await(t, followTimeout, inForce+" in force, rejected: "+rejected, func() bool {
		have, why := f.state()
		return have == inForce && (rejected == "") == (why == "") && strings.Contains(why, rejected)
	})
}

// since is when the profile in force came into force.
func (f *follower) since() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at
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
