// Command shell is the image's sh and bash, and the few programs that the scripts of
// NVIDIA's manifests call beside it: cat, grep, lsmod and sleep. It is whichever of them
// its name says. The language is Bash's, of which a POSIX script is one; the interpreter
// is mvdan.cc/sh.
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

// shell runs the text after -c, the script that is named, or what it reads from its
// input. It returns the exit code.
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

// What markReplacing puts before a command that takes the shell's place: the built-in
// exec of the interpreter starts a process of its own, which the signal that ends a
// container would not reach.
const (
	replacing     = "\x00exec" // in the place of exec
	replacingLast = "\x00last" // before the only command of sh -c
)

// markReplacing marks the commands that take the shell's place: those after exec, where
// no other part of the script runs beside them, and the only command of sh -c. In a file
// that the script sources exec starts a process.
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
				// The interpreter's own way is to run the last part itself.
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

// alone says that no other part of this process works for the statement: not the shell
// beside it, and nobody who writes a here document to it.
func alone(statement *syntax.Stmt) bool {
	return !statement.Background && !statement.Coprocess &&
		!slices.ContainsFunc(statement.Redirs, func(r *syntax.Redirect) bool {
			return r.Hdoc != nil || r.Op == syntax.WordHdoc
		})
}

// replaceProcess replaces this process where the command is so marked. If it cannot, as
// for a script without a first line that names its shell, the interpreter goes on.
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

// replaceFiles gives this process these standard files.
func replaceFiles(files ...any) error {
	var copies []int // Of all before any is replaced: they may be each other's.
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

// exported are the variables that a program is given.
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
