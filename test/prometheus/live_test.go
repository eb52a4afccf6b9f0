package prometheus

import (
	"flag"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/program"
)

var update = flag.Bool("update", false, "write the answers to the questions; look at them before you keep them")

const answersFile = "testdata/answers.txt"

// TestLive has a real Prometheus scrape four running programs: the demo, with pods and processes on a
// simulated node, a program without a kubelet that refuses its profile, and the demos of limits.
func TestLive(t *testing.T) {
	tool(t, "prometheus")
	virgate, err := program.Build(t.TempDir(), "virgate")
	if err != nil {
		t.Fatal(err)
	}
	demo, err := program.Build(t.TempDir(), "virgate-demo")
	if err != nil {
		t.Fatal(err)
	}
	targets := []scraped{{"demo", startDemo(t, demo)}, {"refusing", startRefusing(t, virgate)}, {"limits", startLimits(t, demo, "guard")}, {"mps", startLimits(t, demo, "mps")}}
	s := startServer(t, targets...)

	t.Run("questions", func(t *testing.T) { askQuestions(t, s) })
	t.Run("rules", func(t *testing.T) { checkRules(t, s) })
	t.Run("queries", func(t *testing.T) { checkQueries(t, s, targets...) })
}

var listens = regexp.MustCompile(`msg="http listens" address=(\S+)`)

func startDemo(t *testing.T, path string) (address string) {
	t.Helper()
	demo := start(t, path, "--serve", "--verbose", "--listen", "127.0.0.1:0")
	demo.await(t, regexp.MustCompile(`(Serving on)`))
	return demo.await(t, listens)
}

// startRefusing starts a program without a kubelet on a node that it may partition, with a good profile,
// and then breaks the profile.
func startRefusing(t *testing.T, virgate string) (address string) {
	t.Helper()
	dir := t.TempDir()
	profile := filepath.Join(dir, "profile.yaml")
	write := func(text string) {
		if err := os.WriteFile(profile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("version: v1\nflags: {migStrategy: mixed}\nmig: {manage: true, config: all-1g.6gb}\n")
	refusing := start(t, virgate, "run", "--node", "sim:a30x4+all-1g.6gb", "--config", profile, "--device-plugin-dir", dir,
		"--pod-resources-socket", "", "--control-socket", "", "--listen", "127.0.0.1:0")
	address = refusing.await(t, listens)
	refusing.await(t, regexp.MustCompile(`msg="(profile in force)"`))
	write("version: v1\nsharing: nothing\n")
	refusing.await(t, regexp.MustCompile(`(profile rejected)`))
	return address
}

func startLimits(t *testing.T, path, scenario string) (address string) {
	t.Helper()
	limits := start(t, path, "--scenario", scenario, "--serve", "--verbose", "--listen", "127.0.0.1:0")
	limits.await(t, regexp.MustCompile(`(Serving on)`))
	return limits.await(t, listens)
}

// askQuestions checks the answers to the questions of docs/reference/queries.md. Their series come with the
// samples of use, so it repeats them until they are right.
func askQuestions(t *testing.T, s server) {
	answer := func() string {
		var text strings.Builder
		for _, q := range questions(t) {
			lines, err := s.vector(q.text)
			if err != nil {
				t.Fatalf("question %s: %v", q.number, err)
			}
			fmt.Fprintf(&text, "%s. %s\n", q.number, q.title)
			for _, line := range lines {
				fmt.Fprintf(&text, "   %s\n", line)
			}
		}
		return text.String()
	}
	if *update {
		got, same := answer(), 0
		poll(t, func() bool {
			last := got
			if got = answer(); got != last {
				same = 0
			}
			same++
			return same == 20
		})
		if err := os.WriteFile(answersFile, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(answersFile)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	if !poll(t, func() bool { got = answer(); return got == string(want) }) {
		t.Errorf("answers (-want +got):\n%s", cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")))
	}
}

// checkQueries checks that every query can be evaluated over real series, and that none names a metric or a
// label that the programs lack: such a query silently finds nothing.
func checkQueries(t *testing.T, s server, targets ...scraped) {
	var problems []string
	poll(t, func() bool { // Recorded series come a little later than others.
		known, err := s.series()
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range targets {
			for metric, labels := range exposed(t, target.address) {
				known[metric] = append(known[metric], labels...)
			}
		}
		maps.Copy(known, ofOthers())
		maps.Copy(known, ofClusters(t))
		problems = nil
		for _, q := range queries(t) {
			if _, err := s.vector(q.text); err != nil {
				problems = append(problems, fmt.Sprintf("%s: %v", q.place, err))
			}
			for _, problem := range scan(q.text).unknown(known) {
				problems = append(problems, q.place+": "+problem)
			}
		}
		return len(problems) == 0
	})
	for _, problem := range problems {
		t.Error(problem)
	}
}

// ofClusters returns the metrics of nodes with an API server, which serve claims and announce their numbers
// of devices, from docs/reference/metrics.md.
func ofClusters(t *testing.T) map[string][]string {
	t.Helper()
	known := documentedMetrics(t)
	maps.DeleteFunc(known, func(metric string, _ []string) bool {
		return !slices.ContainsFunc([]string{"virgate_announcements_", "virgate_claim", "virgate_dra_", "virgate_switch_schedulable_"}, func(prefix string) bool {
			return strings.HasPrefix(metric, prefix)
		})
	})
	for metric, labels := range known {
		known[metric] = append(labels, "node")
	}
	return known
}

// checkRules checks that every rule can be evaluated over real series, and that the alerts which the two
// nodes cause are pending or firing.
func checkRules(t *testing.T, s server) {
	var data struct {
		Groups []struct {
			Rules []struct{ Name, State, Health, LastError string }
		}
	}
	wanted := map[string]bool{
		"VirgateGPUUnhealthy": true, "VirgateProfileRejected": true, "VirgateNoStream": true, "VirgateTenantsMixed": true,
		"VirgateMemoryOverShare": true, "VirgateUnattributedMemory": true,
	}
	due := func() (missing []string) {
		if err := s.ask("rules", url.Values{}, &data); err != nil {
			t.Fatal(err)
		}
		for _, group := range data.Groups {
			for _, rule := range group.Rules {
				if rule.Health != "ok" {
					missing = append(missing, fmt.Sprintf("%s: health %s: %s", rule.Name, rule.Health, rule.LastError))
				}
				if wanted[rule.Name] && rule.State != "pending" && rule.State != "firing" {
					missing = append(missing, fmt.Sprintf("alert %s is %s", rule.Name, rule.State))
				}
			}
		}
		return missing
	}
	var missing []string
	poll(t, func() bool { missing = due(); return len(missing) == 0 })
	for _, problem := range missing {
		t.Error(problem)
	}
}

// poll calls ask until it returns true, and reports whether it did: Prometheus does not notify of changes.
func poll(t *testing.T, ask func() bool) bool {
	t.Helper()
	limit := time.NewTimer(await.Patience)
	defer limit.Stop()
	pause := time.NewTicker(500 * time.Millisecond)
	defer pause.Stop()
	for !ask() {
		select {
		case <-pause.C:
		case <-limit.C:
			return false
		}
	}
	return true
}
