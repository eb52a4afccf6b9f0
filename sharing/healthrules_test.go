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

func TestRecoverAfterFailures(t *testing.T) {
	rules := HealthRules{RecoverAfter: time.Minute, MaxRecoverAfter: 5 * time.Minute}
	for times, want := range map[int]time.Duration{
		-1: 0, 0: 0, 1: time.Minute, 2: 2 * time.Minute, 3: 4 * time.Minute, 4: 5 * time.Minute, 1000: 5 * time.Minute,
	} {
		if got := rules.RecoverAfterFailures(times); got != want {
			t.Errorf("recovery delay of %d times is %v, want %v", times, got, want)
		}
	}
	rules.RecoverAfter = 10 * time.Minute
	if got := rules.RecoverAfterFailures(1); got != rules.MaxRecoverAfter {
		t.Errorf("recovery delay above the longest is %v", got)
	}
}

// TestXIDs checks an XID of each group of the table, and that changing one copy of the rules does not change
// others.
func TestXIDs(t *testing.T) {
	rules := DefaultHealthRules()
	for code, want := range map[uint64]ErrorAction{
		13: IgnoreError, 31: IgnoreError, 43: IgnoreError, 45: IgnoreError, 68: IgnoreError,
		63: IgnoreError, 69: IgnoreError, 92: IgnoreError,
		74: SuspectError, 94: SuspectError, 145: SuspectError, 154: SuspectError,
		48: FatalError, 64: FatalError, 79: FatalError, 109: FatalError, 95: FatalError, 119: FatalError, 120: FatalError, 140: FatalError, 143: FatalError,
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

// TestXIDsOfWholeGPU checks that an XID concerns the whole GPU if only a reset ends it, as a reset affects all
// partitions, or if it is about links; but not 94, which is contained.
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

// TestXIDTable checks that each line of the table is valid, and that no XID is repeated.
func TestXIDTable(t *testing.T) {
	entries := 0
	for line := range strings.Lines(xidTable) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		entries++
		f := strings.Fields(line)
		_, err := strconv.ParseUint(f[0], 10, 64)
		action := len(f) > 3 && slices.Contains([]ErrorAction{IgnoreError, SuspectError, FatalError, "driver"}, ErrorAction(f[1]))
		if err != nil || !action || f[2] != "gpu" && f[2] != "named" {
			t.Errorf("not an XID with its action, scope and meaning: %q", line)
		}
	}
	if entries != len(xidRules) {
		t.Errorf("%d XIDs in %d lines", len(xidRules), entries)
	}
}

// TestXIDsFollowTheCatalogue compares the list with NVIDIA's catalogue: the immediate action of each XID that can
// occur on an A100 or later, or the action at the end of its workflow.
func TestXIDsFollowTheCatalogue(t *testing.T) {
	rules := DefaultHealthRules()
	for _, bucket := range []struct {
		immediate string
		want      ErrorAction
		codes     []uint64
	}{
		{"IGNORE", IgnoreError, []uint64{14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161}},
		{"WORKFLOW_NVLINK5_ERR, always IGNORE", IgnoreError, []uint64{147, 148}},
		{"RESTART_APP, then CHECK_APP", IgnoreError, []uint64{11, 25, 32, 69, 80}},
		{"RESTART_APP, then WORKFLOW_XID_13 or WORKFLOW_XID_31", IgnoreError, []uint64{13, 31}},
		{"RESTART_APP, ignored by NVIDIA's plugin", IgnoreError, []uint64{68}},
		{"WORKFLOW_XID_45", IgnoreError, []uint64{45}},
		{"none, and no reset is required", IgnoreError, []uint64{162, 163, 164, 165}},
		{"RESTART_APP", SuspectError, []uint64{
			8, 39, 40, 41, 60, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, 94, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105,
			126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139,
		}},
		{"WORKFLOW_NVLINK_ERR or WORKFLOW_NVLINK5_ERR", SuspectError, []uint64{74, 144, 145, 146, 149}},
		{"UPDATE_SWFW, CHECK_UVM or XID_154", SuspectError, []uint64{78, 159, 154}},
		{"none", SuspectError, []uint64{166, 167, 168, 169, 170, 171, 172}},
		{"RESET_GPU", FatalError, []uint64{46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}},
		{"WORKFLOW_XID_48, alone RESET_GPU", FatalError, []uint64{48}},
		{"WORKFLOW_NVLINK5_ERR, always RESET_GPU", FatalError, []uint64{150}},
		{"RESTART_BM or RESTART_VM", FatalError, []uint64{79, 151}},
		{"CHECK_MECHANICALS or CONTACT_SUPPORT", FatalError, []uint64{54, 142}},
	} {
		for _, code := range bucket.codes {
			if got := rules.XID(code); got != bucket.want {
				t.Errorf("XID %d, %s, is %s, want %s", code, bucket.immediate, got, bucket.want)
			}
			delete(rules.XIDs, code)
		}
	}
	if len(rules.XIDs) > 0 {
		t.Errorf("not in the catalogue: %v", rules.XIDs)
	}
	if diff := cmp.Diff(map[uint64]bool{109: true}, rules.LeftToDriver); diff != "" {
		t.Errorf("left to the driver (-want +got):\n%s", diff)
	}
}

// TestXIDsAreDocumented compares the table of docs/reference/health.md with the rules.
func TestXIDsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../docs/reference/health.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, begins := strings.Cut(string(text), "| XID | action | reason |\n|---|---|---|\n")
	table, _, ends := strings.Cut(table, "\n\n")
	if !begins || !ends {
		t.Fatal("docs/reference/health.md has no table of XIDs")
	}
	want := DefaultHealthRules()
	documented := make(map[uint64]ErrorAction)
	for row := range strings.Lines(table) {
		cells := strings.Split(row, " | ")
		codes, action := strings.TrimPrefix(cells[0], "| "), ErrorAction(cells[1])
		if codes == "all others" {
			if action != want.OtherXIDs {
				t.Errorf("docs/reference/health.md says %s of all other XIDs, the rules %s", action, want.OtherXIDs)
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
				t.Fatalf("docs/reference/health.md: %q is no XID: %s", entry, row)
			}
			for code := low; code <= high; code++ {
				if _, twice := documented[code]; twice {
					t.Errorf("docs/reference/health.md has XID %d twice", code)
				}
				documented[code] = action
			}
		}
	}
	if diff := cmp.Diff(want.XIDs, documented); diff != "" {
		t.Errorf("docs/reference/health.md (-rules +document):\n%s", diff)
	}
}
