package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain has this binary act as the programs whose names the tests call, and as "told", which prints its
// process ID, its arguments and two variables.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "sh", "bash", "cat", "grep", "lsmod", "sleep":
		main()
	case "told":
		folder, _ := os.Getwd()
		fmt.Printf("%d %q %s %s %s\n", os.Getpid(), os.Args[1:], os.Getenv("DERIVED"), os.Getenv("KEPT"), folder)
		fmt.Fprintln(os.Stderr, "complaint")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// bin is a folder with all programs and no others.
func bin(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for _, name := range []string{"sh", "bash", "cat", "grep", "lsmod", "sleep", "told"} {
		if err := os.Symlink(self, filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// play runs a program in its own folder with only bin on its path, and returns its output and exit code.
func play(t *testing.T, bin, input string, args ...string) (stdout, stderr string, code, process int) {
	t.Helper()
	command := exec.CommandContext(t.Context(), args[0], args[1:]...)
	command.Dir = t.TempDir()
	command.Env = []string{"PATH=" + bin, "KEPT=kept"}
	var out, complaints bytes.Buffer
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader(input), &out, &complaints
	if err := command.Run(); err != nil {
		if _, ok := errors.AsType[*exec.ExitError](err); !ok {
			t.Fatal(err)
		}
	}
	return out.String(), complaints.String(), command.ProcessState.ExitCode(), command.Process.Pid
}

// TestScripts runs typical manifest scripts, and compares with this machine's sh.
func TestScripts(t *testing.T) {
	bin := bin(t)
	for _, test := range []struct {
		name, script, want string
		code               int
	}{
		{"a condition", "if [ -f x ]; then echo there; else echo not there; fi", "not there\n", 0},
		{"a loop", "until [ -f x ]; do echo waiting; sleep 0.01; : > x; done; echo done", "waiting\ndone\n", 0},
		{"while and counting", "i=0; while [ $i -lt 3 ]; do i=$((i + 1)); echo $i; done", "1\n2\n3\n", 0},
		{"a file sourced with allexport", "echo DERIVED=yes > f; set -o allexport; . ./f; set +o allexport; LATER=no; sh -c 'echo $DERIVED-$LATER'", "yes-\n", 0},
		{"set -a", "set -a; DERIVED=yes; sh -c 'echo $DERIVED'", "yes\n", 0},
		{"a here document", "VALUE=5; cat <<END > f\nA=$VALUE\nB=`echo b`\nEND\ncat f", "A=5\nB=b\n", 0},
		{"a quoted here document", "cat <<'END'\nA=$VALUE\nEND", "A=$VALUE\n", 0},
		{"exec with a here document", "{ exec cat; } <<END\ntext\nEND", "text\n", 0},
		{"files appended", "rm() { : > f; }; rm; echo a >> f; echo b >> f; cat f", "a\nb\n", 0},
		{"a pipe", "printf 'nvidia 1 0\\ngdrdrv 1 0\\n' | grep -q '^gdrdrv' && echo found", "found\n", 0},
		{"a pipe that finds nothing", "printf 'nvidia 1 0\\n' | grep gdrdrv || echo none", "none\n", 0},
		{"the output as text", `found=$(printf 'a\nb\n' | grep b); echo "<$found>"`, "<b>\n", 0},
		{"defaults", `echo "${NONE:-default}" "${KEPT}" "${KEPT#k}" "${KEPT%t}"`, "default kept ept kep\n", 0},
		{"case", `case "$KEPT" in k*) echo k;; *) echo other;; esac`, "k\n", 0},
		{"functions and parameters", `f() { echo "$# $1 $2"; return 3; }; f "a b" c; echo $?`, "2 a b c\n3\n", 0},
		{"set -e", "set -e; grep -q x /dev/null; echo not reached", "", 1},
		{"an exit code", "exit 7", "", 7},
		{"no such command", "nosuchcommand 2>/dev/null; echo $?", "127\n", 0},
		{"exec of no such command", "exec nosuchcommand 2>/dev/null; echo not reached", "", 127},
		{"exec in a subshell", "(exec sh -c 'echo inner'); echo outer", "inner\nouter\n", 0},
		{"exec in a substitution", `a=$(exec sh -c 'echo inner'); echo "$a outer"`, "inner outer\n", 0},
		{"exec at the end of a pipe", "echo text | exec cat; echo outer", "text\nouter\n", 0},
		{"exec in the background", "exec sh -c 'echo inner' & wait; echo outer", "inner\nouter\n", 0},
		{"the opposite", "! grep -q x /dev/null", "", 0},
		{"exec of redirections alone", "exec > f; echo a; exec cat f >&2", "", 0},
		{"exec with redirections", "exec sh -c 'echo a; echo b >&2' > f 2>&1", "", 0},
		{"exec with files that are each other's", "exec sh -c 'echo a; echo b >&2' 2>&1 1>/dev/null", "b\n", 0},
		{"the end of a pipe is a shell of its own", "a=1; printf 'x\\ny\\n' | while read b; do a=$b; done; echo $a", "1\n", 0},
		{"exec with a variable", "DERIVED=x exec sh -c 'echo $DERIVED'", "x\n", 0},
		{"an unset variable", "unset KEPT; exec sh -c 'echo ${KEPT-unset}'", "unset\n", 0},
		{"another folder", "d=$PWD/sub; cat </dev/null >/dev/null; cd /dev; exec sh -c 'pwd'", "/dev\n", 0},
		{"a trap at the end", "trap 'echo end' EXIT; echo work", "work\nend\n", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			shells := [][]string{{filepath.Join(bin, "sh"), "-c", test.script}, {filepath.Join(bin, "bash"), write(t, filepath.Join(t.TempDir(), "script"), test.script)}}
			if other, err := exec.LookPath("/bin/sh"); err == nil {
				shells = append(shells, []string{other, "-c", test.script})
			}
			for _, shell := range shells {
				if stdout, stderr, code, _ := play(t, bin, "", shell...); stdout != test.want || code != test.code {
					t.Errorf("%q printed %q (%q) and ended with %d, want %q and %d", shell, stdout, stderr, code, test.want, test.code)
				}
			}
		})
	}
	if stdout, _, _, _ := play(t, bin, "echo $1-$0", filepath.Join(bin, "sh")); stdout != "-sh\n" {
		t.Errorf("a script on the input: %q", stdout)
	}
	if stdout, _, _, _ := play(t, bin, "", filepath.Join(bin, "sh"), "-ec", `echo "$0 $1"; grep -q x /dev/null; echo no`, "name", "one"); stdout != "name one\n" {
		t.Errorf("options and parameters of -c: %q", stdout)
	}
	for _, wrong := range [][]string{{"-c"}, {"-c", "if"}, {"nosuchfile"}, {"--nonsense"}} {
		if _, stderr, code, _ := play(t, bin, "", append([]string{filepath.Join(bin, "sh")}, wrong...)...); code == 0 || !strings.HasPrefix(stderr, "sh: ") {
			t.Errorf("sh %q ended with %d: %q", wrong, code, stderr)
		}
	}
}

// TestReplaced checks that a container's program keeps the process ID of the shell that was started, as that gets
// the signals.
func TestReplaced(t *testing.T) {
	bin := bin(t)
	for name, script := range map[string]string{
		"exec":                  "set -a; DERIVED=yes; :; exec told one 'two three'",
		"exec in a condition":   "export DERIVED=yes; if true; then exec told one 'two three'; fi; echo not reached",
		"the only command":      "DERIVED=yes told one 'two three'",
		"a script":              write(t, filepath.Join(t.TempDir(), "script"), "#!"+filepath.Join(bin, "sh")+"\nexport DERIVED=yes\nexec told one 'two three'\n"),
		"exec with other files": "export DERIVED=yes; exec told one 'two three' 2>/dev/null",
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code, process := play(t, bin, "", filepath.Join(bin, "sh"), "-c", script)
			want := strconv.Itoa(process) + ` ["one" "two three"] yes kept`
			if code != 0 || !strings.HasPrefix(stdout, want) || (name == "exec with other files") != (stderr == "") {
				t.Errorf("it printed %q and %q and ended with %d, want %q", stdout, stderr, code, want)
			}
		})
	}
	t.Run("a script without a first line", func(t *testing.T) {
		script := write(t, filepath.Join(t.TempDir(), "script"), "DERIVED=yes told one 'two three'\n")
		if stdout, _, code, _ := play(t, bin, "", filepath.Join(bin, "sh"), "-c", script); code != 0 || !strings.Contains(stdout, `["one" "two three"] yes kept`) {
			t.Errorf("it printed %q and ended with %d", stdout, code)
		}
	})
}

// TestEntryPoint runs a script like the GPU Operator mounts, before and after the driver is ready.
func TestEntryPoint(t *testing.T) {
	bin, validations := bin(t), t.TempDir()
	if err := os.Remove(filepath.Join(bin, "lsmod")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(bin, "lsmod"), "#!"+filepath.Join(bin, "sh")+"\necho 'nvidia_fs 1 0'; echo 'nvidia 2 1 nvidia_fs'\n")
	script := write(t, filepath.Join(t.TempDir(), "entrypoint.sh"), "#!"+filepath.Join(bin, "sh")+`
until [ -f `+validations+`/driver-ready ]; do
  echo waiting
  sleep 0.05
done
set -o allexport
cat `+validations+`/driver-ready
. `+validations+`/driver-ready
: > feature-flags.env
if lsmod | grep -q gdrdrv; then echo GDRCOPY=true >> feature-flags.env; fi
if lsmod | grep -q nvidia_fs; then echo DERIVED="$DERIVED-gds" >> feature-flags.env; fi
. ./feature-flags.env
echo starting
exec told
`)
	command := exec.CommandContext(t.Context(), filepath.Join(bin, "sh"), "-c", script)
	command.Dir = t.TempDir()
	command.Env = []string{"PATH=" + bin}
	output := filepath.Join(t.TempDir(), "output")
	file, err := os.Create(output)
	if err != nil {
		t.Fatal(err)
	}
	command.Stdout = file
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	await(t, output, "waiting\n")
	write(t, filepath.Join(validations, "driver-ready"), "DERIVED=/run/nvidia/driver\n")
	if err := command.Wait(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("DERIVED=/run/nvidia/driver\nstarting\n%d [] /run/nvidia/driver-gds", command.Process.Pid)
	if rest := strings.TrimLeft(strings.ReplaceAll(string(text), "waiting\n", ""), "\n"); !strings.HasPrefix(rest, want) {
		t.Errorf("it printed %q, want %q", rest, want)
	}
}

// await waits until the file has the text.
func await(t *testing.T, path, text string) {
	t.Helper()
	pause := time.NewTicker(5 * time.Millisecond)
	defer pause.Stop()
	for ; ; <-pause.C {
		if got, _ := os.ReadFile(path); strings.Contains(string(got), text) {
			return
		}
	}
}

// TestEnds checks that a shell that waits for a program ends by the signal that ends a container.
func TestEnds(t *testing.T) {
	bin := bin(t)
	output := filepath.Join(t.TempDir(), "output")
	file, err := os.Create(output)
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(filepath.Join(bin, "sh"), "-c", "echo begun; sleep 600; echo not reached")
	command.Env = []string{"PATH=" + bin}
	command.Stdout = file
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL) }() // The program that it waited for.
	await(t, output, "begun\n")
	if err := command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := command.Wait(); err == nil {
		t.Error("it ended as if nothing had happened")
	}
	if text, _ := os.ReadFile(output); string(text) != "begun\n" {
		t.Errorf("it printed %q", text)
	}
}

func TestGrep(t *testing.T) {
	bin := bin(t)
	folder := t.TempDir()
	one, two := write(t, filepath.Join(folder, "one"), "nvidia_fs 1 0\nnvidia 2\n"), write(t, filepath.Join(folder, "two"), "a+b\nab|c\n[x]\n")
	none := filepath.Join(folder, "none")
	for _, test := range []struct {
		want string
		code int
		args []string
	}{
		{"nvidia_fs 1 0\n", 0, []string{"nvidia_fs", one}},
		{"nvidia 2\n", 0, []string{"-w", "nvidia", one}},
		{"nvidia 2\n", 0, []string{"-v", "fs", one}},
		{"nvidia 2\n", 0, []string{"-x", "-e", "nvidia 2", one}},
		{"nvidia 2\n", 0, []string{"-iE", "^NVIDIA( |$)", one}},
		{"nvidia_fs 1 0\nnvidia 2\n", 0, []string{"-e", "_fs", "-e2", one}},
		{"", 0, []string{"-q", "nvidia", one}},
		{"", 1, []string{"gdrdrv", one}},
		{"a+b\n", 0, []string{"a+b", two}},
		{"ab|c\n", 0, []string{"-E", "a+b", two}},
		{"ab|c\n", 0, []string{`a\+b`, two}},
		{"ab|c\n", 0, []string{"b|", two}},
		{"a+b\n[x]\n", 0, []string{`a+\|\[x`, two}},
		{"[x]\n", 0, []string{"[]x]]", two}},
		{"a+b\nab|c\n", 0, []string{"[+|]", two}},
		{"", 0, []string{"-qs", "a+b", two, none}},
		{"ab|c\n", 0, []string{"-F", "b|c", two}},
		{one + ":nvidia 2\n", 0, []string{"2", one, two}},
		{"", 2, []string{"-s", "a", none}},
		{"nvidia 2\n", 0, []string{"--", "a 2", one}},
	} {
		programs := []string{filepath.Join(bin, "grep")}
		if other, err := exec.LookPath("/bin/grep"); err == nil {
			programs = append(programs, other)
		}
		for _, program := range programs {
			stdout, stderr, code, _ := play(t, bin, "", append([]string{program}, test.args...)...)
			if stdout != test.want || code != test.code || stderr != "" {
				t.Errorf("%s %q printed %q (%q) and ended with %d, want %q and %d", program, test.args, stdout, stderr, code, test.want, test.code)
			}
		}
	}
	for _, wrong := range [][]string{{}, {"-Z", "a"}, {"-E", "("}, {"a", none}} {
		if _, stderr, code, _ := play(t, bin, "", append([]string{filepath.Join(bin, "grep")}, wrong...)...); code != 2 || stderr == "" {
			t.Errorf("grep %q ended with %d: %q", wrong, code, stderr)
		}
	}
}

func TestModules(t *testing.T) {
	got := moduleTable("nvidia_fs 335872 0 - Live 0x0 (OE)\nnvidia 56320000 3 nvidia_uvm,nvidia_fs, Live 0x0 (POE)\n")
	want := "Module                  Size  Used by\nnvidia_fs             335872  0\nnvidia              56320000  3 nvidia_uvm,nvidia_fs\n"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestSmallPrograms(t *testing.T) {
	bin := bin(t)
	one := write(t, filepath.Join(t.TempDir(), "one"), "1\n")
	if stdout, _, code, _ := play(t, bin, "in\n", filepath.Join(bin, "cat"), one, "-"); stdout != "1\nin\n" || code != 0 {
		t.Errorf("cat printed %q and ended with %d", stdout, code)
	}
	if stdout, stderr, code, _ := play(t, bin, "", filepath.Join(bin, "cat"), "nosuchfile", one); stdout != "1\n" || code != 1 || !strings.Contains(stderr, "nosuchfile") {
		t.Errorf("cat printed %q, %q and ended with %d", stdout, stderr, code)
	}
	for _, wrong := range [][]string{{}, {"x"}, {"-1"}} {
		if _, stderr, code, _ := play(t, bin, "", append([]string{filepath.Join(bin, "sleep")}, wrong...)...); code != 1 || stderr == "" {
			t.Errorf("sleep %q ended with %d: %q", wrong, code, stderr)
		}
	}
	began := time.Now()
	_, stderr, code, _ := play(t, bin, "", filepath.Join(bin, "sleep"), "0.1s", "0.001m")
	if took := time.Now().Sub(began); code != 0 || took < 160*time.Millisecond {
		t.Errorf("sleep ended with %d after %s: %s", code, took, stderr)
	}
	if stdout, _, code, _ := play(t, bin, "", filepath.Join(bin, "lsmod")); code == 0 && !strings.HasPrefix(stdout, "Module ") {
		t.Errorf("lsmod printed %q", stdout)
	}
}
