package report

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/sharing"
)

func gpu(state sharing.HealthState, reason string) sharing.UnitHealth {
	return sharing.UnitHealth{Unit: "GPU-a", GPU: "GPU-a", Index: "0", State: state, Reason: reason}
}

func TestNotices(t *testing.T) {
	with := func(units ...sharing.UnitHealth) sharing.NodeReport {
		report := applied("g1")
		report.Units = units
		return report
	}
	rejected := func(problem string) sharing.NodeReport {
		report := applied("g1")
		report.State, report.Problem, report.Wanted = sharing.ProfileRejected, problem, sharing.ProfileRef{Source: "/p.yaml"}
		return report
	}
	pending := applied("g1")
	pending.State, pending.Wanted = sharing.ProfilePending, ref("g2")
	nothing := sharing.NodeReport{State: sharing.ProfileRejected, Wanted: ref(""), Problem: "p.yaml:1: x: unknown key"}
	before := func(report sharing.NodeReport) *sharing.NodeReport { return &report }
	partition := sharing.UnitHealth{Unit: "MIG-b", GPU: "GPU-a", Index: "0:1", State: sharing.Suspect, Reason: "XID 31"}
	for _, test := range []struct {
		name string
		last *sharing.NodeReport
		next sharing.NodeReport
		want []string
	}{
		{"first", nil, with(gpu(sharing.Healthy, "")), []string{"Normal ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g1"}},
		{"first, with a fault", nil, with(gpu(sharing.Unhealthy, "lost")), []string{
			"Normal ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g1", "Warning GPUUnhealthy GPU 0 (GPU-a) is unhealthy: lost",
		}},
		{"first, refused", nil, nothing, []string{"Warning ProfileRejected profile a100 of ConfigMap gpu/profiles is refused, none is in force: p.yaml:1: x: unknown key"}},
		{"no news", before(with(gpu(sharing.Suspect, "XID 31"))), with(gpu(sharing.Suspect, "XID 31")), nil},
		{"pending is none", before(applied("g1")), pending, nil},
		{"applied later", before(pending), applied("g2"), []string{"Normal ProfileApplied profile a100 of ConfigMap gpu/profiles is in force, generation g2"}},
		{"refused", before(applied("g1")), rejected("p: a"), []string{"Warning ProfileRejected profile of /p.yaml is refused, generation g1 stays in force: p: a"}},
		{"refused for another reason", before(rejected("p: a")), rejected("p: b"), []string{"Warning ProfileRejected profile of /p.yaml is refused, generation g1 stays in force: p: b"}},
		{"refused for the same reason", before(rejected("p: a")), rejected("p: a"), nil},
		{"good again, the one in force", before(rejected("p: a")), applied("g1"), nil},
		{"XID", before(with(gpu(sharing.Healthy, ""))), with(gpu(sharing.Suspect, "XID 31")), []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is suspect: XID 31"}},
		{"worse", before(with(gpu(sharing.Suspect, "XID 31"))), with(gpu(sharing.Unhealthy, "XID 31")), []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is unhealthy: XID 31"}},
		{"another XID", before(with(gpu(sharing.Suspect, "XID 31"))), with(gpu(sharing.Suspect, "XID 31, XID 43")), []string{"Warning GPUUnhealthy GPU 0 (GPU-a) is suspect: XID 31, XID 43"}},
		{"recovering is not recovered", before(with(gpu(sharing.Unhealthy, "lost"))), with(gpu(sharing.Recovering, "lost")), nil},
		{"recovered", before(with(gpu(sharing.Recovering, "lost"))), with(gpu(sharing.Healthy, "")), []string{"Normal GPURecovered GPU 0 (GPU-a) is healthy again, it had: lost"}},
		{"a partition", before(with()), with(partition), []string{"Warning GPUUnhealthy partition 0:1 (MIG-b) of GPU-a is suspect: XID 31"}},
		{"a faulty partition is cut away", before(with(partition)), with(), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, n := range notices(test.last, test.next) {
				got = append(got, n.kind+" "+n.reason+" "+n.message)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCut(t *testing.T) {
	for _, text := range []string{"", "short", strings.Repeat("x", longestMessage), strings.Repeat("x", longestMessage+1), strings.Repeat("ü", longestMessage), strings.Repeat("日", longestMessage)} {
		got := cut(text)
		if len(got) > longestMessage || !utf8.ValidString(got) {
			t.Errorf("%d bytes, valid %t", len(got), utf8.ValidString(got))
		}
		if len(text) <= longestMessage && got != text || len(text) > longestMessage && !strings.HasSuffix(got, "…") {
			t.Errorf("cut(%d bytes) is %q", len(text), got)
		}
	}
}

func FuzzCut(f *testing.F) {
	f.Add(strings.Repeat("a", 1022) + "ü…")
	f.Fuzz(func(t *testing.T, text string) {
		got := cut(text)
		if len(got) > longestMessage || utf8.ValidString(text) && !utf8.ValidString(got) {
			t.Errorf("%q", got)
		}
	})
}
