package e2e

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

// testPluginKilled kills Virgate without a word while pods hold shares.
func testPluginKilled(t *testing.T, c *cluster) {
	c.install(t, "node=sim:t4x2")
	all := map[string]int64{shared: 8}
	c.awaitAllocatable(t, all)
	holders := c.hold(t, "holder", 3)
	before, plugin := c.vitals(t, holders), c.plugin(t)
	killed := processes(t, plugin)
	if len(killed) != 1 {
		t.Fatalf("Virgate's container has processes %v, want one", killed)
	}
	began := time.Now()
	if err := syscall.Kill(killed[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.await(t, time.Minute, "the kubelet to start it again", func() error {
		status := c.plugin(t).Status.ContainerStatuses[0]
		if status.RestartCount != plugin.Status.ContainerStatuses[0].RestartCount+1 || !status.Ready {
			return errors.New("it is not ready")
		}
		return nil
	})
	c.awaitServed(t, all)
	c.report.note("plugin killed to shares", time.Since(began).Round(10*time.Millisecond).String())
	c.awaitAllocatable(t, all)
	c.undisturbed(t, before)
	c.fill(t, holders, 2, 4)
	// The socket of the one that was killed is in nobody's way. Asked again, for the
	// output of a command that ends at once does not always come through.
	c.await(t, time.Minute, "virgate health", func() error {
		if health := c.exec(t, c.plugin(t), "/usr/bin/virgate", "health"); strings.Count(health, "healthy") != 2 {
			return fmt.Errorf("it says %q", health)
		}
		return nil
	})
}
