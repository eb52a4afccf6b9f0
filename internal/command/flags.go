package command

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
)

// Flag describes a flag.
type Flag struct {
	// Names are the name and its aliases, without "--".
	Names []string
	Kind  FlagKind
	// Choices are the possible values, if they are few. Free is set if the command checks them itself,
	// because there are others.
	Choices []string
	Free    bool
	// Former is a choice that is still accepted.
	Former string
	// Value is the default. Shown is in the help in its place.
	Value, Shown string
	// Variables are the environment variables that replace the default. The first one that is set counts.
	Variables []string
	// Usage is the meaning. A short help shows it up to the first semicolon.
	Usage string
	// Heading is the heading above the flag in the help; empty for none.
	Heading          string
	Hidden, Required bool
}

// FlagKind is the kind of a flag's value.
type FlagKind string

const (
	// KindBool is true or false.
	KindBool     FlagKind = "bool"
	kindInt      FlagKind = "int"
	kindDuration FlagKind = "duration"
	// KindList is a list, separated by commas or by repeating the flag.
	KindList FlagKind = "list"
	// KindText is any text.
	KindText FlagKind = "text"
)

// Flags is a program's table of flags.
type Flags []sectionFlag

type sectionFlag struct {
	section string
	Flag
}

// ParseFlags reads a table of flags, which has a line for each flag:
//
//	NAME[,ALIAS…]  KIND[=DEFAULT]  [$VARIABLE[,VARIABLE…]]  USAGE
//
// KIND is a FlagKind, or a text's choices with "|" between them. The first choice is the default; "…" stands
// for further choices that the command knows. "!" after a kind marks a required flag, "?" a hidden one. A
// line [SECTION] HEADING begins a section. The table is compiled in, so ParseFlags panics on an error in it.
func ParseFlags(table string) Flags {
	var flags Flags
	var section, heading string
	for line := range strings.Lines(table) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if name, found := strings.CutPrefix(line, "["); found {
			section, heading, _ = strings.Cut(name, "]")
			heading = strings.TrimSpace(heading)
			continue
		}
		names, rest := cutWord(line)
		kind, usage := cutWord(rest)
		kind, value, _ := strings.Cut(kind, "=")
		f := Flag{
			Names:    strings.Split(names, ","),
			Value:    value,
			Heading:  heading,
			Required: strings.HasSuffix(kind, "!"),
			Hidden:   strings.HasSuffix(kind, "?"),
		}
		f.Kind = FlagKind(strings.TrimRight(kind, "!?"))
		if strings.Contains(kind, "|") {
			kind, f.Free = strings.CutSuffix(kind, "|…")
			f.Kind, f.Choices = KindText, strings.Split(kind, "|")
			f.Value = cmp.Or(value, f.Choices[0])
		}
		if variables, found := strings.CutPrefix(usage, "$"); found {
			variables, usage = cutWord(variables)
			f.Variables = strings.Split(variables, ",")
		}
		f.Usage = usage
		flags = append(flags, sectionFlag{section, f})
	}
	return flags
}

func cutWord(text string) (word, rest string) {
	word, rest, _ = strings.Cut(text, " ")
	return word, strings.TrimSpace(rest)
}

// Of returns the flags with these names, with the values that the environment sets. A name is a flag's,
// SECTION/FLAG where several have that name, or [SECTION] for all flags of a section.
func (t Flags) Of(environment Environment, names ...string) []cli.Flag {
	var flags []cli.Flag
	for _, name := range names {
		before := len(flags)
		for _, f := range t {
			whole := "[" + f.section + "]"
			if name == whole || name == f.section+"/"+f.Names[0] || name == f.Names[0] && len(flags) == before {
				flags = append(flags, f.New(environment))
			}
		}
		if len(flags) == before {
			panic("the table has no flag " + name) // Every test of the command would find this.
		}
	}
	return flags
}

// New returns the flag for a command, with the value that the environment sets. It panics if the default
// is not of the flag's kind.
func (f Flag) New(environment Environment) cli.Flag {
	for _, variable := range slices.Backward(f.Variables) {
		if value, _ := environment(variable); value != "" {
			f.Value = value
		}
	}
	switch f.Kind {
	case KindBool:
		on, _ := strconv.ParseBool(f.Value) // The command reports a wrong variable.
		flag := describe(&cli.BoolFlag{Value: on}, f)
		if on {
			flag.DefaultText = "true"
		}
		return flag
	case kindInt:
		return describe(&cli.IntFlag{Value: must(strconv.Atoi(f.Value))}, f)
	case kindDuration:
		return describe(&cli.DurationFlag{Value: must(time.ParseDuration(f.Value))}, f)
	case KindList:
		return describe(&cli.StringSliceFlag{}, f)
	case KindText:
		flag := describe(&cli.StringFlag{Value: f.Value}, f)
		if f.Choices != nil && !f.Free {
			flag.Action = f.check
		}
		return flag
	}
	panic(fmt.Sprintf("--%s is of no kind %q", f.Names[0], f.Kind))
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// describedFlag is a flag whose values can be completed.
type describedFlag[T, C any, V cli.ValueCreator[T, C]] struct {
	*cli.FlagBase[T, C, V]
	description Flag
}

// described returns the flag's description.
func (f describedFlag[T, C, V]) described() Flag { return f.description }

func describe[T, C any, V cli.ValueCreator[T, C]](flag *cli.FlagBase[T, C, V], f Flag) *describedFlag[T, C, V] {
	flag.Name, flag.Aliases = f.Names[0], f.Names[1:]
	flag.Usage = f.Usage
	for _, variable := range f.Variables {
		flag.Usage += " [$" + variable + "]"
	}
	flag.Category = f.Heading
	flag.DefaultText = f.Shown
	flag.Hidden = f.Hidden
	flag.Required = f.Required
	return &describedFlag[T, C, V]{flag, f}
}

// check returns an error for a value that is none of the choices.
func (f Flag) check(_ context.Context, _ *cli.Command, value string) error {
	if slices.Contains(f.Choices, value) || f.Former != "" && value == f.Former {
		return nil
	}
	return Usage(fmt.Errorf("--%s %q is none of %s", f.Names[0], value, strings.Join(f.Choices, ", ")))
}
