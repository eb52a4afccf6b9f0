package page

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

var templates = sync.OnceValue(func() Templates { return NewTemplates("") })

func drawn(t testing.TB, node status.Status, now time.Time) string {
	t.Helper()
	text := string(templates().Draw("page", NewNode(node, now, Colours{})))
	if strings.Contains(text, "the page cannot be made") {
		t.Fatal(text)
	}
	return text
}

func ratio(f float64) *float64 { return &f }

// partitionAt is a partition of a GPU with eight slots of 5 GiB.
func partitionAt(start, size int, holders ...status.Holder) status.Unit {
	return status.Unit{
		ID: fmt.Sprint("MIG-", start), Index: fmt.Sprint("0:", start), Profile: fmt.Sprint(size, "g"),
		Placement: &mig.Placement{Start: start, Size: size}, Memory: uint64(size)*5<<30 - 256<<20,
		Resource: "r", Replicas: 1, Health: status.Health{State: sharing.Healthy}, Holders: holders,
	}
}

// draStatusOfTest is a node with a GPU that is divided for claims, and one that leaves DRA.
func draStatusOfTest() *status.DRA {
	return &status.DRA{
		DriverState: dra.DriverState{Registered: true, Slices: 2, Problems: []string{"no API server"}},
		Paths:       map[string]units.Path{"gpu-a": units.DRA, "gpu-b": units.LeavingDRA},
		Claims: []dra.Claim{
			{Namespace: "ns", Name: "one", Results: []dra.Result{{Device: "gpu-a-1g10gb-4-ts", Shares: 2}}},
			{Namespace: "ns", Name: "eye", Results: []dra.Result{{Device: "gpu-a-1g10gb-4-ts", Admin: true}}},
		},
		Refused: []claims.Refused{{Reason: "claim ns/late: busy"}},
	}
}

func TestPageShowsTheNode(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	fell := now.Add(-90 * time.Second)
	one := 1
	node := status.Status{
		Node: "node-7", Version: "v1", Role: status.RoleServing, Ready: false, Unready: []string{"nvidia.com/gpu: not registered with the kubelet"}, HoldersKnown: true,
		Profile: status.Profile{
			State: nodereport.ProfileRejected, Since: now.Add(-time.Minute), Error: "p.yaml:3: replicas: must be at least 1",
			Wanted: nodereport.ProfileRef{Name: "ten", Source: "ConfigMap gpu/profiles"}, Applied: &nodereport.ProfileRef{Name: "four", Generation: "0123456789ab"},
		},
		Resources: []status.Resource{{Name: "nvidia.com/gpu", Strategy: "time-slicing", Devices: 4, Healthy: 4, Streams: 1, Held: &one, Leaving: 2}, {Name: "old", Refused: map[plugin.RefusalReason]uint64{plugin.TooMany: 3}}, {Name: "twice", Streams: 2}},
		GPUs: []status.GPU{
			{
				UUID: "GPU-a", Index: 0, Model: "GPU", Memory: 40 << 30, Health: status.Health{State: sharing.Unhealthy, Reason: "XID 79", Since: &fell},
				Use: &status.Use{Memory: ratio(10 << 30), SM: ratio(0.25), Celsius: ratio(71), Throttled: []sharing.ThrottleReason{sharing.ThrottlePower}, Contended: true, MaxShare: ratio(0.8), Unattributed: []sharing.UnattributedUtilization{
					{Cause: sharing.CauseNoContainer, Processes: 1, Memory: ratio(3 << 20), SM: ratio(0.125)}, {Cause: sharing.CauseNotAllocated, Processes: 2},
				}},
				Units: []status.Unit{{ID: "GPU-a", Index: "0", Resource: "nvidia.com/gpu", Replicas: 4, Health: status.Health{State: sharing.Unhealthy}, Holders: []status.Holder{{
					Namespace: "team", Pod: "train", Container: "main", Devices: []string{"GPU-a::0"}, Use: &status.Use{Memory: ratio(512 << 20), SM: ratio(0.5), OverShare: ratio(2 << 30), Limit: ratio(256 << 20), OverLimit: true},
				}, {Namespace: "team", Pod: "fair", Devices: []string{"GPU-a::1"}, Use: &status.Use{Memory: ratio(0), OverShare: ratio(0), Limit: ratio(1)}}}}},
			},
			{
				UUID: "GPU-b", Index: 1, Model: "GPU", Memory: 40 << 30, MIG: true, Health: status.Health{State: sharing.Healthy},
				Units: []status.Unit{partitionAt(4, 4), partitionAt(0, 2, status.Holder{Namespace: "n", Pod: "p", Container: "c", Devices: []string{"MIG-0"}})},
			},
		},
		Layouts:   []nodereport.GPULayout{{GPU: "GPU-b", Wanted: "all-balanced", State: nodereport.LayoutBlocked, Reason: "0:0 is in use", Slots: 8}},
		Elsewhere: []status.Unit{{ID: "MIG-gone", Resource: "r", Holders: []status.Holder{{Namespace: "n", Pod: "left", Container: "c", Devices: []string{"MIG-gone"}}}}},
		Warnings:  []string{"no unit of r"},
		Waits:     []nodereport.Wait{{GPU: "GPU-a", Unit: "GPU-a", Index: "0", Resource: "old", Pods: []string{"n/p"}, Since: now}},
		HoldersAt: &now,
		DRA:       draStatusOfTest(),
	}
	body := drawn(t, node, now)
	for _, want := range []string{
		"<title>node-7 – Virgate</title>", ">not ready<", ">serving<", "<strong>ten</strong>", ">rejected<", "ConfigMap gpu/profiles",
		"four stays in force", "p.yaml:3: replicas: must be at least 1", "nvidia.com/gpu: not registered", "is being withdrawn", ", 2 leaving", ">not connected<", "refused so far: 3 × more than one share", ">2 streams<",
		"GPU 0 ", "XID 79", "10.0 GiB of 40.0 GiB", `value="0.25"`, "25 %", "71 °C", "slowed: power", "2 of 4 shares held", "<title>team/train: 1 of 4 shares of GPU 0</title>",
		"team/<strong>train</strong>", "512 MiB of 256 MiB, 50 % compute", ">over its limit<", ">2.0 GiB over its share<", ">contended</span> the busiest container has 80 %",
		`<p class="soft">besides, 1 process in no container: 3 MiB, 12 % compute<`, `<p class="warn">besides, 2 processes in containers that hold no device of it<`, "How much each container uses is not known", `<rect class="unit" x="200" y="0" width="200"`, `x="0" y="5" width="100" height="22"`, "<text x=\"300\" y=\"19\">4g</text>", "exclusive, held", "exclusive, free",
		"Switching waits: GPU 0 (GPU-a), held as old by n/p, since ", "Switching waits: GPU 0 (GPU-b) does not have layout all-balanced: 0:0 is in use", "holders as of now",
		"registered with the kubelet</span>, 2 ResourceSlices", "DRA: no API server", "waits: claim ns/late: busy", "<code>gpu-a-1g10gb-4</code></td><td data-of=\"given out\">by DRA alone</td><td data-of=\"claims\">ns/one (2 shares) ns/eye (for monitoring) <", "<code>gpu-b</code></td><td data-of=\"given out\">leaves DRA when its claims end</td><td data-of=\"claims\"><span class=\"soft\">free",
		"MIG-gone", "no unit of r", "<strong>all-balanced</strong>", ">blocked</span> 0:0 is in use", "1 min ago</time></td><td>profile</td><td>ten rejected", "<td>GPU 0</td><td>unhealthy: <a href=\"" + runbook + "\"", "</svg> n</span>", "</svg> team</span>",
	} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Count(body, "over its share") != 1 {
		t.Error("who uses no more than its share is shown as over it")
	}
	if strings.Count(body, "over its limit") != 1 {
		t.Error("who is within its limit is shown as over it")
	}
	if t.Failed() {
		t.Log(body)
	}
}

// TestPageSaysWhyTheProfileIsNotKnown checks that a profile that was not read yet is not shown as refused.
func TestPageSaysWhyTheProfileIsNotKnown(t *testing.T) {
	t.Parallel()
	body := drawn(t, status.Status{Profile: status.Profile{State: nodereport.ProfilePending, Error: "node n1: not known yet"}}, time.Now())
	if !strings.Contains(body, "node n1: not known yet") || strings.Contains(body, "refused") {
		t.Error(body)
	}
}

func TestPageOfAnEmptyNode(t *testing.T) {
	t.Parallel()
	body := drawn(t, status.Status{}, time.Now())
	for _, want := range []string{"This node", "no GPU that could be read", "Nothing is offered", "Who holds what cannot be read"} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
}

// TestPageEscapes checks that no external text is markup, wherever it is shown.
func TestPageEscapes(t *testing.T) {
	t.Parallel()
	const evil = `"><script>alert(1)</script><img src=x onerror=y>'</style></title>{{.}}`
	since := time.Now()
	health := status.Health{State: evil, Reason: evil, Since: &since}
	holder := status.Holder{Namespace: evil, Pod: evil, Container: evil, Resource: evil, Devices: []string{evil}}
	unit := status.Unit{ID: evil, Index: evil, Profile: evil, Resource: evil, Replicas: 2, Health: health, Holders: []status.Holder{holder}}
	partition := unit
	partition.Placement = &mig.Placement{Size: 1}
	ref := nodereport.ProfileRef{Name: evil, Source: evil, Generation: evil}
	body := drawn(t, status.Status{
		Node: evil, Version: evil, Role: evil, Unready: []string{evil}, Unread: evil, Warnings: []string{evil},
		Profile:   status.Profile{State: evil, Since: since, Wanted: ref, Applied: &ref, Problem: evil, Error: evil},
		Resources: []status.Resource{{Name: evil, Strategy: evil, Refused: map[plugin.RefusalReason]uint64{evil: 1}}},
		GPUs:      []status.GPU{{UUID: evil, Model: evil, Health: health, Use: &status.Use{Throttled: []sharing.ThrottleReason{evil}, Unattributed: []sharing.UnattributedUtilization{{Cause: evil}}}, Units: []status.Unit{unit, partition}}},
		Layouts:   []nodereport.GPULayout{{GPU: evil, Wanted: evil, State: evil, Reason: evil}},
		Elsewhere: []status.Unit{unit},
		Waits:     []nodereport.Wait{{GPU: evil, Unit: evil, Index: evil, Resource: evil, Pods: []string{evil}}},
	}, since)
	_, page, _ := strings.Cut(body, "<main>")
	page, _, _ = strings.Cut(page, "</main>")
	for _, bad := range []string{"<script", "<img", "</style", "</title>{", `"">`} {
		if strings.Contains(strings.ToLower(page), bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if n := strings.Count(page, "&lt;script&gt;"); n < 20 {
		t.Errorf("the name is shown %d times", n)
	}
}

// TestPageLoadsNothing checks that the page needs only its own files, has neither inline script nor style, and
// forbids others by its headers.
func TestPageLoadsNothing(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	ServeFiles(mux)
	for path, kind := range map[string]string{"/page.css": "text/css", "/page.js": "text/javascript", "/node.html": ""} {
		recorder := httptest.NewRecorder()
		mux.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
		if (recorder.Code == http.StatusOK) != (kind != "") {
			t.Errorf("%s: %d", path, recorder.Code)
		}
		if kind == "" {
			continue
		}
		for name, want := range map[string]string{
			"Content-Type": kind + "; charset=utf-8", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
		} {
			if got := recorder.Header().Get(name); got != want {
				t.Errorf("%s: %s is %q, want %q", path, name, got, want)
			}
		}
		policy := recorder.Header().Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") || strings.Contains(policy, "http") {
			t.Errorf("%s: policy %q", path, policy)
		}
		if found := regexp.MustCompile(`@import|url\(|https?:|innerHTML|insertAdjacentHTML|eval\(`).FindAllString(recorder.Body.String(), -1); found != nil {
			t.Errorf("%s has %q", path, found)
		}
	}
	body := drawn(t, status.Status{GPUs: []status.GPU{{Units: []status.Unit{partitionAt(0, 1)}}}}, time.Now())
	for _, own := range []string{`<link rel="stylesheet" href="page.css"/>`, `<script src="page.js" defer=""></script>`} {
		if !strings.Contains(body, own) {
			t.Errorf("the page lacks %s", own)
		}
		body = strings.ReplaceAll(body, own, "")
	}
	if found := regexp.MustCompile(`(?i)<(script|style|link|img|iframe|object|embed)|\bsrc=|\bstyle=|\bon[a-z]+=|url\(|https?:`).FindAllString(body, -1); found != nil {
		t.Errorf("the page has %q", found)
	}
	for _, path := range regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(body, -1) {
		if !strings.HasPrefix(path[1], "/") {
			t.Errorf("a link to %s", path[1])
		}
	}
}

// TestRunbook checks that an XID links to the runbook's entry that the alert names too.
func TestRunbook(t *testing.T) {
	t.Parallel()
	address, anchor, _ := strings.Cut(runbook, "#")
	_, path, _ := strings.Cut(address, "/blob/main/")
	document, err := os.ReadFile("../../" + path)
	if err != nil || !strings.Contains(strings.ToLower(string(document)), "\n### "+anchor+"\n") {
		t.Errorf("%s has no %s: %v", path, anchor, err)
	}
	rules, err := os.ReadFile("../../charts/virgate/rules/virgate.rules.yaml")
	if err != nil || !strings.Contains(string(rules), "runbook_url: "+runbook+"\n") {
		t.Errorf("no alert has %s: %v", runbook, err)
	}
	want := []part{{Text: "before "}, {"XID 79", true}, {Text: ", "}, {"XID 1", true}, {Text: " and XID, XIDs 3, aXID 4"}}
	if diff := cmp.Diff(want, splitXIDs("before XID 79, XID 1 and XID, XIDs 3, aXID 4")); diff != "" {
		t.Error(diff)
	}
}

// TestWords checks that constants are shown in plain words.
func TestWords(t *testing.T) {
	t.Parallel()
	for value, want := range map[any]string{
		plugin.TooMany: "more than one share", plugin.MIGChange: "the MIG layout was changing", units.LeavingDRA: "leaves DRA when its claims end",
		sharing.ThrottleHardware: "the hardware protects itself", sharing.ThrottlePower: "power", nodereport.LayoutResetRequired: "reset required", plugin.RefusalReason("new_one"): "new one",
	} {
		if got := words(value); got != want {
			t.Errorf("%v: %q, want %q", value, got, want)
		}
	}
}

// TestUnhealthyDevices checks that held, free and unheld unhealthy devices add up to all devices.
func TestUnhealthyDevices(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ devices, healthy, held, free, unhealthy, both int }{
		{48, 42, 10, 33, 6, 1},
		{48, 48, 10, 38, 0, 0},
		{48, 42, 10, 32, 6, 0},
		{4, 0, 4, 0, 4, 4},
		{4, 4, 9, 0, 0, 0}, // More are held than are listed.
	} {
		got := newResource(status.Resource{Devices: test.devices, Healthy: test.healthy, Held: &test.held, Free: &test.free})
		if got.Unhealthy != test.unhealthy || got.UnhealthyHeld != test.both {
			t.Errorf("%+v: %d unhealthy, %d of them held", test, got.Unhealthy, got.UnhealthyHeld)
		}
	}
	if got := newResource(status.Resource{Devices: 4, Healthy: 1}); got.Unhealthy != 3 || got.UnhealthyHeld != 0 {
		t.Errorf("%+v", got)
	}
}

func TestChanges(t *testing.T) {
	t.Parallel()
	at := func(second int64) *time.Time { t := time.Unix(second, 0); return &t }
	sick := func(second int64) status.Health {
		return status.Health{State: sharing.Suspect, Reason: "XID 31", Since: at(second)}
	}
	node := status.Status{Profile: status.Profile{State: nodereport.ProfileApplied, Since: *at(5)}, GPUs: []status.GPU{
		{UUID: "a", Index: 0, Health: sick(3), Units: []status.Unit{{ID: "a", Health: sick(3)}}},
		{UUID: "b", Index: 1, Units: []status.Unit{{ID: "p", Index: "1:0", Health: sick(7)}, {ID: "q", Index: "1:1", Health: status.Health{Since: at(9)}}}},
	}}
	want := []change{{*at(7), "partition 1:0", "suspect: XID 31"}, {*at(5), "profile", "applied"}, {*at(3), "GPU 0", "suspect: XID 31"}}
	if diff := cmp.Diff(want, changesOf(node)); diff != "" {
		t.Error(diff)
	}
	for range 20 {
		node.GPUs = append(node.GPUs, status.GPU{UUID: "c", Health: sick(1)})
	}
	if got := changesOf(node); len(got) != maxChanges || got[0] != want[0] {
		t.Errorf("%d changes, first %v", len(got), got[0])
	}
}

func TestPageTexts(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	for _, test := range []struct{ got, want string }{
		{share(ratio(1<<20), 1<<21), "0.5"},
		{share(ratio(3), 2), "1"},
		{share(nil, 2), "0"},
		{share(ratio(1), 0), "0"},
		{numberText(1e-9), "0.000000001"},
		{sinceText(now, now), "now"},
		{sinceText(now, now.Add(time.Hour)), "now"},
		{sinceText(now, now.Add(-59*time.Second)), "59 s ago"},
		{sinceText(now, now.Add(-59*time.Minute)), "59 min ago"},
		{sinceText(now, now.Add(-47*time.Hour)), "47 h ago"},
		{sinceText(now, now.Add(-72*time.Hour)), "3 days ago"},
	} {
		if test.got != test.want {
			t.Errorf("%q, want %q", test.got, test.want)
		}
	}
}

func TestBusiestFirst(t *testing.T) {
	t.Parallel()
	holder := func(pod string, sm, memory float64) status.Holder {
		return status.Holder{Pod: pod, Use: &status.Use{SM: &sm, Memory: &memory}}
	}
	unit := status.Unit{Holders: []status.Holder{{Pod: "unknown"}, holder("idle", 0, 5), holder("busy", 0.5, 1), holder("alike", 0.5, 1), holder("large", 0.5, 9)}}
	var order []string
	for _, h := range newUnit(unit, Colours{}).Holders {
		order = append(order, h.Pod)
	}
	if got := strings.Join(order, " "); got != "large busy alike idle unknown" || unit.Holders[0].Pod != "unknown" {
		t.Errorf("order %s, and the status has %s first", got, unit.Holders[0].Pod)
	}
}

// TestPageSaysOnce checks that a profile's error is not repeated as a reason for not being ready.
func TestPageSaysOnce(t *testing.T) {
	t.Parallel()
	node := status.Status{Unready: []string{"no profile: p.yaml:3: bad", "no stream"}, Profile: status.Profile{Error: "p.yaml:3: bad"}}
	body := drawn(t, node, time.Now())
	if strings.Count(body, "p.yaml:3: bad") != 1 || !strings.Contains(body, "no stream") {
		t.Error(body)
	}
}

// TestLayoutKnowsTheSlots checks that known slots are preferred over a guess.
func TestLayoutKnowsTheSlots(t *testing.T) {
	t.Parallel()
	node := status.Status{
		GPUs:    []status.GPU{{UUID: "a", Units: []status.Unit{partitionAt(6, 1)}}, {UUID: "b", Units: []status.Unit{{ID: "b"}}}, {UUID: "c", Units: []status.Unit{partitionAt(6, 1)}}},
		Layouts: []nodereport.GPULayout{{GPU: "a", Slots: 4}, {GPU: "b", Slots: 4}, {GPU: "c"}},
	}
	var slots []int
	for _, gpu := range NewNode(node, time.Now(), Colours{}).GPUs {
		slots = append(slots, gpu.Slots)
	}
	if diff := cmp.Diff([]int{4, 0, 8}, slots); diff != "" {
		t.Error(diff)
	}
}
