package agent

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodemetrics"
)

// draSeries are a scrape's series with these prefixes, without "virgate_", sorted. Reasons with the value 0 are
// left out.
func (r *rig) draSeries(prefixes ...string) (series []string) {
	_, body := r.get("/metrics")
	for line := range strings.Lines(body) {
		name, ours := strings.CutPrefix(strings.TrimSpace(line), "virgate_")
		begins := slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
		if none := strings.Contains(name, "reason=") && strings.HasSuffix(name, " 0"); ours && begins && !none {
			series = append(series, name)
		}
	}
	slices.Sort(series)
	return series
}

// TestDRAMetrics follows a resource from DRA to the device plugin, with one claim prepared and one refused: the
// units on each path, the claims, and the published slices.
func TestDRAMetrics(t *testing.T) {
	t.Parallel()
	f := &fakeDRA{}
	r := newDRARig(t, f, draProfile(4))
	r.awaitOffer(f, "gpu-a-ts gpu-b-ts")
	r.await("shown without a claim", func() bool { return slices.Contains(r.draSeries("claims"), `claims{resource="nvidia.com/gpu"} 0`) })
	r.must(r.options.DRA.Claims.Prepare(r.ctx, shareClaim("1", "gpu-b-ts")))
	if err := r.options.DRA.Claims.Prepare(r.ctx, dra.Claim{UID: "2", Results: []dra.Result{{Device: "gpu-b"}}}); err == nil {
		t.Fatal("a GPU is given twice")
	}
	f.set(func(f *fakeDRA) { f.state.Slices, f.state.Writes, f.state.WriteFailures = 1, 3, 2 })
	want := func(series ...string) {
		t.Helper()
		r.await(strings.Join(series, "; "), func() bool { return slices.Equal(series, r.draSeries("claims", "dra_")) })
	}
	want(
		`claims_refused{reason="taken"} 1`, `claims{resource="nvidia.com/gpu"} 1`,
		`dra_publish_failures_total 2`, `dra_registered 1`, `dra_slice_writes_total 3`, `dra_slices 1`, `dra_slices_written 1`,
		`dra_units{path="dra",resource="nvidia.com/gpu"} 2`, `dra_units{path="leaving-dra",resource="nvidia.com/gpu"} 0`, `dra_units{path="leaving-plugin",resource="nvidia.com/gpu"} 0`,
	)
	r.must(r.options.DRA.Claims.Unprepare(dra.Claim{UID: "2"}))
	r.policy.set(profile(4), nil)
	f.set(func(f *fakeDRA) { f.state.Unwritten = true })
	want(
		`claims{resource="nvidia.com/gpu"} 1`,
		`dra_publish_failures_total 2`, `dra_registered 1`, `dra_slice_writes_total 3`, `dra_slices 1`, `dra_slices_written 0`,
		`dra_units{path="dra",resource="nvidia.com/gpu"} 0`, `dra_units{path="leaving-dra",resource="nvidia.com/gpu"} 1`, `dra_units{path="leaving-plugin",resource="nvidia.com/gpu"} 0`,
	)
	f.set(func(f *fakeDRA) { f.state.Unwritten = false })
	r.must(r.options.DRA.Claims.Unprepare(shareClaim("1", "gpu-b-ts")))
	want(`dra_publish_failures_total 2`, `dra_registered 1`, `dra_slice_writes_total 3`, `dra_slices 1`, `dra_slices_written 1`)
}

// TestClaimCalls checks that failures are counted by reason.
func TestClaimCalls(t *testing.T) {
	t.Parallel()
	calls := nodemetrics.NewClaimCalls()
	r := newRig(t, func(r *rig) {
		r.options.Kubelet = r.sight
		r.options.DRA = draOptions(r, &fakeDRA{}, &memory{})
		r.options.ClaimCalls = calls
		r.startWith(draProfile(4))
	})
	calls.Observe("prepare", 20*time.Millisecond, nil)
	calls.Observe("prepare", time.Minute, claims.ErrNotServing)
	calls.Observe("unprepare", time.Minute, errors.New("read claim"))
	got := r.draSeries("claim_call_failures_total", "claim_call_duration_seconds_count", `claim_call_duration_seconds_bucket{call="prepare",result="ok"`)
	if diff := cmp.Diff([]string{
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="+Inf"} 1`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="0.001"} 0`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="0.005"} 0`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="0.025"} 1`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="0.1"} 1`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="0.5"} 1`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="10"} 1`,
		`claim_call_duration_seconds_bucket{call="prepare",result="ok",le="2.5"} 1`,
		`claim_call_duration_seconds_count{call="prepare",result="error"} 1`,
		`claim_call_duration_seconds_count{call="prepare",result="ok"} 1`,
		`claim_call_duration_seconds_count{call="unprepare",result="error"} 1`,
		`claim_call_duration_seconds_count{call="unprepare",result="ok"} 0`,
		`claim_call_failures_total{call="prepare",reason="not_serving"} 1`,
		`claim_call_failures_total{call="unprepare",reason="unread"} 1`,
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
