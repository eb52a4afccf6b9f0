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
)

// longestAnswer bounds what a control socket may answer, in bytes.
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
		var made *url.Error // It names the URL, which nobody has asked for.
		if errors.As(err, &made) {
			err = made.Err
		}
		return nil, fmt.Errorf("ask %s for %s: %w", socket, path, err)
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
