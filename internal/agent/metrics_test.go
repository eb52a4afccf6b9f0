package agent

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/sharing"
)

var update = flag.Bool("update", false, "write the table of docs/reference/metrics.md anew")

const (
	metricsDocument = "../../docs/reference/metrics.md"
	tableBegins     = "<!-- The table is made from the program by go test ./internal/agent -run TestMetricsDocument -update -->\n"
	tableEnds       = "<!-- end of the table -->\n"
)

// family is a metric's descriptor, parsed.
type family struct{ name, help, labels string }

// kind follows from the name, by Prometheus's naming rules.
func (f family) kind() string {
	switch {
	case strings.HasSuffix(f.name, "_total"):
		return "counter"
	case strings.HasSuffix(f.name, "_duration_seconds"), f.name == "virgate_switch_schedulable_seconds":
		return "histogram"
	default:
		return "gauge"
	}
}

// families are all possible metrics of a scrape, parsed from the text of their descriptors.
func families(t *testing.T, collector prometheus.Collector) []family {
	t.Helper()
	form := regexp.MustCompile(`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"),.* constLabels: \{.*\}, variableLabels: \{(.*)\}\}$`)
	descriptions := make(chan *prometheus.Desc)
	go func() {
		defer close(descriptions)
		collector.Describe(descriptions)
	}()
	var list []family
	for description := range descriptions {
		match := form.FindStringSubmatch(description.String())
		if match == nil {
			t.Fatalf("descriptor of another form: %s", description)
		}
		name, err := strconv.Unquote(match[1])
		if err != nil {
			t.Fatal(err)
		}
		help, err := strconv.Unquote(match[2])
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(name, "virgate_") {
			list = append(list, family{name, help, strings.ReplaceAll(match[3], ",", ", ")})
		}
	}
	slices.SortFunc(list, func(a, b family) int { return cmp.Compare(a.name, b.name) })
	return list
}

// complete is an agent that registers every collector.
func complete(t *testing.T) *watch {
	w := newWatch(t, "dgx-a100", 4)
	w.Health = eventful{}
	w.DRA = drapath.Options{Driver: &fakeDRA{written: time.Now()}, Claims: claims.NewTable(claims.Options{})}
	w.ClaimCalls = nodemetrics.NewClaimCalls()
	w.Announcements = func() map[string]uint64 { return map[string]uint64{"written": 1} }
	w.pod("one", 0, mebibyte, 10)
	w.sampleNow()
	return w
}

// eventful is a node with one of each event.
type eventful struct{}

func (eventful) Health() sharing.HealthReport {
	return sharing.HealthReport{
		Units:       []sharing.UnitHealth{{Unit: "GPU-a", GPU: "GPU-a", State: sharing.Healthy}},
		Monitors:    []sharing.HealthMonitor{{GPU: "GPU-a"}},
		Transitions: []sharing.TransitionCount{{GPU: "GPU-a", From: sharing.Healthy, To: sharing.Suspect, Cause: sharing.CauseXID, Count: 1}},
		XIDs:        []sharing.XIDCount{{GPU: "GPU-a", XID: "94", Action: sharing.SuspectError, Count: 1}},
	}
}

// TestMetricsDocument keeps docs/reference/metrics.md true.
func TestMetricsDocument(t *testing.T) {
	t.Parallel()
	var table strings.Builder
	table.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, f := range families(t, complete(t).view.registry()) {
		labels := ""
		if f.labels != "" {
			labels = "`" + f.labels + "`"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", f.name, f.kind(), labels, f.help)
	}
	text, err := os.ReadFile(metricsDocument)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegins)
	old, after, ends := strings.Cut(rest, tableEnds)
	if !begins || !ends {
		t.Fatalf("no table between %q and %q", tableBegins, tableEnds)
	}
	if old == table.String() {
		return
	}
	if !*update {
		t.Fatal("docs/reference/metrics.md is not what the program has: run the test with -update")
	}
	if err := os.WriteFile(metricsDocument, []byte(before+tableBegins+table.String()+tableEnds+after), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestMetricsAreSent finds a metric that is listed and never sent: code that sends one has its name in quotes.
func TestMetricsAreSent(t *testing.T) {
	t.Parallel()
	var code strings.Builder
	for _, folder := range []string{".", "../nodemetrics", "../../sharing/metrics"} {
		files, err := filepath.Glob(folder + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(text)
		}
	}
	for _, f := range families(t, complete(t).view.registry()) {
		name := strings.TrimPrefix(f.name, "virgate_")
		if !strings.Contains(code.String(), strconv.Quote(name)) && !strings.Contains(code.String(), "Name: "+strconv.Quote(f.name)) {
			t.Errorf("nothing sends %s", f.name)
		}
	}
}

// TestMetricsAreWhatTheDocumentSays checks that a scrape has no undocumented families, that types follow from
// their names, and that Prometheus's linter finds nothing.
func TestMetricsAreWhatTheDocumentSays(t *testing.T) {
	t.Parallel()
	w := complete(t)
	registry := w.view.registry()
	kinds := map[string]string{}
	for _, f := range families(t, registry) {
		kinds[f.name] = f.kind()
		if !strings.HasSuffix(f.help, ".") {
			t.Errorf("%s: want a sentence, got %q", f.name, f.help)
		}
	}
	gathered, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range gathered {
		if kind := strings.ToLower(f.GetType().String()); strings.HasPrefix(f.GetName(), "virgate_") && kind != kinds[f.GetName()] {
			t.Errorf("%s is a %s, documented as %q", f.GetName(), kind, kinds[f.GetName()])
		}
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}

func TestMetricsAreLinted(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	r.shows(8)
	problems, err := testutil.GatherAndLint(r.agent.view.registry())
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		if strings.HasPrefix(problem.Metric, "virgate_") {
			t.Errorf("%s: %s", problem.Metric, problem.Text)
		}
	}
}
