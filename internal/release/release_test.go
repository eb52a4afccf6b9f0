package release

import (
	"strings"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nodereport"
)

// TestTryPause checks that failures are retried less and less often, but forever.
func TestTryPause(t *testing.T) {
	t.Parallel()
	for failures, want := range map[int]time.Duration{
		1:   time.Second,
		2:   2 * time.Second,
		7:   64 * time.Second,
		8:   64 * time.Second,
		1e6: 64 * time.Second,
	} {
		if got := tryPause(failures); got != want {
			t.Errorf("after %d failures: %s, want %s", failures, got, want)
		}
	}
}

// TestMIGResets checks which GPUs may be reset for their MIG mode, and when.
func TestMIGResets(t *testing.T) {
	t.Parallel()
	now := time.Now()
	layouts := []nodereport.GPULayout{
		{GPU: "applied", State: nodereport.LayoutApplied, Resettable: true},
		{GPU: "blocked", State: nodereport.LayoutBlocked, Resettable: true},
		{GPU: "one", State: nodereport.LayoutResetRequired, Resettable: true},
		{GPU: "reboot", State: nodereport.LayoutResetRequired},
		{GPU: "two", State: nodereport.LayoutResetRequired, Resettable: true},
	}
	ago := func(gpu, problem string, ago time.Duration) Release {
		return Release{GPU: gpu, State: Restored, Until: now.Add(-ago), Problem: problem}
	}
	for _, test := range []struct {
		name     string
		releases []Release
		want     string
	}{
		{"those that wait for no more than a reset", nil, "one two"},
		{"another GPU is released", []Release{{GPU: "applied", State: Released, Until: now.Add(time.Hour)}}, ""},
		{"another one was reset", []Release{ago("applied", "", time.Second)}, "one two"},
		{"another one was refused", []Release{ago("applied", "in use", 9*time.Minute)}, ""},
		{"that was long ago", []Release{ago("applied", "in use", 11*time.Minute)}, "one two"},
		{"it had no effect", []Release{ago("one", "", time.Minute)}, ""},
		{"it may have by now", []Release{ago("one", "", time.Hour)}, "one two"},
	} {
		waiting, gpus := migResets(layouts, test.releases, now)
		if got := strings.Join(gpus, " "); got != test.want || !waiting {
			t.Errorf("%s: %q, want %q; waiting %t", test.name, got, test.want, waiting)
		}
	}
	if waiting, gpus := migResets(layouts[:2], nil, now); waiting || gpus != nil {
		t.Errorf("nothing waits: %v %t", gpus, waiting)
	}
}
