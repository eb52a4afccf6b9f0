package scenario

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
)

// patience is how long a condition may take to come true. A script that is
// right never waits that long, on the slowest machine neither.
const patience = 30 * time.Second

// stage is what one script plays on.
type stage struct {
	site
	// home has the script's sockets and its profile.
	home string
	// kubelet is nil before the script starts it.
	kubelet *simkubelet.Kubelet
	// programs are those started last under each name, all those ever started.
	programs map[string]*process
	all      []*process
	// hasProfile says that the script has put a profile into place.
	hasProfile bool
	// gpus are the boards of the node that was started last, as they are at the
	// start.
	gpus []sharing.GPU
	// held are the devices of each pod when the script first asked.
	held map[string][]string
	// marked is the kubelet's state at the last mark.
	marked *simkubelet.Snapshot
}

type stageKey struct{}

// promptEnd takes back the second that a program with the race detector sleeps
// before it exits.
const promptEnd = "GORACE=atexit_sleep_ms=0"

// setStage prepares a script.
func (s site) setStage(env *testscript.Env) error {
	home, err := os.MkdirTemp(s.dir, "s")
	if err != nil {
		return err
	}
	set := &stage{site: s, home: home, programs: map[string]*process{}, held: map[string][]string{}}
	env.Values[stageKey{}] = set
	env.Setenv("PATH", filepath.Dir(s.binary)+string(os.PathListSeparator)+env.Getenv("PATH"))
	env.Setenv("STAGE", set.home)
	env.Setenv("PLUGINS", set.plugins())
	env.Vars = append(env.Vars, promptEnd)
	env.Setenv("REPOSITORY", s.repository)
	env.Defer(func() { set.end(env.T()) })
	return nil
}

// plugins is the kubelet's device-plugins directory.
func (s *stage) plugins() string { return filepath.Join(s.home, "dp") }

// podResources is the path of the kubelet's PodResources socket.
func (s *stage) podResources() string { return filepath.Join(s.home, "pr.sock") }

// profile is the path of the profile that the script replaces.
func (s *stage) profile() string { return filepath.Join(s.home, "profile.yaml") }

// end stops everything and judges what went on behind the script's back.
func (s *stage) end(t testscript.T) {
	var wrong []string
	for _, p := range s.all {
		p.kill()
		for _, sign := range []string{"WARNING: DATA RACE", "panic: ", "fatal error: "} {
			if strings.Contains(p.log.String(), sign) {
				wrong = append(wrong, fmt.Sprintf("%s: %s", p.name, sign))
			}
		}
	}
	if s.kubelet != nil {
		if err := s.kubelet.Stop(context.Background()); err != nil {
			wrong = append(wrong, err.Error())
		}
		wrong = append(wrong, s.kubelet.Violations()...)
	}
	if result, ok := t.(interface{ Failed() bool }); len(wrong) > 0 || ok && result.Failed() {
		for _, p := range s.all {
			t.Log("the log of", p.name+":\n"+p.log.String())
		}
	}
	if err := os.RemoveAll(s.home); err != nil {
		wrong = append(wrong, err.Error())
	}
	if len(wrong) > 0 {
		t.Fatal(strings.Join(wrong, "\n"))
	}
}
