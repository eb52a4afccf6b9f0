package scenario

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/virgate/virgate/internal/simkubelet"
)

// call is one command of a script under way.
type call struct {
	*stage
	script *testscript.TestScript
	// not is true if the command has a "!" before it.
	not       bool
	arguments []string
}

// commands are the commands of scripts in addition to testscript's own, which win where a name is used
// twice. A program without a name is @first.
func commands() map[string]func(*testscript.TestScript, bool, []string) {
	return map[string]func(*testscript.TestScript, bool, []string){
		// exits CODE PROGRAM ARGUMENT…: ends with that exit code.
		"exits": command((*call).exits),

		// start [@NAME] [VARIABLE=VALUE…] NODE [PROFILE] [--FLAG…]: virgate run.
		"start": acts((*call).start),
		// terminate [@NAME]: SIGTERM, and exit code 0. Until the end it must not run into a deadline.
		"terminate": acts((*call).terminate),
		// ask-to-end [@NAME]: SIGTERM alone.
		"ask-to-end": acts((*call).askToEnd),
		// crash [@NAME]: SIGKILL.
		"crash": acts((*call).crash),
		// hangup [@NAME]: SIGHUP.
		"hangup": acts((*call).hangup),
		// profile FILE: replaced as a whole. ! profile: removed.
		"profile": negatable((*call).replaceProfile),
		// mount DIR FILE: FILE is DIR/profile.yaml, as in a mounted ConfigMap.
		"mount": acts((*call).mount),
		// sim [@NAME] VERB ARGUMENT…: what virgate sim does.
		"sim": acts((*call).sim),
		// status [@NAME] ARGUMENT…: virgate status.
		"status": command((*call).status),
		// hears [@NAME] GPU [DRIVER'S INDEX]: waits until events of the GPU arrive, by an XID that is
		// harmless.
		"hears": command((*call).hears),
		// in-time [@NAME]: the program has not run into a deadline so far.
		"in-time": command((*call).inTime),
		// log [@NAME] REGEXP: waits for such a line. ! log REGEXP: the log has none so far.
		"log": negatable((*call).awaitLog),
		// kept REGEXP: waits until the state file matches. Faults and profiles get there later than to the kubelet.
		"kept": command((*call).kept),
		// ready [@NAME]: waits until it is ready. ! ready REGEXP: it is not, for that reason.
		"ready": negatable((*call).ready),
		// get [@NAME] PATH: the response becomes the command's standard output. ! get: the path does not
		// exist.
		"get": negatable((*call).get),
		// metric [@NAME] REGEXP: waits for a line that matches as a whole. ! metric REGEXP: waits until no
		// line matches.
		"metric": negatable((*call).metric),

		// node KEY=VALUE… KEY-…: sets labels of the Node n1, which has an API server:
		// KUBECONFIG=$STAGE/kubeconfig NODE_NAME=n1. node away, node back: its API server.
		"node": acts((*call).labelNode),
		// labelled KEY=VALUE…: waits until the Node has these labels.
		"labelled": command((*call).labelled),
		// condition STATUS REASON REGEXP: waits until the Node's condition has these values.
		"condition": command((*call).awaitCondition),
		// unload [@NAME]: waits until no process has the simulated driver open, and reloads it.
		"unload": acts((*call).unload),

		// kubelet start | stop | restart | silent | speaks | refuse N |
		// drop RESOURCE | wipe.
		"kubelet": acts((*call).kubeletDoes),
		// shows RESOURCE ALLOCATABLE/CAPACITY: waits for these numbers.
		"shows": command((*call).shows),
		// unit RESOURCE INDEX HEALTHY/LISTED: waits for these numbers of devices of the GPU (0) or
		// partition (0:1).
		"unit": command((*call).unit),
		// streams RESOURCE COUNTER=N…: opened, closed, registrations or lists, since the script began. A
		// kubelet that starts may get a registration for a socket that it has just removed, so there may be
		// one more.
		"streams": command((*call).streams),
		// mark: remembers what the kubelet lists, and its counters.
		"mark": command((*call).mark),
		// unchanged: everything is as it was at mark.
		"unchanged": command((*call).unchanged),

		// pod NAME RESOURCE=N… claim:DRIVER/DEVICE,ENTRY…: runs, with that device and CDI
		// entry from a DRA driver. ! pod NAME RESOURCE=N… REGEXP: is refused.
		"pod": negatable((*call).pod),
		// delete NAME.
		"delete": acts((*call).deletePod),
		// container-restart NAME.
		"container-restart": acts((*call).restartContainer),
		// allocate RESOURCE [ID…]: calls the program directly, with requests that no kubelet sends. !
		// allocate RESOURCE [ID…] REGEXP: the response is such an error.
		"allocate": negatable((*call).allocate),
		// prefers RESOURCE SIZE INDEX…: waits until the program would choose these units for a container
		// that requests this many devices.
		"prefers": command((*call).prefers),
		// holds NAME [healthy|unhealthy]: runs with the same devices as at the first holds, and waits until
		// the kubelet lists them with this health.
		"holds": command((*call).holds),
		// sees NAME INDEX…: it sees the UUIDs of exactly these units.
		"sees": command((*call).sees),
		// granted NAME REGEXP: the container's NVIDIA_VISIBLE_DEVICES.
		"granted": command((*call).granted),
		// nodes NAME REGEXP: the container's device nodes, sorted, with blanks between.
		"nodes": command((*call).nodes),
	}
}

// acts is command for one that changes something.
func acts(do func(*call) error) func(*testscript.TestScript, bool, []string) {
	return command(func(c *call) error {
		c.forget()
		return do(c)
	})
}

func negatable(do func(*call) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, not bool, arguments []string) {
		s, ok := ts.Value(stageKey{}).(*stage)
		if !ok {
			ts.Fatalf("no stage")
		}
		ts.Check(do(&call{stage: s, script: ts, not: not, arguments: arguments}))
	}
}

func command(do func(*call) error) func(*testscript.TestScript, bool, []string) {
	return negatable(func(c *call) error {
		if c.not {
			return errors.New("this command has no negation")
		}
		return do(c)
	})
}

var errUsage = errors.New("wrong arguments: see the function commands")

// take returns and removes the next argument, "" if none is left.
func (c *call) take() string {
	if len(c.arguments) == 0 {
		return ""
	}
	first := c.arguments[0]
	c.arguments = c.arguments[1:]
	return first
}

// name returns and removes the next argument if it is a program's name.
func (c *call) name() string {
	if len(c.arguments) > 0 && strings.HasPrefix(c.arguments[0], "@") {
		return c.take()
	}
	return "@first"
}

// program takes the name of a started program.
func (c *call) program() (*process, error) {
	name := c.name()
	p := c.programs[name]
	if p == nil {
		return nil, fmt.Errorf("no program %s was started", name)
	}
	return p, nil
}

// pattern takes the last argument, a regular expression in which ^ and $ match at lines.
func (c *call) pattern() (*regexp.Regexp, error) {
	if len(c.arguments) != 1 {
		return nil, errUsage
	}
	return regexp.Compile("(?m)" + c.take())
}

// await waits for a state of the kubelet. It also accepts one that the kubelet has had since the last command
// that changes something, because the program, a process of its own, may be faster than the script.
func (c *call) await(wanted func(simkubelet.Snapshot) bool) error {
	if c.kubelet == nil {
		return errors.New("the script has started no kubelet")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return c.kubelet.Await(ctx, func(now simkubelet.Snapshot) bool {
		c.states.Lock()
		defer c.states.Unlock()
		if found := slices.IndexFunc(c.passed, wanted); found >= 0 {
			c.passed = c.passed[found:]
			return true
		}
		return wanted(now)
	})
}

// forget forgets the states that have passed.
func (c *call) forget() {
	c.states.Lock()
	defer c.states.Unlock()
	c.passed = nil
}

// exits runs a program to its end.
func (c *call) exits() error {
	want := c.take()
	if len(c.arguments) == 0 {
		return errUsage
	}
	err := c.script.Exec(c.arguments[0], c.arguments[1:]...)
	got := "0"
	var failed interface{ ExitCode() int }
	switch {
	case errors.As(err, &failed):
		got = fmt.Sprint(failed.ExitCode())
	case err != nil:
		return err
	}
	if got != want {
		return fmt.Errorf("exit code %s, want %s", got, want)
	}
	return nil
}
