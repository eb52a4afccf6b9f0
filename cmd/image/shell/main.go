// Command shell is the image's sh and bash, and the few other programs that scripts in NVIDIA's
// manifests call: cat, grep, lsmod and sleep. The name under which it is called selects the
// program. The language is Bash, which includes POSIX scripts; the interpreter is mvdan.cc/sh.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/interp"
	"mvdan.cc/sh/v3/syntax"
)

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args[1:]
	programs := map[string]func([]string) (int, error){
		"cat":   cat,
		"grep":  grep,
		"lsmod": lsmod,
		"sleep": sleep,
	}
	program := programs[name]
	if program == nil {
		program = shell
	}
	code, err := program(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	}
	os.Exit(code)
}

// shell runs the text after -c, the named script, or its standard input. It returns the exit code.
func shell(args []string) (int, error) {
	var params []string
	command := false
	for len(args) > 0 && len(args[0]) > 1 && strings.ContainsAny(args[0][:1], "-+") {
		option := args[0]
		args = args[1:]
		if option == "--" {
			break
		}
		if option[0] == '-' && strings.Contains(option, "c") {
			command = true
			option = strings.Replace(option, "c", "", 1)
		}
		if len(option) > 1 {
			params = append(params, option)
		}
		if strings.HasSuffix(option, "o") && len(args) > 0 {
			params, args = append(params, args[0]), args[1:]
		}
	}
	var script io.Reader = os.Stdin
	name := "sh"
	switch {
	case command && len(args) == 0:
		return 2, errors.New("-c needs a command")
	case command:
		script, args = strings.NewReader(args[0]), args[1:]
		if len(args) > 0 {
			name, args = args[0], args[1:]
		}
	case len(args) > 0:
		file, err := os.Open(args[0])
		if err != nil {
			return 127, err
		}
		defer func() { _ = file.Close() }()
		script = file
		name = args[0]
		args = args[1:]
	}
	parsed, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(script, name)
	if err != nil {
		return 2, err
	}
	markReplacing(parsed, command)
	runner, err := interp.New(
		interp.StdIO(os.Stdin, os.Stdout, os.Stderr),
		interp.Params(append(append(params, "--"), args...)...),
		interp.CallHandler(replaceProcess),
	)
	if err != nil {
		return 2, err
	}
	err = runner.Run(context.Background(), parsed)
	if status, ok := errors.AsType[interp.ExitStatus](err); ok {
		return int(status), nil
	}
	if err != nil {
		return 1, err
	}
	return 0, nil
}

// These marks are put before a command that replaces the shell. The interpreter's built-in exec
// starts a separate process, which the signal that ends a container would not reach.
const (
	replacing     = "\x00exec" // instead of exec
	replacingLast = "\x00last" // before the only command of sh -c
)

// markReplacing marks the commands that replace the shell: those after exec, unless another part of
// the script runs beside them, and the only command of sh -c. In a file that the script sources,
// exec starts a process.
func markReplacing(script *syntax.File, command bool) {
	mark := func(name string) *syntax.Word {
		return &syntax.Word{Parts: []syntax.WordPart{&syntax.Lit{Value: name}}}
	}
	syntax.Walk(script, func(node syntax.Node) bool {
		switch node := node.(type) {
		case *syntax.Subshell, *syntax.CmdSubst, *syntax.ProcSubst:
			return false
		case *syntax.BinaryCmd:
			if node.Op == syntax.Pipe || node.Op == syntax.PipeAll {
				// By default the interpreter runs the last part itself.
				node.Y = &syntax.Stmt{Cmd: &syntax.Subshell{Stmts: []*syntax.Stmt{node.Y}}}
				return false
			}
		case *syntax.Stmt:
			return alone(node)
		case *syntax.CallExpr:
			if len(node.Args) > 1 && node.Args[0].Lit() == "exec" {
				node.Args[0] = mark(replacing)
			}
		}
		return true
	})
	if !command || len(script.Stmts) != 1 || !alone(script.Stmts[0]) || script.Stmts[0].Negated {
		return
	}
	if only, ok := script.Stmts[0].Cmd.(*syntax.CallExpr); ok && len(only.Args) > 0 && only.Args[0].Lit() != replacing {
		only.Args = append([]*syntax.Word{mark(replacingLast)}, only.Args...)
	}
}

// alone reports whether no other part of this process works for the statement: neither the shell
// beside it nor a goroutine that writes a here document to it.
func alone(statement *syntax.Stmt) bool {
	return !statement.Background && !statement.Coprocess &&
		!slices.ContainsFunc(statement.Redirs, func(r *syntax.Redirect) bool {
			return r.Hdoc != nil || r.Op == syntax.WordHdoc
		})
}

// replaceProcess replaces this process if the command is marked for that. If it cannot, for example
// because a script has no first line that names its shell, the interpreter goes on.
func replaceProcess(ctx context.Context, args []string) ([]string, error) {
	if len(args) < 2 || args[0] != replacing && args[0] != replacingLast {
		return args, nil
	}
	shell := interp.HandlerCtx(ctx)
	if path, err := interp.LookPathDir(shell.Dir, shell.Env, args[1]); err == nil {
		err = replaceFiles(shell.Stdin, shell.Stdout, shell.Stderr)
		if err == nil {
			err = os.Chdir(shell.Dir)
		}
		if err != nil {
			return nil, err
		}
		_ = unix.Exec(path, args[1:], exported(shell.Env))
	}
	if args[0] == replacing {
		return append([]string{"exec"}, args[1:]...), nil
	}
	return args[1:], nil
}

// replaceFiles makes these the standard files of this process.
func replaceFiles(files ...any) error {
	var copies []int // Copy all first: one may be the target of another.
	for _, each := range files {
		file, ok := each.(*os.File)
		if !ok {
			return fmt.Errorf("exec: standard file is a %T", each)
		}
		number, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, len(files))
		if err != nil {
			return fmt.Errorf("exec: %w", err)
		}
		copies = append(copies, number)
	}
	for i, number := range copies {
		if err := unix.Dup3(number, i, 0); err != nil {
			return fmt.Errorf("exec: %w", err)
		}
	}
	return nil
}

// exported returns the variables for a program's environment.
func exported(environment expand.Environ) []string {
	values := map[string]string{}
	for name, variable := range environment.Each {
		delete(values, name)
		if variable.Exported && variable.Kind == expand.String {
			values[name] = variable.String()
		}
	}
	var list []string
	for name, value := range values {
		list = append(list, name+"="+value)
	}
	return list
}
