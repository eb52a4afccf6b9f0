package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"
	"golang.org/x/term"
	"sigs.k8s.io/yaml"

	"github.com/virgate/virgate/internal/cluster"
	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/status"
)

// watchCluster shows the cluster and its changes until the context ends or a key is pressed;
// neither is an error.
func watchCluster(
	ctx context.Context,
	cmd *cli.Command,
	watcher *cluster.Watcher,
	show func(*text, cluster.View, bool),
	of func(cluster.View) (any, []string),
) error {
	output := cmd.String("output")
	out := cmd.Root().Writer
	notes := cmd.Root().ErrWriter
	table := func(view cluster.View) string {
		var t text
		show(&t, view, output == "wide")
		return status.Plain(t.String())
	}
	var present func(cluster.View) error
	switch output {
	case "name":
		return command.Usage(errors.New("--watch prints no names: use --output table, wide, json or yaml"))
	case "json", "yaml":
		var before string
		present = func(view cluster.View) error {
			list, _ := of(view)
			data, err := changedDocument(&before, clusterDocument(cmd, view, list), output)
			if err == nil {
				_, err = out.Write(data)
			}
			return err
		}
	default:
		if terminal, ok := out.(command.Terminal); ok {
			return liveTable(ctx, watcher, os.Stdin, terminal, table)
		}
		lines := changedLines{keys: 1}
		if cmd.Name == "gpus" {
			lines.keys = 2
		}
		var said []string
		present = func(view cluster.View) error {
			for _, note := range view.Notes {
				if !slices.Contains(said, note) {
					_, _ = fmt.Fprintln(notes, "note:", status.Plain(note))
				}
			}
			said = view.Notes
			_, err := io.WriteString(out, lines.next(table(view), view.At))
			return err
		}
	}
	return eachSnapshot(ctx, watcher, nil, func(s *cluster.Snapshot) error {
		if s == nil {
			return nil
		}
		return present(cluster.NewView(*s))
	})
}

// errEnough ends eachSnapshot without an error.
var errEnough = errors.New("enough")

// eachSnapshot runs the watcher and presents each snapshot; before the first one it presents nil.
// When again receives, it presents the last one again. It returns nil when the context ends.
func eachSnapshot(
	ctx context.Context,
	watcher *cluster.Watcher,
	again <-chan error,
	present func(*cluster.Snapshot) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- watcher.Run(ctx) }()
	err := func() error {
		for {
			snapshot, newer := watcher.Latest()
			if err := present(snapshot); err != nil {
				return err
			}
			select {
			case err := <-ended:
				ended <- nil
				return err
			case err := <-again:
				if err != nil {
					return err
				}
			case <-newer:
			}
		}
	}()
	cancel()
	if failed := <-ended; err == nil {
		err = failed
	}
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}

// ages matches text that grows older by itself or is written repeatedly, and so is no change.
var ages = regexp.MustCompile(`nothing heard for [0-9hms]+|[0-9hms]+ ago|"heartbeat":"[^"]*"`)

// changedDocument returns the document in one line, or as one of a stream of YAML documents. It
// returns nothing if only its time or an age has changed.
func changedDocument(before *string, document map[string]any, output string) ([]byte, error) {
	whole, err := json.Marshal(document)
	if err != nil {
		return nil, err
	}
	at := document["at"]
	delete(document, "at")
	data, err := json.Marshal(document)
	document["at"] = at
	now := ages.ReplaceAllString(string(data), "old")
	if err != nil || now == *before {
		return nil, err
	}
	*before = now
	if output == "json" {
		return append(whole, '\n'), nil
	}
	data, err = yaml.JSONToYAML(whole)
	return slices.Concat([]byte("---\n"), data), err
}

// changedLines finds the new lines of a table, and adds the time to each.
type changedLines struct {
	// keys is the number of cells that identify what a line is about.
	keys        int
	lines, gone map[string]bool
}

// next returns the lines that were not in the previous table, and what had lines in it but has none
// now. It returns the first table as a whole.
func (c *changedLines) next(table string, at time.Time) string {
	var out strings.Builder
	now, first := at.UTC().Format(time.RFC3339), c.lines == nil
	lines, names := map[string]bool{}, map[string]bool{}
	for i, line := range slices.Collect(strings.Lines(table)) {
		cells := strings.Fields(ages.ReplaceAllString(line, "old")) // Other lines can make columns wider.
		key := strings.Join(cells, " ")
		lines[key] = true
		names[strings.Join(cells[:min(c.keys, len(cells))], "  ")] = true
		switch {
		case i == 0 && first:
			_, _ = fmt.Fprintf(&out, "%-*s  %s", len(now), "TIME", line)
		case !c.lines[key]:
			out.WriteString(now + "  " + line)
		}
	}
	var gone []string
	for name := range c.gone {
		if !names[name] {
			gone = append(gone, now+"  "+name+"  gone\n")
		}
	}
	slices.Sort(gone)
	c.lines, c.gone = lines, names
	return out.String() + strings.Join(gone, "")
}

const (
	// No line wraps: a line that is too wide for the terminal must not take two.
	beginLive = "\x1b[?25l\x1b[?7l"
	endLive   = "\x1b[?7h\x1b[?25h\r\n"
)

// liveTable redraws the table from the terminal's first line, until q or Ctrl-C.
func liveTable(
	ctx context.Context,
	watcher *cluster.Watcher,
	in *os.File,
	out command.Terminal,
	table func(cluster.View) string,
) error {
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	again := make(chan error)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-resized:
			}
			select {
			case <-ctx.Done():
				return
			case again <- nil:
			}
		}
	}()
	if before, err := term.MakeRaw(int(in.Fd())); err == nil { // Read single keys, without echo.
		defer func() { _ = term.Restore(int(in.Fd()), before) }()
		go func() { // It ends with the program at the latest, because nothing else ends a read.
			for key := make([]byte, 1); ; {
				if _, err := in.Read(key); err != nil {
					return
				}
				if bytes.ContainsAny(key, "qQ\x03") {
					select {
					case <-ctx.Done():
					case again <- errEnough:
					}
					return
				}
			}
		}()
	}
	_, height, _ := term.GetSize(int(out.Fd()))
	// Scroll away what the terminal shows.
	if _, err := io.WriteString(out, strings.Repeat("\r\n", max(0, height-1))+beginLive); err != nil {
		return err
	}
	defer func() { _, _ = io.WriteString(out, endLive) }()
	return eachSnapshot(ctx, watcher, again, func(s *cluster.Snapshot) error {
		lines := []string{"reading Nodes and pods (q ends)"}
		if s != nil {
			view := cluster.NewView(*s)
			lines[0] = fmt.Sprintf("%s  %d nodes  (q ends)", view.At.Local().Format(time.TimeOnly), len(view.Nodes))
			for _, note := range view.Notes {
				lines = append(lines, "note: "+status.Plain(note))
			}
			lines = append(lines, strings.Split(strings.TrimSuffix(table(view), "\n"), "\n")...)
		}
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil {
			width, height = 80, 24
		}
		_, err = out.Write(frame(lines, width, height, out.Colours))
		return err
	})
}

// frame draws lines over the terminal's content, from its first line on, so that nothing flickers.
// The last line counts the lines that do not fit. It is pure.
func frame(lines []string, width, height int, colours bool) []byte {
	if more := len(lines) - height; more > 0 && height > 0 {
		lines = append(slices.Clone(lines[:height-1]), fmt.Sprintf("… %d more", more+1))
	}
	var out bytes.Buffer
	out.WriteString("\x1b[H")
	for i, line := range lines {
		if i > 0 {
			out.WriteString("\r\n")
		}
		if runes := []rune(line); len(runes) > width && width > 0 {
			line = string(runes[:width-1]) + "…"
		}
		if colours {
			line = command.Paint(line)
		}
		// Clear first: at the terminal's edge, clearing afterwards would delete the last letter.
		out.WriteString("\x1b[2K" + line)
	}
	if len(lines) < height {
		out.WriteString("\r\n\x1b[J")
	}
	return out.Bytes()
}
