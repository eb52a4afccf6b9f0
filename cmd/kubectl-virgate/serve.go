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
	"github.com/virgate/virgate/internal/command"
)

// checkAddress returns an error unless it is an address of this machine alone.
func checkAddress(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return command.Usage(fmt.Errorf("--serve: expected an address such as 127.0.0.1:8080, got %q", address))
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return command.Usage(fmt.Errorf(
			"--serve: the page is for this machine alone: expected a loopback address such as 127.0.0.1:8080, got %q",
			address))
	}
	return nil
}

// serveAlone returns an error for flags that the page would ignore. The page shows the whole
// cluster and updates itself.
func serveAlone(cmd *cli.Command) error {
	if !cmd.IsSet("serve") {
		return nil
	}
	switch {
	case cmd.Bool("watch"):
		return command.Usage(errors.New("--serve with --watch: the page keeps itself up to date; leave --watch out"))
	case cmd.IsSet("output"):
		return command.Usage(fmt.Errorf(
			"--serve with --output %s: the page has everything, and as JSON at api/v1/cluster below its address",
			cmd.String("output")))
	case clusterPart(cmd) != "nodes":
		return command.Usage(fmt.Errorf("--serve with %s: the page is of the cluster, %s --serve %s",
			command.NameOf(cmd), cmd.Lineage()[1].FullName(), cmd.String("serve")))
	}
	return checkAddress(cmd.String("serve"))
}

// serveCluster serves the cluster as a page until ctx ends.
func serveCluster(ctx context.Context, notes io.Writer, address string, watcher *cluster.Watcher) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return watcher.Run(ctx) })
	group.Go(func() error {
		err := cluster.NewPage(watcher.Latest).Serve(ctx, address,
			func(url string) { _, _ = fmt.Fprintf(notes, "The page is at %s\n", url) })
		if err != nil {
			return fmt.Errorf("--serve: %w", err)
		}
		return nil
	})
	return group.Wait()
}
