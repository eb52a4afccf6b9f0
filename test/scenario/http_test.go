package scenario

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"time"
)

// fetch asks the program for a path.
func (p *process) fetch(ctx context.Context, path string) (status int, body string, err error) {
	address, err := p.address()
	if err != nil {
		return 0, "", err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		return 0, "", err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	data, err := io.ReadAll(response.Body)
	return response.StatusCode, string(data), err
}

// awaitAnswer asks until the answer is as wanted: HTTP cannot tell when it
// would be another one.
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
		case <-p.ended:
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
