package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// cat writes the files, or its standard input.
func cat(args []string) (int, error) {
	err := eachFile(args, func(_ string, file io.Reader) error {
		_, err := io.Copy(os.Stdout, file)
		return err
	})
	if err != nil {
		return 1, err
	}
	return 0, nil
}

// eachFile opens the files one after the other; "-", or no name, is the standard input. It goes on
// after a file that cannot be read, and returns all errors.
func eachFile(names []string, read func(name string, file io.Reader) error) error {
	var all error
	if len(names) == 0 {
		names = []string{"-"}
	}
	for _, name := range names {
		if name == "-" {
			all = errors.Join(all, read(name, os.Stdin))
			continue
		}
		file, err := os.Open(name)
		if err == nil {
			err = errors.Join(read(name, file), file.Close())
		}
		all = errors.Join(all, err)
	}
	return all
}

// lsmod lists the kernel's modules.
func lsmod(args []string) (int, error) {
	if len(args) > 0 {
		return 1, errors.New("takes no argument")
	}
	modules, err := os.ReadFile("/proc/modules")
	if err != nil {
		return 1, err
	}
	fmt.Print(moduleTable(string(modules)))
	return 0, nil
}

// moduleTable formats the kernel's list of modules as a table. The lines of the list are NAME SIZE
// USES USERS STATE ADDRESS; the users are separated by commas, or "-" for none.
func moduleTable(list string) string {
	var table strings.Builder
	table.WriteString("Module                  Size  Used by\n")
	for line := range strings.Lines(list) {
		if fields := strings.Fields(line); len(fields) > 3 {
			users := strings.TrimSuffix(strings.TrimPrefix(fields[3], "-"), ",")
			fmt.Fprintln(&table, strings.TrimRight(
				fmt.Sprintf("%-19s %8s  %s %s", fields[0], fields[1], fields[2], users), " "))
		}
	}
	return table.String()
}

// sleep waits for the sum of the times. Each is a number and s, m, h or d.
func sleep(args []string) (int, error) {
	var sum time.Duration
	if len(args) == 0 {
		return 1, errors.New("how long?")
	}
	for _, each := range args {
		if each == "infinity" {
			select {}
		}
		unit, number := time.Second, each
		for suffix, of := range map[string]time.Duration{
			"s": time.Second,
			"m": time.Minute,
			"h": time.Hour,
			"d": 24 * time.Hour,
		} {
			if rest, ok := strings.CutSuffix(each, suffix); ok {
				unit, number = of, rest
			}
		}
		count, err := strconv.ParseFloat(number, 64)
		if err != nil || count < 0 {
			return 1, fmt.Errorf("%q is no time", each)
		}
		sum += time.Duration(count * float64(unit))
	}
	time.Sleep(sum)
	return 0, nil
}

// grep writes the lines that match the pattern, which is a basic expression unless -E or -F is
// given. Its exit code is 0 if a line matches, 1 if none does, 2 after an error.
func grep(args []string) (int, error) {
	options, patterns, files, err := grepOptions(args)
	if err != nil {
		return 2, err
	}
	pattern, err := compile(patterns, options)
	if err != nil {
		return 2, err
	}
	code := 1
	err = eachFile(files, func(name string, file io.Reader) error {
		if len(files) < 2 {
			name = ""
		} else {
			name += ":"
		}
		for lines := bufio.NewReader(file); ; {
			line, err := lines.ReadString('\n')
			text := strings.TrimSuffix(line, "\n")
			if line != "" && pattern.MatchString(text) != options['v'] {
				code = 0
				if !options['q'] {
					fmt.Println(name + text)
				}
			}
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
		}
	})
	if err != nil && (code != 0 || !options['q']) {
		code = 2
	}
	if options['s'] {
		err = nil
	}
	return code, err
}

func grepOptions(args []string) (options map[rune]bool, patterns, files []string, err error) {
	options = map[rune]bool{}
	for ; len(args) > 0; args = args[1:] {
		letters, ok := strings.CutPrefix(args[0], "-")
		if args[0] == "--" {
			files = append(files, args[1:]...)
			break
		}
		if !ok || letters == "" {
			files = append(files, args[0])
			continue
		}
		letters, pattern, ok := strings.Cut(letters, "e")
		for _, letter := range letters {
			if !strings.ContainsRune("EFGiqsvwx", letter) {
				return nil, nil, nil, fmt.Errorf("no option -%c", letter)
			}
			options[letter] = true
		}
		if ok && pattern == "" && len(args) > 1 {
			args = args[1:]
			pattern = args[0]
		}
		if ok {
			patterns = append(patterns, pattern)
		}
	}
	if patterns == nil {
		if len(files) == 0 {
			return nil, nil, nil, errors.New("which pattern?")
		}
		patterns, files = files[:1], files[1:]
	}
	return options, patterns, files, nil
}

// compile makes one expression from the patterns. Each line of a pattern is a pattern of its own.
func compile(patterns []string, options map[rune]bool) (*regexp.Regexp, error) {
	all := strings.Split(strings.Join(patterns, "\n"), "\n")
	for i, pattern := range all {
		switch {
		case options['F']:
			all[i] = regexp.QuoteMeta(pattern)
		case !options['E']:
			all[i] = extended(pattern)
		}
	}
	expression := "(?:" + strings.Join(all, "|") + ")"
	if options['w'] {
		expression = `(?:^|\W)` + expression + `(?:\W|$)`
	}
	if options['x'] {
		expression = "^" + expression + "$"
	}
	if options['i'] {
		expression = "(?i)" + expression
	}
	return regexp.Compile(expression)
}

// extended converts a basic expression to an extended one. In a basic expression a backslash gives
// these signs their special meaning, in an extended one it takes it away. In brackets they never
// have one.
func extended(basic string) string {
	const signs = "(){}|+?"
	var b strings.Builder
	for i := 0; i < len(basic); i++ {
		switch c := basic[i]; {
		case c == '\\' && i+1 < len(basic):
			i++
			if strings.IndexByte(signs, basic[i]) < 0 {
				b.WriteByte(c)
			}
		case strings.IndexByte(signs, c) >= 0:
			b.WriteByte('\\')
		}
		b.WriteByte(basic[i])
	}
	return b.String()
}
