package simnode

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

// controlPath is where the verbs are, each under its name.
const controlPath = "/sim/"

// longestRequest bounds a request's body, in bytes.
const longestRequest = 1 << 16

// Handler serves the verbs on the control socket: POST /sim/xid?gpu=0&code=79,
// with the arguments in the query or as a form in the body. It answers 204, or
// 400 with the error as text, or 404 when there is no such verb.
func (n *Node) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+controlPath+"{verb}", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, longestRequest)
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		arguments := map[string]string{}
		for name, given := range r.Form {
			if len(given) > 1 {
				http.Error(w, name+" is given more than once", http.StatusBadRequest)
				return
			}
			arguments[name] = given[0]
		}
		err := n.Do(r.PathValue("verb"), arguments)
		switch {
		case errors.Is(err, errNoVerb):
			http.Error(w, err.Error(), http.StatusNotFound)
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadRequest)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
	return mux
}

// Command lets the simulated node behind the control socket, a Unix socket, do
// what the verb says. The error is the node's own where it answered.
func Command(ctx context.Context, socket, verb string, arguments map[string]string) error {
	form := url.Values{}
	for name, value := range arguments {
		form.Set(name, value)
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
	defer transport.CloseIdleConnections()
	address := "http://virgate" + controlPath + url.PathEscape(verb)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address, strings.NewReader(form.Encode()))
	if err != nil {
		return fmt.Errorf("ask %s for %s: %w", socket, verb, err)
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return fmt.Errorf("ask %s for %s: %w", socket, verb, err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode == http.StatusNoContent {
		return nil
	}
	answer, err := io.ReadAll(io.LimitReader(response.Body, longestRequest))
	if err != nil {
		return fmt.Errorf("read the answer of %s: %w", socket, err)
	}
	return errors.New(strings.TrimSpace(string(answer)))
}
