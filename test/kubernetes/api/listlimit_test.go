package api

import (
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/policy/report"
)

// testListLimit has the most devices that a profile can ask for served, and one
// replica more refused before anything changes: the kubelet would drop the list,
// and show no device at all.
func testListLimit(t *testing.T, s *server) {
	const boards, most = 16, 2457
	s.setNode("limit", "a")
	s.setProfiles(map[string]string{"a": document(strconv.Itoa(most))})
	p := s.run(t, "limit", "t4x16")
	const gpu = "nvidia.com/gpu"
	s.await(startTimeout, "the longest list", func() bool {
		return p.offers(gpu, boards*most) && s.node("limit").Labels[report.StateLabel] == "applied"
	})
	generation := s.node("limit").Annotations[report.GenerationAnnotation]
	before := p.kubelet.Snapshot().Resources[gpu]

	s.setProfiles(map[string]string{"a": document(strconv.Itoa(most + 1))})
	s.await(startTimeout, "the refusal", func() bool {
		return s.says("limit", generation, "rejected", "ProfileRejected") && len(s.told("limit", report.ProfileRejected)) == 1
	})
	told := s.told("limit", report.ProfileRejected)[0]
	for _, part := range []string{"ConfigMap gpu/profiles[a]", "sharing.timeSlicing.resources[0].replicas", "4 MiB", "at most 2457 replicas", "(got 2458)"} {
		if !strings.Contains(told, part) {
			t.Errorf("%q does not say %s", told, part)
		}
	}
	after := p.kubelet.Snapshot().Resources[gpu]
	if after.StreamsOpened != 1 || after.Registrations != 1 || !reflect.DeepEqual(before.Devices, after.Devices) {
		t.Errorf("%d streams, %d registrations, %d devices; want nothing changed", after.StreamsOpened, after.Registrations, len(after.Devices))
	}
	if violations := p.kubelet.Violations(); len(violations) > 0 {
		t.Error(violations)
	}
}
