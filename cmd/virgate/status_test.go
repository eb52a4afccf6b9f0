package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
)

func TestPrintStatus(t *testing.T) {
	n := func(n int) *int { return &n }
	healthy := status.Health{State: sharing.Healthy}
	lost := status.Health{State: sharing.Unhealthy, Reason: "lost"}
	applied := nodereport.ProfileRef{Name: "a", Source: "ConfigMap gpu/profiles", Generation: "0123456789ab"}
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, test := range []struct {
		name   string
		status status.Status
		want   string
	}{
		{
			"starting",
			status.Status{Version: "v", Role: status.RoleStarting, Unready: []string{"not serving yet"}, Profile: status.Profile{State: nodereport.ProfilePending, Since: since}},
			`node       -
virgate    v, starting, not ready
profile    pending since 2026-01-02T03:04:05Z
  wanted   -
  applied  none
not ready: not serving yet

RESOURCE  STRATEGY  DEVICES  HEALTHY  HELD  FREE  LEAVING  STREAMS

GPU  UNIT  MODEL  RESOURCE  HELD  HEALTH  HOLDERS
`,
		},
		{
			"claims",
			status.Status{
				Version: "v", Role: status.RoleServing, Ready: true, Profile: status.Profile{State: nodereport.ProfileApplied, Since: since},
				DRA: &status.DRA{
					DriverState: dra.DriverState{Registered: true, Slices: 1, Problems: []string{"no API server"}}, Paths: map[string]units.Path{"gpu-a": units.DRA, "gpu-b": units.LeavingPlugin},
					Claims:  []dra.Claim{{Namespace: "ns", Name: "c", Results: []dra.Result{{Device: "gpu-a-1g10gb-0"}}}},
					Refused: []claims.Refused{{Reason: "claim ns/d: pod ns/p still has gpu-b"}},
				},
			},
			`node       -
virgate    v, serving, ready
profile    applied since 2026-01-02T03:04:05Z
  wanted   -
  applied  none

RESOURCE  STRATEGY  DEVICES  HEALTHY  HELD  FREE  LEAVING  STREAMS

GPU  UNIT  MODEL  RESOURCE  HELD  HEALTH  HOLDERS

DRA: registered with the kubelet, 1 ResourceSlices
DRA: no API server
waits: claim ns/d: pod ns/p still has gpu-b
DEVICE BY CLAIMS  PATH            CLAIMS
gpu-a             dra             -
gpu-a-1g10gb-0    dra             ns/c
gpu-b             leaving-plugin  -
`,
		},
		{
			"GPUs that are cut",
			status.Status{
				Version: "v", Role: status.RoleServing, Ready: true, Profile: status.Profile{State: nodereport.ProfileApplied, Since: since, Applied: &applied, Wanted: applied},
				Layouts: []nodereport.GPULayout{
					{GPU: "GPU-a", Index: 0, Wanted: "day", State: nodereport.LayoutApplied},
					{GPU: "GPU-b", Index: 1, Wanted: "day", State: nodereport.LayoutBlocked, Reason: "1:0 is in use"},
				},
				Waits: []nodereport.Wait{
					{GPU: "GPU-b", Unit: "MIG-0", Index: "1:0", Resource: "mig", Pods: []string{"ns/c"}, Since: since}, // Shown as a layout.
					{GPU: "GPU-c", Unit: "GPU-c", Index: "2", Resource: "old", Pods: []string{"ns/a", "ns/b"}, Since: since},
				},
				At: since.Add(120 * time.Millisecond), HoldersAt: &since,
			},
			`node       -
virgate    v, serving, ready
profile    applied since 2026-01-02T03:04:05Z
  wanted   a of ConfigMap gpu/profiles, generation 0123456789ab
  applied  a of ConfigMap gpu/profiles, generation 0123456789ab
holders    as the kubelet said 120ms ago
waits: GPU 1 (GPU-b) does not have layout day: 1:0 is in use
waits: GPU 2 (GPU-c), held as old by ns/a, ns/b, since 2026-01-02T03:04:05Z

RESOURCE  STRATEGY  DEVICES  HEALTHY  HELD  FREE  LEAVING  STREAMS

GPU  UNIT  MODEL  RESOURCE  HELD  HEALTH  HOLDERS

GPU  MIG LAYOUT  STATE    REASON
0    day         applied  -
1    day         blocked  1:0 is in use
`,
		},
		{
			"everything at once",
			status.Status{
				Node: "n1", Version: "v", Role: status.RoleServing, Ready: true,
				Profile: status.Profile{
					State: nodereport.ProfileRejected, Since: since, Applied: &applied,
					Wanted: nodereport.ProfileRef{Name: "b", Source: "ConfigMap gpu/profiles"}, Problem: "x:1: one", Error: "x:1: one\nx:2: two",
				},
				Resources: []status.Resource{
					{Name: "nvidia.com/gpu", Strategy: "time-slicing", Devices: 8, Healthy: 4, Held: n(2), Free: n(3), Streams: 1},
					{Name: "nvidia.com/old", Dropped: true, Devices: 1, Leaving: 1, Streams: 1},
				},
				HoldersKnown: true,
				GPUs: []status.GPU{
					{UUID: "GPU-a", Index: 0, Model: "M", Health: healthy, MPS: []nodereport.MPSState{{ID: "GPU-a", Phase: nodereport.MPSFailed, Reason: "it does not answer"}}, Units: []status.Unit{{
						ID: "GPU-a", Index: "0", Resource: "nvidia.com/gpu", Replicas: 4, Health: healthy,
						Holders: []status.Holder{{Namespace: "n", Pod: "p", Container: "c", Devices: []string{"1", "2"}}, {Namespace: "n", Pod: "q", Container: "c", Devices: []string{"3"}}},
					}}},
					{UUID: "GPU-b", Index: 1, Model: "M", MIG: true, Health: lost, Units: []status.Unit{{ID: "MIG-1", Index: "1:0", Profile: "1g.5gb", Health: healthy}}},
					{UUID: "GPU-c", Index: 2, Model: "M", MIG: true, Health: healthy},
				},
				Elsewhere: []status.Unit{{ID: "MIG-9", Health: healthy, Holders: []status.Holder{{Namespace: "n", Pod: "r", Container: "c", Devices: []string{"9"}}}}},
				Unread:    "driver gone", Warnings: []string{"w"},
			},
			`node       n1
virgate    v, serving, ready
profile    rejected since 2026-01-02T03:04:05Z
  wanted   b of ConfigMap gpu/profiles
  applied  a of ConfigMap gpu/profiles, generation 0123456789ab
profile: x:1: one
profile: x:2: two
GPUs not read: driver gone
kubelet: what it holds and has applied is not known; no device is removed

RESOURCE        STRATEGY      DEVICES  HEALTHY  HELD  FREE  LEAVING  STREAMS
nvidia.com/gpu  time-slicing  8        4        2     3     0        1
nvidia.com/old  dropped       1        0        ?     ?     1        1

GPU  UNIT   MODEL             RESOURCE        HELD  HEALTH           HOLDERS
0    GPU-a  M                 nvidia.com/gpu  3/4   healthy          n/p/c n/q/c
1    GPU-b  M                 -               -     unhealthy: lost  
1:0  MIG-1  1g.5gb            -               0/0   healthy          
2    GPU-c  M                 -               -     healthy          
-    MIG-9  not on this node  -               1/0   healthy          n/r/c

GPU  MPS DAEMON OF  STATE   REASON
0    GPU-a          failed  it does not answer

warning: w
`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got text
			got.status(test.status)
			if diff := cmp.Diff(test.want, got.String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDialAddress(t *testing.T) {
	for _, test := range []struct{ text, want, err string }{
		{"localhost:9400", "localhost:9400", ""},
		{":9400", "localhost:9400", ""},
		{"[::1]:9400", "[::1]:9400", ""},
		{"localhost", "", "is not HOST:PORT"},
		{"localhost:", "", "has no port"},
		{"", "", "is not HOST:PORT"},
	} {
		got, err := dialAddress(test.text)
		if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%q: got %q, %v", test.text, got, err)
		}
	}
}

// TestStatusElsewhere checks that for an address without pages, like a pod's, the error says which address has
// them.
func TestStatusElsewhere(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	_, _, err := getStatus(t.Context(), server.Listener.Addr().String(), "")
	if err == nil || !strings.HasSuffix(err.Error(), "It answers on its loopback alone: use kubectl exec or port-forward") {
		t.Error(err)
	}
}
