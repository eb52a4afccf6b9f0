// Package scenario runs scripts against the whole program. Each script in this folder checks one behaviour,
// which its name and its first line tell: an invariant of docs/explanation/architecture.md, a bug that
// users of another plugin met, how to live with the kubelet, a case from NVIDIA's documents, or a promise
// of the command line.
//
// The program is a separate process, built once for all scripts, between a simulated node inside it and a
// simulated kubelet inside the test. A script fails at its end if the kubelet saw any breach of its
// contract, or if the program had a data race or a panic.
//
// Scripts are those of github.com/rogpeppe/go-internal/testscript, with the commands that the function
// commands lists. A command that waits does so for a condition, with a generous limit. To check that
// something did not happen, a script first waits for something that did.
package scenario

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/virgate/virgate/internal/nvml"
)

func TestMain(m *testing.M) {
	flag.Parse()
	// Scripts mostly wait, so more of them than processors can run at once.
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set("6")
	}
	m.Run()
}

// timed ends the names of scripts in which the program must not run into a deadline. They run one after
// another, before all others.
const timed = "-in-time.txt"

func TestScripts(t *testing.T) {
	place, err := newSite()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(place.dir); err != nil {
			t.Error(err)
		}
	})
	var played atomic.Bool
	t.Cleanup(func() {
		if !played.Load() {
			t.Error("no script has been played: -run names them as TestScripts/together/NAME or TestScripts/alone/NAME, without .txt")
		}
	})
	play := func(t *testing.T, files ...string) {
		testscript.Run(t, testscript.Params{Files: files, Cmds: commands(), RequireUniqueNames: true, Setup: func(env *testscript.Env) error {
			played.Store(true)
			return place.setStage(env)
		}})
	}
	var others []string
	for _, file := range scripts(t) {
		if !strings.HasSuffix(file, timed) {
			others = append(others, file)
			continue
		}
		t.Run("alone", func(t *testing.T) { play(t, file) })
	}
	t.Run("together", func(t *testing.T) { play(t, others...) })
}

// TestUsedUp checks which waits count as a deadline that was used up.
func TestUsedUp(t *testing.T) {
	abandoned := func(after time.Duration) string {
		return (&nvml.AbandonedError{Call: "EventSetWait", After: after}).Error()
	}
	for output, want := range map[string]bool{
		abandoned(30 * time.Second):                                                           true,
		abandoned(30001 * time.Millisecond):                                                   true,
		abandoned(time.Minute):                                                                true,
		abandoned(501 * time.Millisecond):                                                     false,
		abandoned(1200 * time.Millisecond):                                                    false,
		`msg="not written, trying again" error="context deadline exceeded"`:                   true,
		`msg="a change was not announced to the scheduler" error="context deadline exceeded"`: false,
		"msg=\"a change was not announced\" error=\"context deadline exceeded\"\nmsg=list error=DeadlineExceeded": true,
	} {
		if err := usedUp(output); (err != nil) != want {
			t.Errorf("%s: %v", output, err)
		}
	}
}

// TestScriptsSayWhatTheyHold checks the form of names and first lines, and that every invariant that a
// script can check has one.
func TestScriptsSayWhatTheyHold(t *testing.T) {
	missing := map[string]bool{"1": true, "2": true, "3": true, "4": true, "5": true, "6": true, "7": true, "8": true, "9": true, "10": true}
	form := regexp.MustCompile(`^(?:invariant-(\d+)|peer-b\d+|kubelet|case|cli|cluster|status|metrics)-[a-z0-9-]+\.txt$`)
	for _, file := range scripts(t) {
		match := form.FindStringSubmatch(file)
		if match == nil {
			t.Errorf("%s: want a name like invariant-1-…, peer-b1-…, kubelet-…, case-…, cli-…, cluster-…, status-… or metrics-…", file)
			continue
		}
		delete(missing, match[1])
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if first, _, _ := strings.Cut(string(text), "\n"); !strings.HasPrefix(first, "# ") || !strings.HasSuffix(first, ".") {
			t.Errorf("%s: want a first line that says in a sentence what the script holds, got %q", file, first)
		}
	}
	for number := range missing {
		t.Errorf("no script holds invariant %s", number)
	}
}

func scripts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	return files
}
