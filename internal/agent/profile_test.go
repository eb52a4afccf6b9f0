package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// fakeKeeper has the profile of a last run, and remembers what it is to keep.
type fakeKeeper struct {
	last *configs.Selected
	mu   sync.Mutex
	kept []string
}

func (k *fakeKeeper) Kept() (configs.Selected, bool) {
	if k.last == nil {
		return configs.Selected{}, false
	}
	return *k.last, true
}

func (k *fakeKeeper) Keep(s configs.Selected) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if n := len(k.kept); n == 0 || k.kept[n-1] != s.Generation {
		k.kept = append(k.kept, s.Generation)
	}
}

func (k *fakeKeeper) list() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return fmt.Sprint(k.kept)
}

func generations(replicas ...int) string {
	var list []string
	for _, r := range replicas {
		list = append(list, configs.Generation(profile(r)))
	}
	return fmt.Sprint(list)
}

func TestLastRunsProfileServes(t *testing.T) {
	last := configs.Config{Profile: profile(3)}.Select("ConfigMap gpu/profiles", "a", nil)
	for _, test := range []struct {
		name string
		err  error
	}{
		{"a broken profile", errors.New("line 3")},
		{"one that is not known", fmt.Errorf("node n1: %w", configs.ErrPending)},
	} {
		t.Run(test.name, func(t *testing.T) {
			keeper := &fakeKeeper{last: &last}
			r := newRig(t, func(r *rig) {
				r.policy = fakePolicy{newInput(profile(4), test.err)}
				r.options.Policy, r.options.Keeper = r.policy, keeper
			})
			r.awaitBody("/readyz", 200, "ok")
			if got := r.agent.state.Load().plan.Resources[0]; len(got.Devices) != 6 {
				t.Errorf("%d devices, want those of the last run's profile", len(got.Devices))
			}
			if got := keeper.list(); got != "[]" {
				t.Errorf("kept %s, which was there", got)
			}
			r.policy.set(profile(5), nil)
			r.awaitBody("/plan", 200, `"replicas": 5`)
			if got, want := keeper.list(), generations(5); got != want {
				t.Errorf("kept %s, want %s", got, want)
			}
			r.policy.set(profile(6), errors.New("line 4"))
			r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
			if got, want := keeper.list(), generations(5); got != want {
				t.Errorf("kept %s, want %s", got, want)
			}
		})
	}
}

// A program that stands by has rejected the profile before it may serve, and
// nothing changes when it may. Found by test/soak. With boards that it may cut, it
// has to know what it serves before it registers.
func TestLastRunsProfileServesAfterStandby(t *testing.T) {
	last := configs.Config{Profile: profile(3)}.Select("ConfigMap gpu/profiles", "a", nil)
	for _, cuts := range []bool{false, true} {
		t.Run(fmt.Sprint("cuts ", cuts), func(t *testing.T) {
			r := newRig(t, func(r *rig) {
				r.policy = fakePolicy{newInput(profile(4), errors.New("line 3"))}
				r.options.Policy, r.options.Keeper = r.policy, &fakeKeeper{last: &last}
				if cuts {
					sim, err := simnode.New("a30x2")
					if err != nil {
						t.Fatal(err)
					}
					r.options.Partitioner = nvml.NewPartitioner(sim, nvml.NewNode(sim, nvml.Options{Logger: r.options.Logger}).Quiet)
					r.options.Journal = &diskless{}
				}
				r.options.Claim = func(ctx context.Context, standBy func()) error {
					standBy()
					for tick := time.NewTicker(time.Millisecond); ctx.Err() == nil; <-tick.C {
						if s := r.agent.state.Load(); s.rejected != nil && s.gpus != nil {
							tick.Stop()
							return nil
						}
					}
					return ctx.Err()
				}
			})
			r.shows(6)
		})
	}
}

// A profile that was good while the program stood by is the last good one, and
// is kept although the wanted one is bad by the time the program serves. Found by
// test/soak.
func TestKeepsWhatWasGoodWhileItStoodBy(t *testing.T) {
	keeper, claimed := &fakeKeeper{}, make(chan struct{})
	r := newRig(t, func(r *rig) {
		r.options.Keeper = keeper
		r.options.Claim = func(ctx context.Context, standBy func()) error {
			standBy()
			select {
			case <-claimed:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
	})
	r.awaitBody("/plan", 200, `"replicas": 4`)
	r.policy.set(profile(5), errors.New("line 3"))
	r.awaitBody("/metrics", 200, "virgate_config_last_apply_successful 0")
	if got := keeper.list(); got != "[]" {
		t.Errorf("kept %s by a program that stands by", got)
	}
	close(claimed)
	r.shows(8)
	if got, want := keeper.list(), generations(4); got != want {
		t.Errorf("kept %s, want %s", got, want)
	}
}
