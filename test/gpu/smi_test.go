package gpu

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/nvml/driver"
)

// program returns the path of the program to check.
func program(t *testing.T) string {
	t.Helper()
	path := os.Getenv("VIRGATE")
	if path == "" {
		t.Skip("no $VIRGATE: make test-gpu sets it on a machine with GPUs")
	}
	return path
}

// query returns nvidia-smi's table, with trimmed cells.
func query(t *testing.T, what string) [][]string {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "nvidia-smi", "--query-"+what, "--format=csv,noheader,nounits").Output()
	must(t, err)
	var rows [][]string
	for line := range strings.Lines(string(output)) {
		var cells []string
		for cell := range strings.SplitSeq(line, ",") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		rows = append(rows, cells)
	}
	return rows
}

// open opens this machine's driver until the test ends, with the program's deadlines.
func open(t *testing.T) nvml.Library {
	t.Helper()
	lib := nvml.WithDeadlines(bare(t), nvml.Limits{})
	t.Cleanup(func() { must(t, lib.Shutdown()) })
	return lib
}

// bare opens this machine's driver.
func bare(t *testing.T) nvml.Library {
	t.Helper()
	lib, err := driver.Open(driver.Options{})
	must(t, err)
	must(t, lib.Init())
	return lib
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
