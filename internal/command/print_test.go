package command

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/urfave/cli/v3"
)

// shown runs a command that shows two units, and returns its exit code and output.
func shown(t *testing.T, stdout io.Writer, args ...string) (code int, stderr string) {
	t.Helper()
	var errors strings.Builder
	root := &cli.Command{
		Name:      "x",
		Writer:    stdout,
		ErrWriter: &errors,
		Flags:     []cli.Flag{OutputFlag()},
		Action: func(_ context.Context, cmd *cli.Command) error {
			value := map[string]any{"units": []string{"a", "<b>"}}
			return Show(cmd, value, []string{"a", "b\x1b"}, func() string {
				if Wide(cmd) {
					return "a failed, \x1b wide\n"
				}
				return "a failed, \x1b\n"
			})
		},
	}
	return Run(t.Context(), root, append([]string{"x"}, args...)), errors.String()
}

// TestShow prints the same in each form. Control characters reach no terminal.
func TestShow(t *testing.T) {
	const table = "a failed, \ufffd\n"
	for output, want := range map[string]string{
		"":      table,
		"table": table,
		"text":  table,
		"wide":  "a failed, \ufffd wide\n",
		"name":  "a\nb\ufffd\n",
		"json":  "{\n  \"units\": [\n    \"a\",\n    \"<b>\"\n  ]\n}\n",
		"yaml":  "units:\n- a\n- <b>\n",
	} {
		var args []string
		if output != "" {
			args = []string{"-o", output}
		}
		var stdout bytes.Buffer
		if code, stderr := shown(t, &stdout, args...); code != 0 || stdout.String() != want {
			t.Errorf("-o %s: exit code %d, %s%q, want %q", output, code, stderr, stdout.String(), want)
		}
	}
	var stdout bytes.Buffer
	code, stderr := shown(t, &stdout, "-o", "xml")
	if want := "x: --output \"xml\" is none of table, wide, json, yaml, name\n"; code != 2 || stderr != want || stdout.Len() > 0 {
		t.Errorf("exit code %d, %q, want %q; printed %q", code, stderr, want, stdout.String())
	}
}

// TestColours checks that only text on a terminal has colours, unless NO_COLOR has a value.
func TestColours(t *testing.T) {
	const painted = "a \x1b[31mfailed\x1b[0m, \ufffd\n"
	path := filepath.Join(t.TempDir(), "terminal")
	printed := func(colours bool, args ...string) string {
		file, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if code, stderr := shown(t, Terminal{file, colours}, args...); code != 0 || file.Close() != nil {
			t.Fatal(code, stderr)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if got := printed(true); got != painted {
		t.Errorf("%q, want %q", got, painted)
	}
	if got := printed(false); strings.Contains(got, "\x1b") {
		t.Errorf("%q has colours although they are off", got)
	}
	for _, output := range []string{"json", "yaml", "name"} {
		if got := printed(true, "-o", output); strings.Contains(got, "\x1b") {
			t.Errorf("-o %s has colours: %q", output, got)
		}
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if _, is := onTerminal(file, os.LookupEnv).(Terminal); is {
		t.Error("a file is a terminal")
	}
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	defer func() { _ = terminal.Close() }()
	for setting, want := range map[string]struct{ terminal, colours bool }{
		"NO_COLOR=":  {true, true},
		"NO_COLOR=0": {true, false},
		"TERM=dumb":  {false, false},
	} {
		name, value, _ := strings.Cut(setting, "=")
		out, is := onTerminal(terminal, func(asked string) (string, bool) { return value, asked == name }).(Terminal)
		if is != want.terminal || out.Colours != want.colours {
			t.Errorf("%s: terminal %t, colours %t", setting, is, out.Colours)
		}
	}
}

func TestPaint(t *testing.T) {
	const red, yellow, end = "\x1b[31m", "\x1b[33m", "\x1b[0m"
	for text, want := range map[string]string{
		"n1  applied\nn2  rejected\nn3  switching\n": "n1  applied\nn2  " + red + "rejected" + end + "\nn3  " + yellow + "switching" + end + "\n",
		"unhealthy: XID 79 (lost)":                   red + "unhealthy" + end + ": XID 79 (lost)",
		"held\nheld":                                 yellow + "held" + end + "\n" + yellow + "held" + end,
		"1 failed, 2 pending":                        "1 " + red + "failed" + end + ", 2 " + yellow + "pending" + end,
		"node-failed failed/x healthy HELD":          "node-failed failed/x healthy HELD",
		"day 3/4: blocked":                           "day 3/4: " + yellow + "blocked" + end,
	} {
		if got := Paint(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
