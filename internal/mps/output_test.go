package mps_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/mps"
)

// said is output of a daemon of R595 (dra-driver-nvidia-gpu#1153).
const said = `[2026-05-31 23:46:49.893 Control 11107] Starting control daemon using socket /tmp/nvidia-mps/control
[2026-05-31 23:48:21.671 Control 11107] Accepting connection...
[2026-05-31 23:48:21.671 Control 11107] User did not send valid credentials
[2026-05-31 23:48:21.671 Control 11107] NEW CLIENT 11801 from user 1000: Server is not ready, push client to pending list
[2026-05-31 23:48:21.671 Control 11803] Starting new server 11803 for user 1000
[2026-05-31 23:48:21.748 Control 11107] NEW SERVER 11803: Ready
[2026-05-31 23:48:25.153 Control 11107] NEW CLIENT 11811 from user 0: Server is not ready, push client to pending list
[2026-05-31 23:48:26.153 Control 11107] NEW CLIENT 11811 from user 0: Server is not ready, push client to pending list
`

// said580 is output of a daemon of R580: a server ended for the next user, and a third user waits.
const said580 = `[2026-11-27 18:50:37.663 Control   533] NEW SERVER 656: Ready
[2026-11-27 18:50:37.684 Control   533] NEW CLIENT 647 from user 0: Server already exists
[2026-11-27 18:50:47.933 Control   533] NEW CLIENT 836 from user 1000: Server is not ready, push client to pending list
[2026-11-27 18:50:47.933 Control   533] Try shutting down server 656, backoff is disabled
[2026-11-27 18:50:48.012 Control   533] Server 656 exited with status 0
[2026-11-27 18:50:48.012 Control   845] Starting new server 845 for user 1000
[2026-11-27 18:50:48.181 Server   845] Created anonymous shared memory region mps.shm.1000.845
[2026-11-27 18:50:48.182 Control   533] NEW SERVER 845: Ready
[2026-11-27 18:50:48.182 Server   845] Client {PID: 836, Context ID: 0} connected
[2026-11-27 18:50:49.908 Control   533] NEW CLIENT 858 from user 2000: Server is not ready, push client to pending list
[2026-11-27 18:50:49.908 Control   533] Server 845 has 2 active worker threads. Server will not shutdown.
`

// TestOutput reads a daemon's lines, and others, in pieces of any length.
func TestOutput(t *testing.T) {
	t.Parallel()
	waits := mps.Queue{Server: 11803, User: 1000, Waiting: []mps.Process{{PID: 11811}}}
	long := strings.Repeat("x", 100_000)
	for name, test := range map[string]struct {
		said string
		want mps.Queue
		last string
	}{
		"nothing":        {"", mps.Queue{}, ""},
		"a client waits": {said, waits, "NEW CLIENT 11811"},
		"its server": {
			said + "[t Control 1] Server 11803 exited with status 0\n[t Control 1] Starting new server 11815 for user 0\n[t Control 1] NEW SERVER 11815: Ready\n",
			mps.Queue{Server: 11815, Waiting: []mps.Process{}}, "NEW SERVER 11815",
		},
		"its server, not ready yet": {
			said + "[t Control 1] Starting new server 11815 for user 0\n", mps.Queue{Waiting: waits.Waiting}, "Starting new server",
		},
		"R580":                          {said580, mps.Queue{Server: 845, User: 1000, Waiting: []mps.Process{{PID: 858, User: 2000}}}, "will not shutdown"},
		"another server's end":          {said + "Server 4711 exited with status 1\n", waits, "4711"},
		"a server that nobody started":  {said + "NEW SERVER 4711: Ready\n", waits, "4711"},
		"a line without an end":         {said + "Server 11803 exited", waits, "NEW CLIENT 11811"},
		"a line that is too long":       {said + long + "\n" + "end\n", waits, "end"},
		"numbers that are no processes": {said + "NEW CLIENT 99999999999999999999999 from user x: Server is not ready\n", waits, "user x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, piece := range []int{1, 7, 4096, len(test.said) + 1} {
				out := mps.NewOutput(slog.New(slog.DiscardHandler))
				for at := 0; at < len(test.said); at += piece {
					if _, err := out.Write([]byte(test.said[at:min(at+piece, len(test.said))])); err != nil {
						t.Fatal(err)
					}
				}
				if diff := cmp.Diff(test.want, out.Queue()); diff != "" {
					t.Errorf("pieces of %d (-want +got):\n%s", piece, diff)
				}
				if last := out.Last(); !strings.Contains(last, test.last) {
					t.Errorf("pieces of %d: last %q, want %q", piece, last, test.last)
				}
			}
		})
	}
}

// TestOutputIsBounded checks that a daemon that never gets a server ready uses bounded memory.
func TestOutputIsBounded(t *testing.T) {
	t.Parallel()
	out := mps.NewOutput(slog.New(slog.DiscardHandler))
	for pid := range 10_000 {
		_, _ = fmt.Fprintf(out, "NEW CLIENT %d from user 1: Server is not ready\n", pid+1)
	}
	if n := len(out.Queue().Waiting); n != 256 {
		t.Errorf("%d are kept", n)
	}
}

// TestAnswerThatIsReadLate checks that an answer may come as late as the caller allows, also when the program itself has
// ended: on a busy node a second passes before this process reads it.
func TestAnswerThatIsReadLate(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), unlimited)
	defer cancel()
	answer, err := programAt("/bin/sh", t.Output()).Ask(ctx, mps.Environment{}, "(sleep 2; echo 100.0) &")
	if answer != "100.0\n" || err != nil {
		t.Errorf("%q, %v", answer, err)
	}
}
