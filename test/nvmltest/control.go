package nvmltest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
)

// Post runs a verb of internal/simnode on the simulated node behind a control socket.
func Post(ctx context.Context, socket, verb string, arguments url.Values) error {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://virgate/sim/"+verb, strings.NewReader(arguments.Encode()))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode == http.StatusNoContent {
		return nil
	}
	answer, err := io.ReadAll(response.Body)
	return fmt.Errorf("sim %s: %s: %s %w", verb, response.Status, answer, err)
}
