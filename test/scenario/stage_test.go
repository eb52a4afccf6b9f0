package scenario

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/program"
)

// patience is how long a condition may take to come true. A correct script never waits that long, even on
// the slowest machine.
const patience = program.Patience

// stage is what one script runs on.
type stage struct {
	site
	// home has the script's sockets and its profile.
	home string
	// api is nil before the script labels the Node.
	api *apiServer
	// kubelet is nil before the script starts it.
	kubelet *kubelettest.Kubelet
	// latest is the kubelet's state. passed has one for each change of its devices, from the last command that
	// changes something, or from the state that was last waited for. states guards both.
	states sync.Mutex
	latest simkubelet.Snapshot
	passed []simkubelet.Snapshot
	// programs are the last started ones of each name, all is every one ever started.
	programs map[string]*process
	all      []*process
	// hasProfile is true if the script has put a profile into place.
	hasProfile bool
	// gpus are the GPUs of the last started node, as they are at the start.
	gpus []sharing.GPU
	// held are the devices of each pod at the script's first question about them.
	held map[string][]string
	// marked is the kubelet's state at the last mark.
	marked *simkubelet.Snapshot
}

type stageKey struct{}

// promptEnd removes the second that a program with the race detector sleeps before it exits.
const promptEnd = "GORACE=atexit_sleep_ms=0"

// setStage prepares a script.
func (s site) setStage(env *testscript.Env) error {
	home, err := os.MkdirTemp(s.dir, "s")
	if err != nil {
		return err
	}
	set := &stage{site: s, home: home, programs: map[string]*process{}, held: map[string][]string{}}
	if err := os.Mkdir(set.plugins(), 0o750); err != nil {
		return err
	}
	env.Values[stageKey{}] = set
	env.Setenv("PATH", filepath.Dir(s.binary)+string(os.PathListSeparator)+env.Getenv("PATH"))
	env.Setenv("STAGE", set.home)
	env.Setenv("PLUGINS", set.plugins())
	env.Vars = append(env.Vars, promptEnd)
	env.Setenv("REPOSITORY", s.repository)
	env.Defer(func() { set.end(env.T()) })
	return nil
}

// plugins is the kubelet's device-plugins directory, which a node has from its first boot on.
func (s *stage) plugins() string { return filepath.Join(s.home, "dp") }

// podResources is the path of the kubelet's PodResources socket.
func (s *stage) podResources() string { return filepath.Join(s.home, "pr.sock") }

// profile is the path of the profile that the script replaces.
func (s *stage) profile() string { return filepath.Join(s.home, "profile.yaml") }

// end stops everything and checks what the script itself does not.
func (s *stage) end(t testscript.T) {
	var wrong []string
	for _, p := range s.all {
		p.Kill()
		for _, sign := range []string{"WARNING: DATA RACE", "panic: ", "fatal error: "} {
			if strings.Contains(p.Output(), sign) {
				wrong = append(wrong, fmt.Sprintf("%s: %s", p.name, sign))
			}
		}
	}
	if s.api != nil {
		s.api.CloseClientConnections()
		s.api.Close()
	}
	if s.kubelet != nil {
		if err := s.kubelet.Stop(context.Background()); err != nil {
			wrong = append(wrong, err.Error())
		}
		wrong = append(wrong, s.kubelet.Violations()...)
	}
	if result, ok := t.(interface{ Failed() bool }); len(wrong) > 0 || ok && result.Failed() {
		for _, p := range s.all {
			t.Log("the log of", p.name+":\n"+p.Output())
		}
	}
	if err := os.RemoveAll(s.home); err != nil {
		wrong = append(wrong, err.Error())
	}
	if len(wrong) > 0 {
		t.Fatal(strings.Join(wrong, "\n"))
	}
}

// site is what all scripts share.
type site struct {
	// repository is the module's folder.
	repository string
	// dir is for everything that the scripts make. Its path is short: that of a
	// unix socket has 107 bytes at most.
	dir string
	// binary is the program. Its folder, which is in the scripts' PATH, contains only it and the
	// demo.
	binary string
}

// newSite builds the program and the demo.
func newSite() (site, error) {
	repository, err := filepath.Abs("../..")
	if err != nil {
		return site{}, err
	}
	dir, err := os.MkdirTemp("", "vg")
	if err != nil {
		return site{}, err
	}
	binary, err := program.Build(filepath.Join(dir, "bin"), "virgate")
	if err == nil {
		_, err = program.Build(filepath.Join(dir, "bin"), "virgate-demo")
	}
	if err != nil {
		return site{}, errors.Join(err, os.RemoveAll(dir))
	}
	return site{repository: repository, dir: dir, binary: binary}, nil
}

// process is one virgate run.
type process struct {
	*program.Process
	name    string
	control string
}

// launch starts virgate run and returns when it serves HTTP.
func (s *stage) launch(name string, environment, arguments []string) (*process, error) {
	if old := s.programs[name]; old != nil && !old.HasEnded() {
		return nil, fmt.Errorf("program %s still runs", name)
	}
	control := filepath.Join(s.home, fmt.Sprintf("control%d.sock", len(s.all)))
	arguments = append([]string{
		"run", "--device-plugin-dir", s.plugins(), "--pod-resources-socket", s.podResources(),
		"--control-socket", control, "--listen", "127.0.0.1:0", "--rescan", "100ms", "--removal-delay", "200ms",
	}, arguments...)
	command := exec.Command(s.binary, arguments...)
	command.Env = append([]string{promptEnd}, environment...)
	command.Dir = s.home
	started, err := program.Start(command)
	if err != nil {
		return nil, err
	}
	p := &process{Process: started, name: name, control: control}
	s.programs[name] = p
	s.all = append(s.all, p)
	_, err = p.Address()
	return p, err
}

func (c *call) replaceProfile() error {
	c.forget()
	if c.not {
		return os.Remove(c.profile())
	}
	if len(c.arguments) != 1 {
		return errUsage
	}
	return c.putProfile(c.take())
}

// putProfile replaces the whole profile, as careful editors do.
func (c *call) putProfile(file string) error {
	data := c.script.ReadFile(file)
	next := c.profile() + ".new"
	if err := os.WriteFile(next, []byte(data), 0o600); err != nil {
		return err
	}
	c.hasProfile = true
	return os.Rename(next, c.profile())
}

// mount does what a kubelet does with a ConfigMap volume: a new folder for each
// version, the link ..data that moves to it in one step, and a link for each
// key that goes through ..data and never changes.
func (c *call) mount() error {
	if len(c.arguments) != 2 {
		return errUsage
	}
	volume := c.script.MkAbs(c.take())
	data := c.script.ReadFile(c.take())
	if err := os.MkdirAll(volume, 0o750); err != nil {
		return err
	}
	old, _ := os.Readlink(filepath.Join(volume, "..data"))
	version, err := os.MkdirTemp(volume, "..version_")
	if err != nil {
		return err
	}
	const key = "profile.yaml"
	if err := os.WriteFile(filepath.Join(version, key), []byte(data), 0o600); err != nil {
		return err
	}
	next := filepath.Join(volume, "..data_tmp")
	if err := os.Symlink(filepath.Base(version), next); err != nil {
		return err
	}
	if err := os.Rename(next, filepath.Join(volume, "..data")); err != nil {
		return err
	}
	if old == "" {
		return os.Symlink(filepath.Join("..data", key), filepath.Join(volume, key))
	}
	if err := os.RemoveAll(filepath.Join(volume, old)); err != nil {
		return fmt.Errorf("remove the old version: %w", err)
	}
	return nil
}
