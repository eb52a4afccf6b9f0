package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// TestClusterServeRefuses checks that arguments that the page would ignore are refused, in any order and before the
// page is served.
func TestClusterServeRefuses(t *testing.T) {
	kubeconfig := clusterAPI(t)
	for words, want := range map[string]string{
		"--watch": "--serve with --watch:", "-w": "--serve with --watch:", "nodes n1 --watch": "--serve with --watch:", "gpus -w": "--serve with --watch:",
		"-o json": "--serve with --output json:", "nodes -o wide": "--serve with --output wide:", "-o table": "--serve with --output table:",
		"gpus": "--serve with gpus: the page is of the cluster, kubectl virgate --serve 127.0.0.1:0", "tenants": "--serve with tenants:", "why p": "--serve with why:",
	} {
		for _, args := range [][]string{
			append([]string{"kubectl-virgate", "--kubeconfig", kubeconfig, "--serve", "127.0.0.1:0"}, strings.Fields(words)...),
			append(append([]string{"kubectl-virgate"}, strings.Fields(words)...), "--kubeconfig", kubeconfig, "--serve", "127.0.0.1:0"),
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // It would serve for ever.
			var out, errors strings.Builder
			code := run(ctx, args, os.LookupEnv, &out, &errors)
			cancel()
			if code != 2 || !strings.Contains(errors.String(), want) || out.String() != "" {
				t.Errorf("%q: exit code %d, %q, want %q", args[1:], code, errors.String(), want)
			}
		}
	}
}

// TestClusterServe checks that the page shows the node once it is read, and that the command ends without an error.
func TestClusterServe(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "localhost:0"} {
		kubeconfig := clusterAPI(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		lines, errors := io.Pipe()
		ended := make(chan int, 1)
		go func() {
			ended <- run(ctx, []string{"kubectl-virgate", "--serve", address, "--kubeconfig", kubeconfig}, os.LookupEnv, io.Discard, errors)
			_ = errors.Close()
		}()
		said := bufio.NewReader(lines)
		line, err := said.ReadString('\n')
		page, found := strings.CutPrefix(strings.TrimSpace(line), "The page is at ")
		if err != nil || !found {
			t.Fatalf("%q %v", line, err)
		}
		rest := make(chan string, 1)
		go func() {
			text, _ := io.ReadAll(said)
			rest <- string(text)
		}()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for text, end := "", time.Now().Add(time.Minute); !strings.Contains(text, `href="nodes/n1"`); <-tick.C {
			if time.Now().After(end) {
				t.Fatalf("%s: %s", page, text)
			}
			answer, err := http.Get(page) //nolint:noctx // The loop ends.
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(answer.Body)
			_ = answer.Body.Close()
			text = string(body)
		}
		root, secret, _ := strings.Cut(strings.TrimPrefix(page, "http://"), "/")
		answer, err := http.Get("http://" + root + "/") //nolint:noctx // The server is there.
		if err != nil || answer.StatusCode != http.StatusForbidden || len(secret) < 20 {
			t.Errorf("%s without the secret: %v %v", page, answer, err)
		}
		cancel()
		if code := <-ended; code != 0 {
			t.Errorf("exit code %d", code)
		}
		if got := <-rest; got != "" {
			t.Errorf("%s: it says %q", address, got)
		}
	}
}
