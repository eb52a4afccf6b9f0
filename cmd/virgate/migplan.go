package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/sharing"
)

func migPlanCommand(environment environment) *cli.Command {
	return &cli.Command{
		Name:  "plan",
		Usage: "shows how a layout would be reached, with the slices before and after",
		Description: "Reads the node's GPUs once and changes nothing.\n\n" +
			"Example: virgate mig plan --node sim:a30x4+all-1g.6gb --name all-balanced --busy 0:1",
		Flags: append(append(layoutFlags(environment),
			outputFlag("text"),
		), settingFlags()...),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			asJSON, err := wantsJSON(cmd, "text")
			if err != nil {
				return err
			}
			wanted, err := wantedLayout(cmd, environment)
			if err != nil {
				return err
			}
			boards, err := cutNode(ctx, cmd, environment)
			if err != nil {
				return err
			}
			plans, warnings := planBoards(boards, wanted)
			if asJSON {
				return printJSON(cmd.Root().Writer, migReport(plans, warnings))
			}
			for _, p := range plans {
				if _, err := io.WriteString(cmd.Root().Writer, p.text(wanted)); err != nil {
					return err
				}
			}
			return printWarnings(cmd.Root().Writer, warnings)
		},
	}
}

// text describes the plan of one board for a person.
func (p boardPlan) text(wanted sharing.Repartition) string {
	var b strings.Builder
	fmt.Fprintf(&b, "GPU %d, %s: %s\n", p.gpu.Index, p.gpu.Model, p.verdict(wanted))
	if p.cut.MIG || p.change.Steps != nil {
		b.WriteString(p.drawing("now", p.change.Before(p.cut.Instances)))
	}
	if !p.change.Empty() {
		b.WriteString(p.drawing("then", p.change.After(p.cut.Instances)))
	}
	for n, step := range p.change.Steps {
		fmt.Fprintf(&b, "  %d. %s\n", n+1, step)
	}
	for _, blocked := range p.change.Blocked {
		fmt.Fprintf(&b, "  waits: %s (%s)\n", blocked, blocked.UUID)
	}
	return b.String()
}

// drawing is the board's slots under a title; a board without MIG mode has
// none.
func (p boardPlan) drawing(title string, blocks []mig.Block) string {
	if on := p.cut.MIG; title == "now" && !on || title == "then" && !p.after() {
		return "  " + title + ": MIG off\n"
	}
	return "  " + title + ": MIG on\n" + drawBlocks("  ", p.cut.Geometry.Slots, blocks)
}

// after is the MIG mode when the steps are made.
func (p boardPlan) after() bool {
	for _, step := range p.change.Steps {
		switch step.Action {
		case mig.EnableMIG:
			return true
		case mig.DisableMIG:
			return false
		}
	}
	return p.cut.MIG
}

// verdict is the plan in a few words.
func (p boardPlan) verdict(wanted sharing.Repartition) string {
	c := p.change
	switch {
	case p.problem != nil:
		return "cannot be changed: " + p.problem.Error()
	case !p.wanted:
		return fmt.Sprintf("nothing is asked of it by %q", wanted.Name)
	case c.Empty() && c.Complete():
		return fmt.Sprintf("is cut as %q asks", wanted.Name)
	case !c.Complete() && wanted.WhenBusy == sharing.Refuse:
		return fmt.Sprintf("refuses %q while partitions in use are in the way (whenBusy: refuse)", wanted.Name)
	}
	made := 0
	for _, step := range c.Steps {
		if step.Action == mig.CreateCompute {
			made++
		}
	}
	text := fmt.Sprintf("%q keeps %d, destroys %d and makes %d", wanted.Name, len(c.Kept), len(c.Doomed), made)
	if !c.Complete() {
		text += " now; the rest waits"
	}
	return text
}
