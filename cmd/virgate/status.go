package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/agent"
)

// statusTimeout is how long a running program may take to answer.
const statusTimeout = 10 * time.Second

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:  "status",
		Usage: "shows what a running Virgate does",
		Description: "Asks a virgate run over HTTP: its profile, resources and GPUs, and who holds what.\n\n" +
			"Example: virgate status --addr localhost:9400",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "addr", Value: "localhost:9400", Usage: "the HTTP address of the running Virgate: its --listen"},
			outputFlag("table"),
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			asJSON, err := wantsJSON(cmd, "table")
			if err != nil {
				return err
			}
			if cmd.Args().Len() > 0 {
				return usageError{fmt.Errorf("status takes no argument, got %q", cmd.Args().First())}
			}
			address, err := dialAddress(cmd.String("addr"))
			if err != nil {
				return usageError{fmt.Errorf("--addr: %w", err)}
			}
			answer, err := askStatus(ctx, address)
			if err != nil {
				return err
			}
			if asJSON {
				_, err := cmd.Root().Writer.Write(answer)
				return err
			}
			var status agent.Status
			if err := json.Unmarshal(answer, &status); err != nil {
				return fmt.Errorf("read the answer of %s: %w", address, err)
			}
			return printPlain(cmd.Root().Writer, func(w io.Writer) error { return printStatus(w, status) })
		},
	}
}

// dialAddress is where to ask, for an address in the form of --listen: without a
// host it is this machine.
func dialAddress(text string) (string, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "", fmt.Errorf("%q is not HOST:PORT", text)
	}
	if port == "" {
		return "", fmt.Errorf("%q has no port", text)
	}
	if host == "" {
		host = "localhost"
	}
	return net.JoinHostPort(host, port), nil
}

// askStatus returns the program's status as JSON.
func askStatus(ctx context.Context, address string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/api/v1/status", nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", address, err)
	}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return nil, fmt.Errorf("no Virgate answers at %s: %w", address, unwrapURL(err))
	}
	defer func() { _ = response.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(response.Body, longestAnswer))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the answer of %s: %w", address, err)
	case response.StatusCode == http.StatusNotFound:
		return nil, fmt.Errorf("%s has no status: is a Virgate listening there?", address)
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("%s answers %s: %s", address, response.Status, strings.TrimSpace(string(answer)))
	}
	return answer, nil
}
