package nodemetrics

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// TestRefusalReasonsAreDocumented checks that the metric's text names every reason.
func TestRefusalReasonsAreDocumented(t *testing.T) {
	t.Parallel()
	for line := range strings.Lines(programFamilies) {
		_, reasons, found := strings.Cut(line, "refused: ")
		if !found || !strings.HasPrefix(line, "allocate_failures_total{") {
			continue
		}
		var want []string
		for _, reason := range plugin.RefusalReasons() {
			want = append(want, string(reason))
		}
		if got := strings.Split(strings.TrimSuffix(reasons, ".\n"), ", "); !slices.Equal(got, want) {
			t.Errorf("program.txt has the reasons %q, the program has %q", got, want)
		}
		return
	}
	t.Error("program.txt has no allocate_failures_total")
}

// TestMPSMetrics checks that each daemon is in one state, and that unknown daemons have no series.
func TestMPSMetrics(t *testing.T) {
	t.Parallel()
	states := []nodereport.MPSState{{ID: "GPU-a", Phase: nodereport.MPSReady, Restarts: 2}, {ID: "MIG-b", Phase: nodereport.MPSFailed}}
	gpus := []sharing.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Partitions: []sharing.Partition{{UUID: "MIG-b"}}}}
	for _, test := range []struct {
		name string
		mps  *MPS
		want []string
	}{
		{"no MPS", nil, nil},
		{"not answered", &MPS{GPUs: gpus, Daemons: states}, []string{"mps_up 0"}},
		{"answered", &MPS{GPUs: gpus, Daemons: states, Connected: true}, []string{
			"mps_up 1",
			"mps_daemon_state GPU-a GPU-a starting 0", "mps_daemon_state GPU-a GPU-a ready 1", "mps_daemon_state GPU-a GPU-a failed 0", "mps_daemon_state GPU-a GPU-a stopping 0", "mps_daemon_restarts_total GPU-a GPU-a 2",
			"mps_daemon_state GPU-b MIG-b starting 0", "mps_daemon_state GPU-b MIG-b ready 0", "mps_daemon_state GPU-b MIG-b failed 1", "mps_daemon_state GPU-b MIG-b stopping 0", "mps_daemon_restarts_total GPU-b MIG-b 0",
		}},
	} {
		var got []string
		test.mps.collect(func(name string, value float64, labels ...string) {
			got = append(got, strings.Join(append(append([]string{name}, labels...), fmt.Sprint(value)), " "))
		})
		if !slices.Equal(test.want, got) {
			t.Errorf("%s: got\n%s", test.name, strings.Join(got, "\n"))
		}
	}
}
