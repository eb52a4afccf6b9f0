package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/walk"
)

// testDocuments types the commands of README.md, docs/tutorial/getting-started.md and, of docs/how-to,
// install.md, upgrade.md and remove.md, word for word but for the node's name. Docker, the registry and
// make's use of Go are replaced by scripts, and README's node has simulated GPUs.
func testDocuments(t *testing.T, c *cluster) {
	c.uninstall(t)
	c.ctr(t, "images", "tag", "docker.io/library/virgate:"+version, "docker.io/library/busybox:1.37") // It has a shell too.
	gpus := func(count int64) func(*testing.T) {
		return func(t *testing.T) { c.awaitAllocatable(t, map[string]int64{"nvidia.com/gpu": count}) }
	}
	newcomer := c.newReader(t)
	began := time.Now()
	newcomer.read(t, "README.md", map[string]func(*testing.T){
		"helm install": func(t *testing.T) {
			gpus(8)(t)
			c.report.note("README's first command to allocatable", took(began))
		},
		"config.default=time-slicing-4": gpus(32),
		"config=time-slicing-10":        gpus(80),
	})
	newcomer.read(t, "docs/how-to/install.md", nil)
	newcomer.read(t, "docs/how-to/upgrade.md", map[string]func(*testing.T){
		"image.tag=0.1.1": func(t *testing.T) {
			c.await(t, "the next version", func() error {
				if got := c.plugin(t).Spec.Containers[0].Image; got != "registry.example.com/gpu/virgate:0.1.1" {
					return fmt.Errorf("the pod has the image %s", got)
				}
				return nil
			})
		},
	})
	// A second reader types the commands again that the upgrade has typed.
	c.newReader(t).read(t, "docs/how-to/remove.md", map[string]func(*testing.T){"helm uninstall": c.nodeIsClean})
	c.label(t, "")
	c.ctr(t, "images", "rm", "docker.io/library/virgate:"+version) // make and ctr bring it back.
	c.newReader(t).read(t, "docs/tutorial/getting-started.md", map[string]func(*testing.T){
		"config=time-slicing-10": gpus(80),
		"sim xid":                gpus(70),
		"helm uninstall":         c.nodeIsClean,
	})
	c.await(t, "Virgate's pods to end", func() error {
		pods, err := c.client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("there are %d", len(pods.Items))
		}
		return err
	})
}

// played are scripts that replace the real programs for the reader.
var played = map[string]string{
	// The node can have an image once it was built and pushed.
	"docker": `case $1 in
build) while [[ $# -gt 1 ]]; do [[ $1 == --tag ]] && echo "$2" >>"$0.built"; shift; done;;
push) grep -qxF -- "$2" "$0.built" && exec ctr -n k8s.io images tag docker.io/library/virgate:` + version + ` "$2";;
*) exit 2;;
esac`,
	// make image-tar needs to provide only the archive, which already exists.
	"go": `while [[ $# -gt 1 ]]; do
case $1 in -output) output=$2;; -reference) [[ $2 == virgate:` + version + ` ]] || exit 1; ln -s "$ARCHIVE" "$output";; esac; shift
done`,
}

// reader is a user in a shell, at the top of a clone.
type reader struct {
	c           *cluster
	top         string
	environment []string
	variables   string          // variables that the user has set
	typed       map[string]bool // what an earlier document has typed already
	running     *exec.Cmd       // running in the other terminal
}

func (c *cluster) newReader(t *testing.T) *reader {
	t.Helper()
	// The path is short, because sockets lie below it.
	top, err := os.MkdirTemp("", "top")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(top) })
	repository, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	links := map[string]string{
		"bin/virgate":  c.path("virgate"),
		"path/kubectl": c.path("kubectl"),
		"path/helm":    filepath.Join(c.tools, "helm"),
		"path/ctr":     filepath.Join(c.tools, "ctr"),
	}
	for _, name := range []string{"charts", "cmd", "configs", "deployments", "Makefile"} {
		links[name] = filepath.Join(repository, name)
	}
	for name, to := range links {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(top, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, filepath.Join(top, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range played {
		if err := os.WriteFile(filepath.Join(top, "path", name), []byte("#!/bin/bash\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return &reader{c: c, top: top, typed: map[string]bool{}, environment: append(os.Environ(),
		"PATH="+filepath.Join(top, "path")+":"+os.Getenv("PATH"), "KUBECONFIG="+c.path("admin.conf"), "HOME="+top, "MAKEFLAGS=", "ARCHIVE="+c.path("virgate.tar"))}
}

// ctr is containerd's own command.
func (c *cluster) ctr(t *testing.T, arguments ...string) {
	t.Helper()
	arguments = append([]string{"--namespace", "k8s.io"}, arguments...)
	if output, err := exec.Command(filepath.Join(c.tools, "ctr"), arguments...).CombinedOutput(); err != nil {
		t.Fatalf("ctr %q: %v\n%s", arguments, err, output)
	}
}

// read types the document's commands. After each command that contains a text of look, it calls that
// function.
func (r *reader) read(t *testing.T, document string, look map[string]func(*testing.T)) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../..", document))
	if err != nil {
		t.Fatal(err)
	}
	looked, before := map[string]bool{}, maps.Clone(r.typed)
	for _, command := range walk.Commands(string(text)) {
		r.typed[command.Text] = true
		if before[command.Text] {
			continue
		}
		where := fmt.Sprintf("%s:%d: %s", document, command.Line, command.Text)
		t.Log(where)
		r.enter(t, where, command)
		for after, look := range look {
			if strings.Contains(command.Text, after) {
				looked[after] = true
				look(t)
			}
		}
	}
	for after := range look {
		if !looked[after] {
			t.Errorf("%s has no command with %q", document, after)
		}
	}
	r.interrupt(t)
}

var (
	assignment = regexp.MustCompile(`^([A-Z]+)=\S+$`)
	// planned matches the answer to curl that a comment gives.
	planned = regexp.MustCompile(`(\d+) (devices|healthy)`)
)

// enter types one command.
func (r *reader) enter(t *testing.T, where string, command walk.Command) {
	t.Helper()
	text := strings.ReplaceAll(command.Text, "/tmp/virgate", filepath.Join(r.top, "hand"))
	if set := assignment.FindStringSubmatch(text); set != nil {
		if set[1] == "NODE" {
			text = "NODE=" + hostName
		}
		r.variables += text + "\n"
		return
	}
	if strings.HasPrefix(text, "bin/virgate run ") {
		r.running = r.shell(context.WithoutCancel(t.Context()), "exec "+text)
		if err := r.running.Start(); err != nil {
			t.Fatal(err)
		}
		return
	}
	if strings.HasPrefix(text, "helm install ") && !strings.Contains(text, "node=") {
		text += " --set node=sim:dgx-a100"
	}
	asks := strings.Contains(text, "curl ")
	try := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
		defer cancel()
		output, err := r.shell(ctx, text).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w\n%s", err, output)
		}
		if command.Want != "" && !command.Shows(string(output)) {
			return fmt.Errorf("it does not show\n%s\nbut\n%s", command.Want, output)
		}
		if _, comment, ok := strings.Cut(text, " #"); ok && asks {
			for _, said := range planned.FindAllStringSubmatch(comment, -1) {
				if want := fmt.Sprintf("%q: %s,", said[2], said[1]); !strings.Contains(string(output), want) {
					return fmt.Errorf("the answer has no %s\n%s", want, output)
				}
			}
		}
		return nil
	}
	if command.Want != "" || asks {
		r.c.await(t, where, try) // A user tries again.
	} else if err := try(); err != nil {
		t.Fatalf("%s: %v", where, err)
	}
}

func (r *reader) shell(ctx context.Context, text string) *exec.Cmd {
	command := exec.CommandContext(ctx, "bash", "-e", "-c", r.variables+text)
	command.Dir, command.Env = r.top, slices.Clone(r.environment)
	return command
}

// interrupt presses Ctrl-C in the other terminal.
func (r *reader) interrupt(t *testing.T) {
	t.Helper()
	if r.running == nil {
		return
	}
	if err := r.running.Process.Signal(syscall.SIGINT); err != nil {
		t.Error(err)
	}
	if err := r.running.Wait(); err != nil {
		t.Errorf("bin/virgate run: %v", err)
	}
	r.running = nil
}
