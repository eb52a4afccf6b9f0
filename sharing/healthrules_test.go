package sharing

import (
	"testing"
	"time"
)

func TestQuiet(t *testing.T) {
	rules := HealthRules{QuietTime: time.Minute, MaxQuietTime: 5 * time.Minute}
	for times, want := range map[int]time.Duration{
		-1: 0, 0: 0, 1: time.Minute, 2: 2 * time.Minute, 3: 4 * time.Minute, 4: 5 * time.Minute, 1000: 5 * time.Minute,
	} {
		if got := rules.Quiet(times); got != want {
			t.Errorf("quiet time of %d times is %v, want %v", times, got, want)
		}
	}
	rules.QuietTime = 10 * time.Minute
	if got := rules.Quiet(1); got != rules.MaxQuietTime {
		t.Errorf("quiet time above the longest is %v", got)
	}
}

// TestXIDs holds one XID of each group of the table, and that no caller can
// change another's.
func TestXIDs(t *testing.T) {
	rules := DefaultHealthRules()
	for code, want := range map[uint64]ErrorAction{
		13: IgnoreError, 31: IgnoreError, 43: IgnoreError, 45: IgnoreError, 68: IgnoreError, 109: IgnoreError,
		63: IgnoreError, 69: IgnoreError, 92: IgnoreError,
		74: SuspectError, 94: SuspectError, 145: SuspectError, 154: SuspectError,
		48: FatalError, 64: FatalError, 79: FatalError, 95: FatalError, 119: FatalError, 120: FatalError, 140: FatalError, 143: FatalError,
		39: SuspectError, 100000: SuspectError,
	} {
		if got := rules.XID(code); got != want {
			t.Errorf("XID %d is %s, want %s", code, got, want)
		}
	}
	rules.XIDs[79] = IgnoreError
	if got := DefaultHealthRules().XID(79); got != FatalError {
		t.Errorf("XID 79 is %s after a caller changed its copy", got)
	}
}
