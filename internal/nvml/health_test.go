package nvml

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virgate/virgate/sharing"
)

// The observations of the tables below.
var (
	xid94     = observation{kind: reportedSuspect, findings: []finding{{cause: sharing.CauseXID, text: "XID 94", xid: 94}}}
	ecc       = observation{kind: reportedSuspect, findings: []finding{{cause: sharing.CauseECC, text: "double-bit ECC error"}}}
	xid79     = observation{kind: reportedFatal, findings: []finding{{cause: sharing.CauseXID, text: "XID 79", xid: 79}}}
	suspect79 = observation{kind: reportedSuspect, findings: []finding{{cause: sharing.CauseXID, text: "XID 79", xid: 79}}}
	kept79    = observation{kind: reportedFatal, findings: []finding{{cause: sharing.CauseRestart, text: "XID 79", xid: 79}}}
	isHot     = observation{kind: probed, findings: []finding{{cause: sharing.CauseTemperature, text: "hot"}}}
	isLost    = observation{kind: probed, findings: []finding{lostFinding()}}
	isFine    = observation{kind: probed}
	isReset   = observation{kind: wasReset}
	isClear   = observation{kind: wasCleared}
)

// testRules have a recovery delay of a minute, and of four at most.
func testRules() sharing.HealthRules {
	rules := sharing.DefaultHealthRules()
	rules.RecoverAfter, rules.MaxRecoverAfter = time.Minute, 4*time.Minute
	return rules
}

// step is an observation so many seconds after the start, and the unit's state after it.
type step struct {
	at    int
	saw   observation
	state sharing.HealthState
	fault string
}

// TestUnitHealth has every transition of a unit's health, and the inventory's reason in between.
func TestUnitHealth(t *testing.T) {
	const (
		healthy, suspect, unhealthy, recovering = sharing.Healthy, sharing.Suspect, sharing.Unhealthy, sharing.Recovering
	)
	tests := []struct {
		name  string
		steps []step
		// cause is the cause of the last change.
		cause sharing.HealthCause
	}{
		{"nothing happens", []step{{10, isFine, healthy, ""}, {20, isReset, healthy, ""}, {30, isClear, healthy, ""}}, ""},
		{"suspect until quiet with probes passing", []step{
			{10, xid94, suspect, "XID 94"},
			{20, isFine, suspect, "XID 94"},
			{69, isFine, suspect, "XID 94"},
			{70, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"quiet counts from the last error", []step{
			{10, xid94, suspect, "XID 94"},
			{60, ecc, suspect, "XID 94, double-bit ECC error"},
			{110, xid94, suspect, "XID 94, double-bit ECC error"},
			{169, isFine, suspect, "XID 94, double-bit ECC error"},
			{170, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"suspect and cleared", []step{{10, xid94, suspect, "XID 94"}, {20, isClear, recovering, "recovering from XID 94"}, {30, isFine, healthy, ""}}, sharing.CauseProbe},
		{"suspect and reset", []step{{10, xid94, suspect, "XID 94"}, {20, isReset, recovering, "recovering from XID 94"}, {30, isFine, healthy, ""}}, sharing.CauseProbe},
		{"suspect and a fatal error", []step{{10, xid94, suspect, "XID 94"}, {20, xid79, unhealthy, "XID 79, XID 94"}}, sharing.CauseXID},
		{"suspect and a failing probe", []step{
			{10, xid94, suspect, "XID 94"},
			{20, isHot, unhealthy, "XID 94, hot"},
			{30, isFine, recovering, "recovering from XID 94, hot"},
			{89, isFine, recovering, "recovering from XID 94, hot"},
			{90, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"a fatal error outlasts every probe", []step{
			{10, xid79, unhealthy, "XID 79"},
			{20, isFine, unhealthy, "XID 79"},
			{1e6, isFine, unhealthy, "XID 79"},
		}, sharing.CauseXID},
		{"a fatal error and a failing probe", []step{
			{10, xid79, unhealthy, "XID 79"},
			{20, isLost, unhealthy, "XID 79, lost"},
			{30, isFine, unhealthy, "XID 79"},
		}, sharing.CauseXID},
		{"a fatal error and a reset", []step{{10, xid79, unhealthy, "XID 79"}, {20, isReset, recovering, "recovering from XID 79"}, {30, isFine, healthy, ""}}, sharing.CauseProbe},
		{"a fatal error and an operator's word", []step{{10, xid79, unhealthy, "XID 79"}, {20, isClear, recovering, "recovering from XID 79"}, {30, isFine, healthy, ""}}, sharing.CauseProbe},
		{"an operator's word against a probe", []step{
			{10, xid79, unhealthy, "XID 79"},
			{20, isHot, unhealthy, "XID 79, hot"},
			{30, isClear, unhealthy, "hot"},
			{40, isFine, recovering, "recovering from hot"},
			{50, isFine, healthy, ""},
		}, sharing.CauseProbe},
		{"a fatal error that an earlier run kept", []step{{10, kept79, unhealthy, "XID 79"}, {20, isFine, unhealthy, "XID 79"}}, sharing.CauseRestart},
		{"an earlier run's fatal error again", []step{{10, kept79, unhealthy, "XID 79"}, {20, xid79, unhealthy, "XID 79"}}, sharing.CauseRestart},
		{"an error that the rules call fatal since", []step{{10, suspect79, suspect, "XID 79"}, {20, xid79, unhealthy, "XID 79"}}, sharing.CauseXID},
		{"a failing probe and its end", []step{
			{10, isHot, unhealthy, "hot"},
			{20, isHot, unhealthy, "hot"},
			{30, isFine, recovering, "recovering from hot"},
			{40, isFine, healthy, ""},
		}, sharing.CauseProbe},
		{"lost and back", []step{{10, isLost, unhealthy, "lost"}, {20, isReset, recovering, "recovering from lost"}, {30, isFine, healthy, ""}}, sharing.CauseProbe},
		{"an error while unhealthy", []step{{10, isHot, unhealthy, "hot"}, {20, xid94, unhealthy, "XID 94, hot"}}, sharing.CauseTemperature},
		{"an error while recovering", []step{
			{10, isHot, unhealthy, "hot"},
			{20, isFine, recovering, "recovering from hot"},
			{25, xid94, suspect, "XID 94"},
			{144, isFine, suspect, "XID 94"},
			{145, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"a fatal error while recovering", []step{{10, isHot, unhealthy, "hot"}, {20, isFine, recovering, "recovering from hot"}, {25, xid79, unhealthy, "XID 79"}}, sharing.CauseXID},
		{"a failing probe while recovering", []step{{10, xid79, unhealthy, "XID 79"}, {20, isReset, recovering, "recovering from XID 79"}, {30, isHot, unhealthy, "hot"}}, sharing.CauseTemperature},
		{"a reset while recovering", []step{
			{10, xid94, suspect, "XID 94"},
			{20, isHot, unhealthy, "XID 94, hot"},
			{30, isFine, recovering, "recovering from XID 94, hot"},
			{40, isReset, recovering, "recovering from XID 94, hot"},
			{50, isFine, healthy, ""},
		}, sharing.CauseProbe},
		{"the recovery delay doubles when it flaps, up to the longest", []step{
			{0, xid94, suspect, "XID 94"}, {60, isFine, healthy, ""},
			{70, xid94, suspect, "XID 94"}, {189, isFine, suspect, "XID 94"}, {190, isFine, healthy, ""},
			{200, xid94, suspect, "XID 94"}, {439, isFine, suspect, "XID 94"}, {440, isFine, healthy, ""},
			{450, xid94, suspect, "XID 94"}, {689, isFine, suspect, "XID 94"}, {690, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"flapping is forgotten after the longest recovery delay", []step{
			{0, xid94, suspect, "XID 94"}, {60, isFine, healthy, ""},
			{70, xid94, suspect, "XID 94"}, {190, isFine, healthy, ""},
			{430, xid94, suspect, "XID 94"}, {490, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"flapping is forgotten with a reset", []step{
			{0, xid94, suspect, "XID 94"}, {60, isFine, healthy, ""},
			{70, isReset, healthy, ""},
			{80, xid94, suspect, "XID 94"}, {140, isFine, healthy, ""},
		}, sharing.CauseQuiet},
		{"a probe that flaps must be quiet as well", []step{
			{0, isHot, unhealthy, "hot"}, {10, isFine, recovering, "recovering from hot"}, {20, isFine, healthy, ""},
			{30, isHot, unhealthy, "hot"}, {40, isFine, recovering, "recovering from hot"},
			{99, isFine, recovering, "recovering from hot"}, {100, isFine, healthy, ""},
		}, sharing.CauseQuiet},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			begin := time.Unix(1000, 0)
			h := newUnitHealth(begin.Add(-time.Second))
			for _, s := range test.steps {
				before := h
				h = h.observe(s.saw, testRules(), begin.Add(time.Duration(s.at)*time.Second))
				if h.state != s.state || h.health().Reason != s.fault {
					t.Fatalf("at %d s: %s, fault %q, want %s, %q", s.at, h.state, h.health().Reason, s.state, s.fault)
				}
				if changed := h.since != before.since; changed != (h.state != before.state) {
					t.Errorf("at %d s: %s since %v, before %s since %v", s.at, h.state, h.since, before.state, before.since)
				}
			}
			if h.cause != test.cause {
				t.Errorf("the last change is because of %q, want %q", h.cause, test.cause)
			}
		})
	}
}

// TestUnitHealthIsAValue checks that observe changes only its result.
func TestUnitHealthIsAValue(t *testing.T) {
	begin := time.Unix(1000, 0)
	h := newUnitHealth(begin).observe(xid94, testRules(), begin)
	copied := h
	copied.suspicions = append([]finding(nil), h.suspicions...)
	for _, o := range []observation{xid94, ecc, xid79, isHot, isFine, isReset, isClear} {
		_ = h.observe(o, testRules(), begin.Add(time.Hour))
		if diff := cmp.Diff(copied, h, cmp.AllowUnexported(unitHealth{}, finding{})); diff != "" {
			t.Fatalf("observing %v changed (-before +after):\n%s", o, diff)
		}
	}
}

func TestClassify(t *testing.T) {
	tests := []struct {
		name  string
		event Event
		text  string
		want  sharing.ErrorAction
	}{
		{"application error", Event{Type: EventXIDCritical, Data: 13}, "XID 13", sharing.IgnoreError},
		{"contained error", Event{Type: EventXIDCritical, Data: 94}, "XID 94", sharing.SuspectError},
		{"off the bus", Event{Type: EventXIDCritical, Data: 79}, "XID 79", sharing.FatalError},
		{"XID that nobody knows", Event{Type: EventXIDCritical, Data: 1 << 40}, "XID 1099511627776", sharing.SuspectError},
		{"double-bit error", Event{Type: EventDoubleBitECC, Data: 3}, "double-bit ECC error", sharing.SuspectError},
		{"single-bit error", Event{Type: EventSingleBitECC, Data: 3}, "", sharing.IgnoreError},
		{"another type", Event{Type: 1 << 2, Data: 79}, "", sharing.IgnoreError},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			found, action := classify(test.event, sharing.DefaultHealthRules())
			if found.text != test.text || action != test.want {
				t.Errorf("%q is %s, want %q, %s", found.text, action, test.text, test.want)
			}
		})
	}
}

// TestExplain checks the explanation of a fault: the meaning of XIDs, also those kept by an earlier run, and when
// it ends.
func TestExplain(t *testing.T) {
	rules := sharing.HealthRules{RecoverAfter: time.Minute, MaxRecoverAfter: time.Hour, TemperatureSafe: 85}
	start := time.Date(2026, 11, 22, 23, 59, 30, 0, time.FixedZone("", 3600))
	tests := []struct {
		name  string
		steps []observation
		want  string
	}{
		{"healthy", nil, ""},
		{"suspect", []observation{xid94}, "an uncorrectable memory error, contained to one program; ends when it stays quiet until 23:00 UTC"},
		{"fatal", []observation{xid79}, "the GPU has fallen off the bus; ends with a reset of the GPU, or with virgate health clear"},
		{"fatal and suspect", []observation{xid79, xid94, isFine},
			"the GPU has fallen off the bus; an uncorrectable memory error, contained to one program; ends with a reset of the GPU, or with virgate health clear"},
		{"kept by an earlier run", []observation{kept79}, "the GPU has fallen off the bus; ends with a reset of the GPU, or with virgate health clear"},
		{"an XID in other words", []observation{{kind: reportedSuspect, findings: []finding{{cause: sharing.CauseXID, text: "error 94", xid: 94}}}},
			"an uncorrectable memory error, contained to one program; ends when it stays quiet until 23:00 UTC"},
		{"no XID", []observation{{kind: reportedSuspect, findings: []finding{{cause: sharing.CauseECC, text: "XID 94 or so"}}}}, "ends when it stays quiet until 23:00 UTC"},
		{"unknown", []observation{{kind: reportedSuspect, findings: []finding{{cause: sharing.CauseXID, text: "XID 12345", xid: 12345}}}},
			"an error that only NVIDIA's catalogue of XIDs explains; ends when it stays quiet until 23:00 UTC"},
		{"twice the same meaning", []observation{{kind: reportedFatal, findings: []finding{{cause: sharing.CauseXID, text: "XID 144", xid: 144}, {cause: sharing.CauseXID, text: "XID 145", xid: 145}}}},
			"an error of an NVLink; ends with a reset of the GPU, or with virgate health clear"},
		{"hot", []observation{{kind: probed, findings: []finding{{cause: sharing.CauseTemperature, text: "temperature above 90 °C"}}}}, "ends at 85 °C, it has 97 °C"},
		{"lost", []observation{isLost}, "ends with the next probe that finds nothing wrong"},
		{"cleared", []observation{xid79, isClear}, "ends with the next probe that finds nothing wrong"},
		{"found again and again", []observation{isHot, isFine, isHot, isFine}, "ends when it stays quiet until 23:00 UTC"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := newUnitHealth(start)
			for _, o := range test.steps {
				h = h.observe(o, rules, start)
			}
			if got := h.explain(97, rules.TemperatureSafe, rules); got != test.want {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// TestResetSince checks that a value that is unknown before or after is no evidence of a reset.
func TestResetSince(t *testing.T) {
	tests := []struct {
		before, now Marks
		want        bool
	}{
		{Marks{}, Marks{}, false},
		{Marks{}, Marks{Binding: 2, ResetAdvised: notWaiting, RowRemap: notWaiting}, false}, // From an older Virgate.
		{Marks{Binding: 1, ResetAdvised: waiting, RowRemap: waiting}, Marks{}, false},
		{Marks{ResetAdvised: notWaiting, RowRemap: notWaiting}, Marks{ResetAdvised: waiting, RowRemap: waiting}, false},
		{Marks{Binding: 1, ResetAdvised: waiting, RowRemap: waiting}, Marks{Binding: 1, ResetAdvised: waiting, RowRemap: waiting}, false},
		{Marks{Binding: 2}, Marks{Binding: 1}, true},
		{Marks{ResetAdvised: waiting}, Marks{ResetAdvised: notWaiting}, true},
		{Marks{RowRemap: waiting}, Marks{RowRemap: notWaiting}, true},
	}
	for _, test := range tests {
		if got := test.now.resetSince(test.before); got != test.want {
			t.Errorf("%+v since %+v: reset %t, want %t", test.now, test.before, got, test.want)
		}
	}
}
