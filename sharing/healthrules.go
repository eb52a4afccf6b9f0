package sharing

import (
	"cmp"
	_ "embed" // for xidTable
	"strconv"
	"strings"
	"time"
)

// HealthRules say what takes a unit out of use, and for how long. Defaults are filled in.
type HealthRules struct {
	// XIDs says what each XID means, OtherXIDs what all the others do.
	XIDs      map[uint64]ErrorAction
	OtherXIDs ErrorAction
	// DoubleBitECC is what the event of an uncorrectable memory error means. An XID
	// that comes with it says how bad it is.
	DoubleBitECC ErrorAction
	// RowRemap says that a memory row which waits for a reset to be remapped is a fault.
	// Work goes on unharmed (nvml.h, nvmlDeviceGetRemappedRows).
	RowRemap bool
	// QuietTime is how long a suspect unit must be without errors until it is healthy
	// again. It doubles each time the unit fails again, up to MaxQuietTime.
	QuietTime, MaxQuietTime time.Duration
	// TemperatureLimit is the core temperature in degrees Celsius above which a GPU is
	// faulty; it must cool down to TemperatureSafe before it no longer is. There are
	// two so that a GPU near the limit does not change with every reading.
	TemperatureLimit, TemperatureSafe int
}

// DefaultHealthRules are those of a profile without a health section, as a fresh copy.
func DefaultHealthRules() HealthRules {
	actions := map[uint64]ErrorAction{}
	for code, rule := range xidRules {
		actions[code] = rule.action
	}
	return HealthRules{
		XIDs: actions, OtherXIDs: SuspectError, DoubleBitECC: SuspectError,
		QuietTime: 5 * time.Minute, MaxQuietTime: time.Hour,
		TemperatureLimit: 90, TemperatureSafe: 85,
	}
}

// XID is what the XID means.
func (r HealthRules) XID(code uint64) ErrorAction {
	if action, known := r.XIDs[code]; known {
		return action
	}
	return r.OtherXIDs
}

// QuietTimeAfter is how long a unit must be without errors after failing so often in a row.
func (r HealthRules) QuietTimeAfter(times int) time.Duration {
	if times <= 0 {
		return 0
	}
	quiet := r.QuietTime
	for ; times > 1 && quiet < r.MaxQuietTime; times-- {
		quiet *= 2
	}
	return min(quiet, r.MaxQuietTime)
}

// ErrorAction is what an error that a GPU reports means for the affected units.
type ErrorAction string

const (
	// IgnoreError counts the error and does nothing else.
	IgnoreError ErrorAction = "ignore"
	// SuspectError withdraws the unit until it has been without errors for a time.
	SuspectError ErrorAction = "suspect"
	// FatalError withdraws the unit until its GPU is reset or an operator clears it.
	FatalError ErrorAction = "fatal"
)

// xidTable says of each XID what it means unless the profile says otherwise, and how the
// columns are decided.
//
//go:embed xids.txt
var xidTable string

// xidRule is a line of xidTable.
type xidRule struct {
	action   ErrorAction
	wholeGPU bool
	meaning  string
}

var xidRules = readXIDs(xidTable)

func readXIDs(table string) map[uint64]xidRule {
	rules := map[uint64]xidRule{}
	for line := range strings.Lines(table) {
		if code, err := strconv.ParseUint(strings.Fields(line)[0], 10, 64); err == nil {
			f := strings.Fields(line)
			rules[code] = xidRule{action: ErrorAction(f[1]), wholeGPU: f[2] == "gpu", meaning: strings.Join(f[3:], " ")}
		}
	}
	return rules
}

// XIDOfWholeGPU says that the XID concerns the whole GPU even when its event names one of
// the GPU's instances.
func XIDOfWholeGPU(code uint64) bool { return xidRules[code].wholeGPU }

// XIDMeaning is what the XID says, for people.
func XIDMeaning(code uint64) string {
	return cmp.Or(xidRules[code].meaning, "an error that only NVIDIA's catalogue of XIDs explains")
}
