package scenario

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
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
	limit, err := c.within()
	if err != nil {
		return err
	}
	began := time.Now()
	if err := p.terminate(); err != nil {
		return err
	}
	return c.judge(began, limit)
}

func (c *call) askToEnd() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return p.command.Process.Signal(syscall.SIGTERM)
}

func (c *call) crash() error {
	p, err := c.program()
	if err == nil {
		p.kill()
	}
	return err
}

func (c *call) hangup() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return p.command.Process.Signal(syscall.SIGHUP)
}

func (c *call) sim() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	return c.script.Exec(c.binary, append([]string{"sim", "--control-socket", p.control}, c.arguments...)...)
}

func (c *call) status() error {
	p, err := c.program()
	if err != nil {
		return err
	}
	address, err := p.address()
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
		_, err = p.log.await(pattern)
		return err
	}
	if match := pattern.FindString(p.log.String()); match != "" {
		return fmt.Errorf("the program says %q", match)
	}
	return nil
}

// hears repeats the event: one that comes while the program has no event set is
// nobody's.
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
	heard := regexp.MustCompile(`event that says nothing against the GPU.*gpu=` + id)
	before := len(heard.FindAllString(p.log.String(), -1))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pause := time.NewTicker(50 * time.Millisecond)
	defer pause.Stop()
	for len(heard.FindAllString(p.log.String(), -1)) == before {
		// XID 43, a program that stopped, is no fault of the board.
		if err := simnode.Command(ctx, p.control, "xid", map[string]string{"gpu": index, "code": "43"}); err != nil {
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
