package main

import (
	"flag"
	"io"
	"testing"

	"github.com/virgate/virgate/test/flagtable"
)

var update = flag.Bool("update", false, "write the reference of the flags")

// TestFlagReference compares the flags with their table in docs/reference/command-line.md.
func TestFlagReference(t *testing.T) {
	flagtable.Compare(t, "kubectl-virgate", rootCommand(io.Discard, io.Discard), *update)
}
