package scenario

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/test/await"
	"github.com/virgate/virgate/test/kubelettest"
	"github.com/virgate/virgate/test/nvmltest"
)

var variable = regexp.MustCompile(`^[A-Z_]+=`)

func (c *call) start() error {
	name := c.name()
	var environment []string
	for len(c.arguments) > 0 && variable.MatchString(c.arguments[0]) {
		environment = append(environment, c.take())
	}
	node := c.take()
	simulated, ok := strings.CutPrefix(node, "sim:")
	if !ok {
		return errUsage
	}
	arguments := []string{"--node", node}
	if len(c.arguments) > 0 && !strings.HasPrefix(c.arguments[0], "--") {
		if err := c.putProfile(c.take()); err != nil {
			return err
		}
	}
	if c.hasProfile {
		arguments = append(arguments, "--config", c.profile())
	}
	library, err := simnode.New(simulated)
	if err != nil {
		return err
	}
	if c.gpus, err = nvml.Scan(library); err != nil {
		return err
	}
	_, err = c.launch(name, environment, append(arguments, c.arguments...))
	return err
}

func (c *call) terminate() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	kubelet := cmp.Or(c.kubelet, &kubelettest.Kubelet{})
	before := len(p.Output())
	hung, expired := kubelet.Hung()
	if err := p.Terminate(); err != nil {
		return err
	}
	// Calls that are still unanswered when the end begins must be abandoned, not waited for.
	if err := await.Condition(nil, func() error {
		pending, late := kubelet.Hung()
		switch {
		case late > expired:
			return await.Never("the end waited until the deadline of %d calls", late-expired)
		case pending > 0:
			return fmt.Errorf("of %d calls, %d still wait for the kubelet", hung, pending)
		}
		return nil
	}); err != nil {
		return err
	}
	return usedUp(p.Output()[before:])
}

func (c *call) inTime() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return usedUp(p.Output())
}

// deadlines matches what the program logs after it has waited until a deadline: for a driver call, a
// request, the kubelet's end with another plugin, its stream or its answer. What is done in time logs none
// of them, however busy the machine is. brief matches those of two seconds and less, which a busy machine
// may use up: the announcement to the scheduler, and the Node's condition at the program's end. A driver call
// has half a second at the program's end, and 30 or 60 before.
var (
	deadlines = regexp.MustCompile(`(?i).*(?:abandoned after (?:\d\d[\d.]*s|\d+m\d)|deadline ?exceeded|registering all the same|does not listen, starting over|does not show what it was sent).*`)
	brief     = regexp.MustCompile(`msg="(?:a change was not announced|the condition was not updated)`)
)

func usedUp(output string) error {
	for _, line := range deadlines.FindAllString(output, -1) {
		if !brief.MatchString(line) {
			return fmt.Errorf("a deadline was used up: %s", line)
		}
	}
	return nil
}

func (c *call) askToEnd() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return p.Signal(syscall.SIGTERM)
}

func (c *call) crash() error {
	p, err := c.program()
	if err == nil {
		p.Kill()
	}
	return err
}

func (c *call) hangup() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return p.Signal(syscall.SIGHUP)
}

// sim sends the request that virgate sim sends, because starting a program each time is slow.
func (c *call) sim() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	name := c.take()
	verbs := simnode.Verbs()
	at := slices.IndexFunc(verbs, func(v simnode.Verb) bool { return v.Name == name })
	if at < 0 {
		return errUsage
	}
	positional := slices.DeleteFunc(verbs[at].Arguments, func(a simnode.Argument) bool { return !a.Positional })
	values := url.Values{}
	for len(c.arguments) > 0 {
		argument := c.take()
		flag, isFlag := strings.CutPrefix(argument, "--")
		switch {
		case isFlag:
			values.Set(flag, c.take())
		case len(positional) > 0:
			values.Set(positional[0].Name, argument)
			positional = positional[1:]
		default:
			return errUsage
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return nvmltest.Post(ctx, p.control, name, values)
}

func (c *call) status() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	address, err := p.Address()
	if err != nil {
		return err
	}
	return c.script.Exec(c.binary, append([]string{"status", "--addr", address}, c.arguments...)...)
}

func (c *call) awaitLog() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	pattern, err := c.pattern()
	switch {
	case err != nil:
		return err
	case !c.not:
		_, err = p.Await(pattern)
		return err
	}
	if match := pattern.FindString(p.Output()); match != "" {
		return fmt.Errorf("the program says %q", match)
	}
	return nil
}

func (c *call) kept() error {
	pattern, err := c.pattern()
	if err != nil {
		return err
	}
	return await.Condition(nil, func() error {
		data, err := os.ReadFile(filepath.Join(c.script.Getenv("PLUGINS"), state.Name))
		if err == nil && !pattern.Match(data) {
			return fmt.Errorf("the state file has no %s: %s", pattern, data)
		}
		return err
	})
}

// hears repeats the event: one that comes while the program has no event set is lost.
func (c *call) hears() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	index := c.take()
	id, err := c.unitID(index)
	if err != nil {
		return err
	}
	driversIndex := index
	if len(c.arguments) > 0 {
		driversIndex = c.take()
	}
	heard := regexp.MustCompile(`GPU event ignored.*gpu=` + id)
	before := len(heard.FindAllString(p.Output(), -1))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pause := time.NewTicker(50 * time.Millisecond)
	defer pause.Stop()
	for len(heard.FindAllString(p.Output(), -1)) == before {
		// XID 43, a program that stopped, is not a fault of the GPU.
		if err := nvmltest.Post(ctx, p.control, "xid", url.Values{"gpu": {driversIndex}, "code": {"43"}}); err != nil {
			return err
		}
		select {
		case <-pause.C:
		case <-ctx.Done():
			return fmt.Errorf("no event of GPU %s arrives", index)
		}
	}
	return nil
}

// fetch requests a path from the program.
func (p *process) fetch(ctx context.Context, path string) (status int, body string, err error) {
	address, err := p.Address()
	if err != nil {
		return 0, "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return 0, "", err
	}
	request.Close = true
	request.Header.Set("Accept-Encoding", "identity") // To compress costs more than it saves on one machine.
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	data, err := io.ReadAll(response.Body)
	return response.StatusCode, string(data), err
}

// awaitAnswer repeats the request until the answer is as wanted: HTTP cannot notify of a change.
func (p *process) awaitAnswer(path string, wanted func(status int, body string) bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pause := time.NewTicker(50 * time.Millisecond)
	defer pause.Stop()
	var status int
	var body string
	for {
		nextStatus, nextBody, err := p.fetch(ctx, path)
		if err == nil {
			status, body = nextStatus, nextBody
		}
		if err == nil && wanted(status, body) {
			return nil
		}
		select {
		case <-pause.C:
		case <-p.Ended:
			return fmt.Errorf("the program has ended; the last answer of %s was %d: %s", path, status, body)
		case <-ctx.Done():
			return fmt.Errorf("%s still answers %d: %s", path, status, body)
		}
	}
}

func (c *call) ready() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	if !c.not {
		return p.awaitAnswer("/readyz", func(status int, _ string) bool { return status == http.StatusOK })
	}
	pattern, err := c.pattern()
	if err != nil {
		return err
	}
	return p.awaitAnswer("/readyz", func(status int, body string) bool {
		return status == http.StatusServiceUnavailable && pattern.MatchString(body)
	})
}

func (c *call) get() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	status, body, err := p.fetch(ctx, c.take())
	if err != nil {
		return err
	}
	_, _ = io.WriteString(c.script.Stdout(), body)
	if (status == http.StatusNotFound) != c.not || status != http.StatusOK && !c.not {
		return fmt.Errorf("answer %d: %s", status, strings.TrimSpace(body))
	}
	return nil
}

func (c *call) metric() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	if len(c.arguments) != 1 {
		return errUsage
	}
	line, err := regexp.Compile("(?m)^(?:" + c.take() + ")$")
	if err != nil {
		return err
	}
	return p.awaitAnswer("/metrics", func(status int, body string) bool {
		return status == http.StatusOK && line.MatchString(body) != c.not
	})
}
