package page

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/repeat"
)

// clusterOf returns that many nodes with 8 GPUs each: shared, whole and with partitions, some unhealthy,
// some without a status page. In each round one in fifteen has other holders, as if all of them changed
// within the 30 s in which a Watcher reads each status page once, while the page asks every 2 s.
func clusterOf(count, round int) *cluster.Snapshot {
	s := &cluster.Snapshot{At: time.Now(), Statuses: map[string]cluster.Status{}}
	healthy := status.Health{State: sharing.Healthy}
	for i := range count {
		name := fmt.Sprintf("gpu-%04d", i)
		node := cluster.Node{Name: name, Wanted: "inference", State: "applied", Applied: "inference", Generation: "3f9c", Capacity: map[string]int64{"nvidia.com/gpu": 32}, Allocatable: map[string]int64{"nvidia.com/gpu": 32}}
		page := &status.Status{Node: name, Role: status.RoleServing, Ready: true, HoldersKnown: true, Profile: status.Profile{
			State: nodereport.ProfileApplied, Wanted: nodereport.ProfileRef{Name: "inference"}, Applied: &nodereport.ProfileRef{Name: "inference", Generation: "3f9c"},
		}, Resources: []status.Resource{{Name: "nvidia.com/gpu", Strategy: "time-slicing"}}}
		requested := int64(0)
		for g := range 8 {
			uuid := fmt.Sprintf("GPU-%04d-%d", i, g)
			gpu := status.GPU{UUID: uuid, Index: g, Model: "NVIDIA H100 80GB HBM3", Memory: 80 << 30, Health: healthy}
			unit := status.Unit{ID: uuid, Index: strconv.Itoa(g), Resource: "nvidia.com/gpu", Replicas: 4, Health: healthy}
			if i%30 == round%30 || g < 7 {
				for h := range (i + g) % 4 {
					unit.Holders = append(unit.Holders, status.Holder{Namespace: []string{"vision", "search", "team-a", "batch"}[(i+h)%4], Pod: fmt.Sprintf("worker-%d-%d", i, 3*g+h), Container: "main", Devices: []string{strconv.Itoa(h)}})
					requested++
				}
			}
			gpu.Units = []status.Unit{unit}
			if i%5 == 4 {
				gpu.MIG, gpu.Units = true, nil
				for p, place := range []mig.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 2}, {Start: 6, Size: 1}} {
					part := status.Unit{ID: fmt.Sprintf("MIG-%d-%d", g, p), Index: fmt.Sprintf("%d:%d", g, p), Profile: []string{"3g.40gb", "2g.20gb", "1g.10gb"}[p], Placement: &place, Memory: uint64(place.Size) * 9 << 30, Resource: "nvidia.com/gpu", Replicas: 1, Health: healthy}
					if p < 2 && len(unit.Holders) > p {
						part.Holders = unit.Holders[p : p+1]
					}
					gpu.Units = append(gpu.Units, part)
				}
			}
			if i%17 == 3 && g == 2 {
				gpu.Health = status.Health{State: sharing.Unhealthy, Reason: "XID 79"}
				gpu.Units[0].Health = gpu.Health
				node.Allocatable["nvidia.com/gpu"] = 28
			}
			page.GPUs = append(page.GPUs, gpu)
		}
		switch i % 23 {
		case 7:
			page.Profile.State, page.Profile.Wanted.Name, page.Profile.Problem = nodereport.ProfileRejected, "training", "training:12: resource nvidia.com/gpu: 64 replicas are more than MPS serves"
		case 9:
			page.Profile.State, page.Profile.Wanted.Name = nodereport.ProfilePending, "training"
		}
		s.Statuses[name] = cluster.Status{Page: page}
		if i%41 == 12 {
			s.Statuses[name] = cluster.Status{Unread: "no answer within 2s"}
		}
		s.Nodes = append(s.Nodes, node)
		s.Pods = append(s.Pods, cluster.Pod{Namespace: "vision", Name: "worker-" + name, Node: name, Requests: map[string]int64{"nvidia.com/gpu": requested}})
	}
	return s
}

// watched is appended to the page's own script. It writes into the document how many milliseconds the page
// was busy at once: while it loaded, while it took in changes, and at worst since then. The style sheet
// delays the end of loading, for which --dump-dom waits.
const watched = `
const busy = { load: 0, since: 0, takes: [] };
const tell = list => {
  for (const e of list.getEntries()) {
    const time = Math.round(e.duration), name = busy.takes.length ? "since" : "load";
    if (e.entryType === "measure") busy.takes.push(time);
    else busy[name] = Math.max(busy[name], time);
  }
  document.body.dataset.busy = JSON.stringify(busy);
};
new PerformanceObserver(tell).observe({ type: "measure" });
new PerformanceObserver(tell).observe({ type: "longtask", buffered: true });
const hold = document.createElement("link");
hold.rel = "stylesheet";
hold.href = "hold.css";
document.head.append(hold);
`

// refreshes is how often the page requests tiles before the test looks at it.
const refreshes = 4

// clusterPage serves the page of that many nodes, with a new snapshot for each request of tiles. If watch
// is true, loading ends after enough requests.
func clusterPage(t *testing.T, count int, watch bool) (address string) {
	t.Helper()
	var asked atomic.Int64
	enough := make(chan struct{})
	var snapshot atomic.Pointer[cluster.Snapshot]
	snapshot.Store(clusterOf(count, 0))
	handler := cluster.NewPage(func() (*cluster.Snapshot, <-chan struct{}) { return snapshot.Load(), nil }).Handler("secret")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/secret/tiles":
			round := asked.Add(1)
			if snapshot.Store(clusterOf(count, int(round))); round == refreshes {
				close(enough)
			}
		case "/secret/hold.css":
			w.Header().Set("Content-Type", "text/css")
			select {
			case <-enough:
			case <-r.Context().Done():
			}
			return
		case "/secret/cluster.js":
			r.Header.Del("Accept-Encoding")
			defer func() {
				if watch {
					_, _ = w.Write([]byte(watched))
				}
			}()
		}
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

// TestClusterPage checks the page of kubectl virgate --serve in a browser, with 1, 50 and 1,000 nodes: the
// filters of its address apply, it takes in changes, and it does not break its own policy.
func TestClusterPage(t *testing.T) {
	t.Parallel()
	path := chromium(t)
	for _, count := range []int{1, 50, repeat.Times(300, 1000)} {
		t.Run(strconv.Itoa(count), func(t *testing.T) {
			t.Parallel()
			b := browser{t, path, clusterPage(t, count, true), "/secret/"}
			document, complaints := b.run("--dump-dom")
			if got := strings.Count(document, `<article class="tile`); got != count {
				t.Errorf("%d tiles", got)
			}
			if !strings.Contains(document, fmt.Sprintf(">%d of %d nodes</output>", count, count)) {
				t.Error("it does not say how many nodes it shows")
			}
			if !regexp.MustCompile(`takes&quot;:\[\d`).MatchString(document) {
				t.Error("it has taken in nothing new")
			}
			if strings.Contains(complaints, "CONSOLE") || strings.Contains(complaints, "Content Security Policy") {
				t.Errorf("the browser complains:\n%s", complaints)
			}
			t.Logf("%d bytes, busy: %s", len(document), regexp.MustCompile(`data-busy="[^"]*"`).FindString(document))
			b.address = clusterPage(t, count, false)
			for _, look := range []struct{ name, path, size, scheme string }{
				{"light", "/", "1400,1100", "1"}, {"dark", "/?group=profile", "1400,1100", "0"}, {"node", "/nodes/gpu-0000", "1200,1000", "1"},
			} {
				if count != 50 && look.name != "light" {
					continue
				}
				b.page = "/secret" + look.path
				picture := filepath.Join(screenshots(t), fmt.Sprintf("cluster-%d-%s.png", count, look.name))
				b.run("--window-size="+look.size, "--blink-settings=preferredColorScheme="+look.scheme, "--screenshot="+picture)
				if dark := isDark(t, picture); dark != (look.name == "dark") {
					t.Errorf("%s: dark is %v", look.name, dark)
				}
			}
		})
	}
	t.Run("narrow", func(t *testing.T) {
		t.Parallel()
		b := browser{t, path, clusterPage(t, 50, false), ""}
		b.checkNarrow(t, map[string]string{"cluster-all": "/secret/", "cluster-node": "/secret/nodes/gpu-0003", "cluster-unread": "/secret/nodes/gpu-0012"})
	})
	t.Run("filters", func(t *testing.T) {
		t.Parallel()
		var pages, want []string
		for query, nodes := range map[string]string{
			"?q=gpu-0007": "1 of 50", "?q=WORKER-6-": "1 of 50", "?q=h100+inference": "49 of 50", "?state=rejected": "2 of 50", "?state=pending": "2 of 50",
			"?q=none-such": "0 of 50", "?state=rejected&q=gpu-0030&group=model": "1 of 50",
		} {
			pages = append(pages, "/secret/"+query)
			want = append(want, "/secret/"+query+" "+nodes+" nodes")
		}
		b := browser{t, path, clusterPage(t, 50, false), ""}
		if got := b.framed(`page => page.querySelector("output").textContent`, pages); !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

// TestRenewal checks that a node's page takes in changes without a reload, and leaves the rest alone.
func TestRenewal(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	enough := make(chan struct{})
	handler := cluster.NewPage(func() (*cluster.Snapshot, <-chan struct{}) {
		s := clusterOf(1, 0)
		s.At = time.Date(2030, 1, 1, 0, 0, int(asked.Load()), 0, time.UTC)
		return s, nil
	}).Handler("secret")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/secret/nodes/gpu-0000":
			if asked.Add(1) == 3 { // The second answer is in the page.
				defer close(enough)
			}
		case "/secret/nodes/hold.css":
			w.Header().Set("Content-Type", "text/css")
			select {
			case <-enough:
			case <-r.Context().Done():
			}
			return
		case "/secret/page.js":
			r.Header.Del("Accept-Encoding")
			defer func() { _, _ = w.Write([]byte(held)) }()
		}
		handler.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	document, complaints := browser{t, chromium(t), strings.TrimPrefix(server.URL, "http://"), "/secret/nodes/gpu-0000"}.run("--dump-dom")
	if !regexp.MustCompile(`as of 2030-01-01 00:00:0[23] UTC`).MatchString(document) || !strings.Contains(document, `data-kept="true"`) || !strings.Contains(document, `<p id="lost" class="note bad" role="alert" hidden="">`) {
		t.Errorf("the page is not renewed in place:\n%s", document)
	}
	if strings.Contains(complaints, "CONSOLE") || strings.Contains(complaints, "Content Security Policy") {
		t.Errorf("the browser complains:\n%s", complaints)
	}
}

// held delays the end of loading, and then reports whether an unchanged element is still the same.
const held = `
const first = document.querySelector("h1"), hold = document.createElement("link");
hold.rel = "stylesheet";
hold.href = "hold.css";
hold.onload = () => { document.body.dataset.kept = document.contains(first); };
document.head.append(hold);
`
