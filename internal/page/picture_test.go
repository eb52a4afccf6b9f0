package page

import (
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

var update = flag.Bool("update", false, "write docs/status.svg")

// pictured is a node that shares its GPUs in each way; one is faulty.
func pictured(now time.Time) status.Status {
	const model, memory = "NVIDIA H100 80GB HBM3", 80 << 30
	healthy := status.Health{State: sharing.Healthy}
	fell := now.Add(-4 * time.Minute)
	faulty := status.Health{State: sharing.Unhealthy, Reason: "XID 79", Explanation: "the GPU fell off the bus; after a reset it returns", Since: &fell}
	holder := func(namespace, pod string, sm, gib float64) status.Holder {
		return status.Holder{Namespace: namespace, Pod: pod, Container: "main", Devices: []string{"1"}, Use: &status.Use{SM: &sm, Memory: ratio(gib * (1 << 30))}}
	}
	use := func(sm, gib, celsius float64) *status.Use {
		return &status.Use{SM: &sm, Memory: ratio(gib * (1 << 30)), Celsius: &celsius}
	}
	gpu := func(index int, health status.Health, use *status.Use, units ...status.Unit) status.GPU {
		return status.GPU{UUID: fmt.Sprint("GPU-", index), Index: index, Model: model, Memory: memory, Health: health, Use: use, Units: units, MIG: len(units) > 1}
	}
	whole := func(index int, resource string, replicas int, health status.Health, holders ...status.Holder) status.Unit {
		return status.Unit{ID: fmt.Sprint("GPU-", index), Index: fmt.Sprint(index), Resource: resource, Replicas: replicas, Health: health, Holders: holders}
	}
	part := func(at, start, size int, profile string, holders ...status.Holder) status.Unit {
		return status.Unit{
			ID: fmt.Sprint("MIG-", at), Index: fmt.Sprint("1:", at), Profile: profile, Placement: &mig.Placement{Start: start, Size: size}, Memory: uint64(size) * 9 << 30,
			Resource: "nvidia.com/mig-" + profile, Replicas: 1, Health: healthy, Holders: holders,
		}
	}
	resource := func(name, how string, devices, healthy, held, free int) status.Resource {
		return status.Resource{Name: name, Strategy: how, Devices: devices, Healthy: healthy, Held: &held, Free: &free, Streams: 1}
	}
	ref := nodereport.ProfileRef{Name: "mixed", Source: "ConfigMap virgate/profiles", Generation: "3f9c51d2a807", By: "label nvidia.com/device-plugin.config"}
	return status.Status{
		Node: "gpu-node-1", Version: "v0.1.0", Role: status.RoleServing, Ready: true, At: now, HoldersAt: &now, KubeletKnown: true, HoldersKnown: true, Attributed: true,
		Profile: status.Profile{State: nodereport.ProfileApplied, Since: now.Add(-2 * time.Hour), Wanted: ref, Applied: &ref},
		Resources: []status.Resource{
			resource("nvidia.com/gpu.shared", "time-slicing", 8, 4, 5, 1),
			resource("nvidia.com/mig-1g.10gb", "exclusive", 1, 1, 0, 1),
			resource("nvidia.com/mig-2g.20gb", "exclusive", 1, 1, 1, 0),
			resource("nvidia.com/mig-3g.40gb", "exclusive", 1, 1, 1, 0),
		},
		GPUs: []status.GPU{
			gpu(0, healthy, use(0.62, 31, 54), whole(0, "nvidia.com/gpu.shared", 4, healthy, holder("search", "ranking-7d9f", 0.31, 14), holder("search", "ranking-x2kq", 0.22, 9), holder("vision", "labels-0", 0.09, 8))),
			gpu(1, healthy, use(0.4, 22, 51), part(0, 0, 4, "3g.40gb", holder("research", "eval-3", 0.3, 16)), part(1, 4, 2, "2g.20gb", holder("vision", "detect-1", 0.1, 6)), part(2, 6, 1, "1g.10gb")),
			gpu(2, faulty, use(0, 5, 38), whole(2, "nvidia.com/gpu.shared", 4, faulty, holder("search", "index-5", 0, 3), holder("vision", "labels-1", 0, 2))),
		},
	}
}

// TestPicture checks that docs/status.svg is the page of that node. It has the page's own markup and style and
// loads nothing, so it can be used as an image.
func TestPicture(t *testing.T) {
	t.Parallel()
	const path, width, height = "../../docs/status.svg", 1240, 930
	body := drawn(t, pictured(time.Date(2026, 11, 2, 9, 30, 0, 0, time.UTC)), time.Date(2026, 11, 2, 9, 30, 0, 0, time.UTC))
	_, body, _ = strings.Cut(body, "<main>")
	body, _, _ = strings.Cut(body, "</main>")
	style, err := files.ReadFile("page.css")
	if err != nil {
		t.Fatal(err)
	}
	body = strings.ReplaceAll(body, "<svg ", `<svg xmlns="http://www.w3.org/2000/svg" `)
	got := fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d"><title>The status page of a node</title><style>
%s body { height: 100%%; }</style>
<foreignObject width="100%%" height="100%%"><body xmlns="http://www.w3.org/1999/xhtml"><main>%s</main></body></foreignObject></svg>
`, width, height, strings.ReplaceAll(string(style), "&", "&amp;"), body)
	for decoder := xml.NewDecoder(strings.NewReader(got)); ; {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the page is no XML: %v", err)
		}
	}
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("go test ./internal/page -run TestPicture -update writes it (-want +got):\n%s", diff)
	}
}
