package plugin

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestLatencyBuckets(t *testing.T) {
	var l latency
	for _, took := range []time.Duration{0, 100 * time.Microsecond, 101 * time.Microsecond, time.Second, 3 * time.Second} {
		l.observe(took)
	}
	read := l.read()
	for bound, want := range map[time.Duration]uint64{
		100 * time.Microsecond: 2, 250 * time.Microsecond: 3, 500 * time.Millisecond: 3, 2500 * time.Millisecond: 4,
	} {
		if got := read.Buckets[bound]; got != want {
			t.Errorf("%d calls within %s, want %d", got, bound, want)
		}
	}
	if want := 4*time.Second + 201*time.Microsecond; read.Count != 5 || read.Sum != want || len(read.Buckets) != boundCount {
		t.Errorf("%d calls in %d buckets took %s, want 5 and %s", read.Count, len(read.Buckets), read.Sum, want)
	}
}

// TestLatencyAllocatesNothing holds what Allocate's path may cost.
func TestLatencyAllocatesNothing(t *testing.T) {
	var l latency
	if allocations := testing.AllocsPerRun(100, func() { l.observe(time.Millisecond) }); allocations != 0 {
		t.Errorf("%v allocations", allocations)
	}
}

// TestReasonsHavePlaces holds that each reason counts by itself, and that a
// refusal stays what gRPC sends.
func TestReasonsHavePlaces(t *testing.T) {
	if len(Reasons()) != reasons {
		t.Fatalf("%d reasons, want %d", len(Reasons()), reasons)
	}
	for i, reason := range Reasons() {
		if reason.index() != i {
			t.Errorf("%s counts at %d, want %d", reason, reason.index(), i)
		}
	}
	err := refusef(Recut, codes.FailedPrecondition, "GPU %d", 3)
	if sent := status.Convert(err); sent.Code() != codes.FailedPrecondition || sent.Message() != "GPU 3" || reasonOf(err) != Recut {
		t.Errorf("sent %v for %s", sent, reasonOf(err))
	}
	if got := reasonOf(status.Error(codes.Unavailable, "")); got != Internal {
		t.Errorf("reason %s of another error", got)
	}
}
