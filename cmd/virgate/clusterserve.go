package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/urfave/cli/v3"
	"golang.org/x/sync/errgroup"

	"github.com/virgate/virgate/internal/cluster"
)

func clusterAddress(_ context.Context, _ *cli.Command, address string) error {
	if _, _, err := net.SplitHostPort(address); err != nil {
		return usageError{fmt.Errorf("--serve: expected an address such as 127.0.0.1:8080, got %q", address)}
	}
	return nil
}

// serveAlone returns an error for flags that the page would ignore. The page shows the whole
// cluster and updates itself.
func serveAlone(cmd *cli.Command) error {
	switch {
	case !cmd.IsSet("serve"):
	case cmd.Bool("watch"):
		return usageError{errors.New("--serve with --watch: the page keeps itself up to date; leave --watch out")}
	case cmd.IsSet("output"):
		return usageError{fmt.Errorf(
			"--serve with --output %s: the page has everything, and as JSON at /api/v1/cluster", cmd.String("output"))}
	case clusterPart(cmd) != "nodes":
		return usageError{fmt.Errorf("--serve with %s: the page is of the cluster, %s --serve %s", nameOf(cmd),
			cmd.Lineage()[1].FullName(), cmd.String("serve"))}
	}
	return nil
}

// serveCluster serves the cluster as a page until ctx ends.
func serveCluster(ctx context.Context, notes io.Writer, address string, watcher *cluster.Watcher) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("--serve: %w", err)
	}
	_, _ = fmt.Fprintf(notes, "The page is at http://%s/\n", listener.Addr())
	if bound, ok := listener.Addr().(*net.TCPAddr); ok && !bound.IP.IsLoopback() {
		_, _ = fmt.Fprintf(notes,
			"note: %q is no loopback address: whoever reaches it sees the names of nodes, namespaces and pods, "+
				"without a password; 127.0.0.1:8080 is for this machine alone\n", address)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return watcher.Run(ctx) })
	group.Go(func() error { return cluster.NewPage(watcher.Latest).Serve(ctx, listener) })
	return group.Wait()
}
