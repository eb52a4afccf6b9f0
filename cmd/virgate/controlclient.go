package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/urfave/cli/v3"
)

// controlSocketFlag says where the running program takes orders.
func controlSocketFlag() cli.Flag {
	return &cli.StringFlag{Name: "control-socket", Value: "/run/virgate/control.sock", Usage: "the control socket of the running Virgate"}
}

// longestAnswer bounds what a running program may answer, in bytes.
const longestAnswer = 4 << 20

// askControl sends a request to the program behind the control socket and
// returns its answer. The error is the program's own where it answered.
func askControl(ctx context.Context, socket, method, path string, arguments url.Values) ([]byte, error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, method, "http://virgate"+path+"?"+arguments.Encode(), nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s for %s: %w", socket, path, err)
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask %s for %s: %w", socket, path, unwrapURL(err))
	}
	defer func() { _ = response.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(response.Body, longestAnswer))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", socket, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(strings.TrimSpace(string(answer)))
	}
	return answer, nil
}

// unwrapURL takes the URL off an error of an http.Client: it would say the
// address twice, or one that nobody has asked for.
func unwrapURL(err error) error {
	if inner := errors.Unwrap(err); inner != nil {
		return inner
	}
	return err
}
