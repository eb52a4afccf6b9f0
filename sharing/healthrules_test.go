package sharing

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestQuietTimeAfter(t *testing.T) {
	rules := HealthRules{QuietTime: time.Minute, MaxQuietTime: 5 * time.Minute}
	for times, want := range map[int]time.Duration{
		-1: 0, 0: 0, 1: time.Minute, 2: 2 * time.Minute, 3: 4 * time.Minute, 4: 5 * time.Minute, 1000: 5 * time.Minute,
	} {
		if got := rules.QuietTimeAfter(times); got != want {
			t.Errorf("quiet time of %d times is %v, want %v", times, got, want)
		}
	}
	rules.QuietTime = 10 * time.Minute
	if got := rules.QuietTimeAfter(1); got != rules.MaxQuietTime {
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

// TestXIDsOfWholeGPU checks that an XID concerns the whole GPU when only a reset ends it, as
// a reset takes all partitions, or when it is about links; but not 94, which is contained.
func TestXIDsOfWholeGPU(t *testing.T) {
	for code, action := range DefaultHealthRules().XIDs {
		if want := action != IgnoreError && code != 94; XIDOfWholeGPU(code) != want {
			t.Errorf("XID %d, which is %s, is the whole GPU's: %t", code, action, !want)
		}
		if XIDMeaning(code) == XIDMeaning(39) {
			t.Errorf("XID %d means nothing", code)
		}
	}
	if XIDOfWholeGPU(39) || !strings.Contains(XIDMeaning(39), "catalogue") {
		t.Errorf("an unknown XID is the whole GPU's: %t; it means %q", XIDOfWholeGPU(39), XIDMeaning(39))
	}
}

// TestXIDTable checks that each line of the table is understood, and that none comes twice.
func TestXIDTable(t *testing.T) {
	entries := 0
	for line := range strings.Lines(xidTable) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		entries++
		f := strings.Fields(line)
		_, err := strconv.ParseUint(f[0], 10, 64)
		action := len(f) > 3 && slices.Contains([]ErrorAction{IgnoreError, SuspectError, FatalError}, ErrorAction(f[1]))
		if err != nil || !action || f[2] != "gpu" && f[2] != "named" {
			t.Errorf("not an XID with its action, scope and meaning: %q", line)
		}
	}
	if entries != len(xidRules) {
		t.Errorf("%d XIDs in %d lines", len(xidRules), entries)
	}
}

// TestXIDsAreDocumented compares the table of docs/health.md with the rules.
func TestXIDsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/health.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, begins := strings.Cut(string(text), "| XID | action | reason |\n|---|---|---|\n")
	table, _, ends := strings.Cut(table, "\n\n")
	if !begins || !ends {
		t.Fatal("docs/health.md has no table of XIDs")
	}
	want := DefaultHealthRules()
	documented := make(map[uint64]ErrorAction)
	for row := range strings.Lines(table) {
		cells := strings.Split(row, " | ")
		codes, action := strings.TrimPrefix(cells[0], "| "), ErrorAction(cells[1])
		if codes == "all others" {
			if action != want.OtherXIDs {
				t.Errorf("docs/health.md says %s of all other XIDs, the rules %s", action, want.OtherXIDs)
			}
			continue
		}
		for entry := range strings.SplitSeq(codes, ", ") {
			first, last, isRange := strings.Cut(entry, "–")
			if !isRange {
				last = first
			}
			low, err := strconv.ParseUint(first, 10, 64)
			high, err2 := strconv.ParseUint(last, 10, 64)
			if err != nil || err2 != nil {
				t.Fatalf("docs/health.md: %q is no XID: %s", entry, row)
			}
			for code := low; code <= high; code++ {
				if _, twice := documented[code]; twice {
					t.Errorf("docs/health.md has XID %d twice", code)
				}
				documented[code] = action
			}
		}
	}
	if diff := cmp.Diff(want.XIDs, documented); diff != "" {
		t.Errorf("docs/health.md (-rules +document):\n%s", diff)
	}
}
