package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/configs"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/configsource"
)

func checkCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "validates profiles, mig-parted documents and ConfigMap manifests",
		ArgsUsage: "FILE…",
		Description: "Prints every problem of every file on standard error; the exit code is 1 when there is\n" +
			"one. On standard output it lists where Virgate does something else than NVIDIA's\n" +
			"device plugin with the same document. - is standard input.\n\n" +
			"With --output json or yaml, problems and notes are on standard output, each with file, line,\n" +
			"path and message, and with document where a manifest has several; with name, the files\n" +
			"that have problems.\n\n" +
			"Example: virgate check configs/examples/*.yaml",
		Flags: append(settingFlags(), command.OutputFlag()),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			names := cmd.Args().Slice()
			if len(names) == 0 {
				return command.Usage(errors.New("check needs at least one FILE"))
			}
			if first := slices.Index(names, configsource.Stdin); first >= 0 &&
				slices.Contains(names[first+1:], configsource.Stdin) {
				return command.Usage(errors.New("check: - is there twice, and standard input can be read once"))
			}
			report := checkReport{Problems: []finding{}, Notes: []finding{}}
			for _, name := range names {
				kind, problems, notes := checkFile(ctx, name, overrides(cmd, environment))
				report.Problems, report.Notes = append(report.Problems, problems...), append(report.Notes, notes...)
				if !command.ForPeople(cmd) {
					continue
				}
				for _, problem := range problems {
					_, _ = fmt.Fprintln(cmd.Root().ErrWriter, problem)
				}
				if len(problems) == 0 {
					_, _ = fmt.Fprintf(cmd.Root().Writer, "%s: ok (%s)\n", configsource.Name(name), kind)
				}
				for _, note := range notes {
					_, _ = fmt.Fprintln(cmd.Root().Writer, note)
				}
			}
			if !command.ForPeople(cmd) {
				var files []string
				for _, problem := range report.Problems {
					files = append(files, problem.File)
				}
				if err := show(cmd, report, slices.Compact(files), nil); err != nil {
					return err
				}
			}
			if len(report.Problems) > 0 {
				return command.ErrSilent
			}
			return nil
		},
	}
}

func schemaCommand() *cli.Command {
	return &cli.Command{
		Name:  "schema",
		Usage: "prints the JSON Schema of profiles, for editors",
		Description: "Save it, and an editor with the YAML language server checks and completes a profile, rules\n" +
			"or mig-parted's layouts if the file begins with the line\n\n" +
			"# yaml-language-server: $schema=FILE",
		Action: func(_ context.Context, cmd *cli.Command) error {
			_, err := io.WriteString(cmd.Root().Writer, configs.Schema)
			return err
		},
	}
}

// checkReport is what check found in all files.
type checkReport struct {
	Problems []finding `json:"problems"`
	Notes    []finding `json:"notes"`
}

// finding is a problem or a note.
type finding struct {
	// File is the file as the command line names it, or the wrong flag or variable.
	File string `json:"file"`
	// Document is the document's place in a manifest: "[data.KEY]".
	Document string `json:"document,omitempty"`
	// Line is counted from 1, in the file or, as configs.File says, in the document; 0 if unknown.
	Line int    `json:"line,omitempty"`
	Path string `json:"path,omitempty"`
	// Message includes the value, if there is one.
	Message string `json:"message"`
}

// newFinding returns the finding for a Problem of the file.
func newFinding(file string, p configs.Problem) finding {
	f := finding{
		File:    p.File,
		Line:    p.Line,
		Path:    p.Path,
		Message: p.Reason(),
	}
	if document, inside := strings.CutPrefix(p.File, file); inside {
		f.File, f.Document = file, document
	}
	return f
}

// String formats the finding like Problem.Error.
func (f finding) String() string {
	return configs.Problem{
		File:    f.File + f.Document,
		Line:    f.Line,
		Path:    f.Path,
		Message: f.Message,
	}.Error()
}

// checkFile checks one file. It returns the problems. If there are none, it returns the kind of the
// file, and notes where Virgate differs from NVIDIA's plugin.
func checkFile(
	ctx context.Context,
	path string,
	overrides configs.Overrides,
) (kind configs.DocumentKind, problems, notes []finding) {
	name := configsource.Name(path)
	data, err := configsource.Read(ctx, path)
	if err != nil {
		message := err.Error()
		if failed, ok := errors.AsType[*fs.PathError](err); ok {
			message = failed.Op + ": " + failed.Err.Error()
		}
		return "", []finding{{File: name, Message: strings.TrimLeft(strings.TrimPrefix(message, name), ": ")}}, nil
	}
	file, err := configs.ParseFile(name, data, overrides)
	if wrong, ok := errors.AsType[configs.Problems](err); ok {
		for _, problem := range wrong {
			problems = append(problems, newFinding(name, problem))
		}
		return "", problems, nil
	} else if err != nil {
		return "", []finding{{File: name, Message: err.Error()}}, nil
	}
	look := func(place string, config configs.Config) {
		note := func(line int, path, message string) {
			notes = append(notes, newFinding(name, configs.Problem{
				File:    place,
				Line:    line,
				Path:    path,
				Message: message,
			}))
		}
		// Both errors begin with the path.
		if err := config.CheckOffered(); err != nil {
			path, message, _ := strings.Cut(err.Error(), ": ")
			problems = append(problems, newFinding(name, configs.Problem{
				File:    place,
				Path:    path,
				Message: message,
			}))
		}
		if err := config.CheckMPS(); err != nil {
			path, _, _ := strings.Cut(err.Error(), ": ")
			note(0, path, needsMPS)
		}
		for _, n := range config.Notes {
			note(n.Line, n.Path, n.Message)
		}
	}
	look(name, file.Config)
	if file.Kind == configs.KindProfile && blank(data) {
		notes = append(notes, finding{File: name, Message: "empty: every GPU is offered whole"})
	}
	for _, entry := range file.Entries {
		look(entry.Place, entry.Config)
	}
	if len(problems) > 0 {
		notes = nil
	}
	return file.Kind, problems, notes
}

// blank reports whether a document has nothing but comments.
func blank(document []byte) bool {
	for line := range strings.Lines(string(document)) {
		text := strings.TrimSpace(line)
		if text != "" && text != "---" && !strings.HasPrefix(text, "#") {
			return false
		}
	}
	return true
}
