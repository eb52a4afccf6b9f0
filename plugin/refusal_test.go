package plugin

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestRefusalLog checks that a flood of refusals leaves some lines and not more,
// each of a bounded length.
func TestRefusalLog(t *testing.T) {
	var text bytes.Buffer
	l := newRefusalLog(slog.New(slog.NewTextHandler(&text, nil)))
	long := make([]string, 100_000)
	for i := range long {
		long[i] = strings.Repeat("\x1b", 1000)
	}
	// In one moment, however long the machine takes for it.
	synctest.Test(t, func(t *testing.T) {
		for range 1000 {
			l.write(t.Context(), newRefusal(long, errors.New("no")))
		}
	})
	lines := strings.Count(text.String(), "\n")
	if lines < refusalBurst || lines > 2*refusalBurst || l.silent != 1000-lines {
		t.Errorf("%d lines, %d without one", lines, l.silent)
	}
	if most := 2000 + 8*shownDevices*shownBytes; text.Len() > lines*most {
		t.Errorf("%d bytes in %d lines", text.Len(), lines)
	}
	if !strings.Contains(text.String(), "requested=100000") {
		t.Errorf("the log does not say how many: %.300s", text.String())
	}
}

func TestQuoteID(t *testing.T) {
	for _, row := range []struct{ name, id, want string }{
		{"an ID", "GPU-a::0", `"GPU-a::0"`},
		{"control characters", "\x1b[31m\n", `"\x1b[31m\n"`},
		{"too long", strings.Repeat("a", 5000), `"` + strings.Repeat("a", shownBytes) + `"…`},
	} {
		if diff := cmp.Diff(row.want, quoteID(row.id)); diff != "" {
			t.Errorf("%s: %s", row.name, diff)
		}
	}
}

// TestRefusalReasons checks that each reason has its own counter, and that a refusal keeps its gRPC status.
func TestRefusalReasons(t *testing.T) {
	for i, reason := range RefusalReasons() {
		if reason.index() != i {
			t.Errorf("%s counts at %d, want %d", reason, reason.index(), i)
		}
	}
	err := refusef(MIGChange, codes.FailedPrecondition, "GPU %d", 3)
	if sent := status.Convert(err); sent.Code() != codes.FailedPrecondition || sent.Message() != "GPU 3" || reasonOf(err) != MIGChange {
		t.Errorf("sent %v for %s", sent, reasonOf(err))
	}
	if got := reasonOf(status.Error(codes.Unavailable, "")); got != Internal {
		t.Errorf("reason %s of another error", got)
	}
}
