package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/sharing"
)

// printStatus writes a status for people.
func printStatus(w io.Writer, s agent.Status) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	role := string(s.Role)
	if s.Ready {
		role += ", ready"
	} else {
		role += ", not ready"
	}
	_, _ = fmt.Fprintf(table, "node\t%s\n", cmp.Or(s.Node, "-"))
	_, _ = fmt.Fprintf(table, "virgate\t%s, %s\n", s.Version, role)
	_, _ = fmt.Fprintf(table, "profile\t%s since %s\n", s.Profile.State, s.Profile.Since.Format(time.RFC3339))
	_, _ = fmt.Fprintf(table, "  wanted\t%s\n", profileName(s.Profile.Wanted))
	applied := "none"
	if s.Profile.Applied != nil {
		applied = profileName(*s.Profile.Applied)
	}
	_, _ = fmt.Fprintf(table, "  applied\t%s\n", applied)
	if err := table.Flush(); err != nil {
		return err
	}
	for line := range strings.SplitSeq(s.Profile.Error, "\n") {
		if line != "" {
			_, _ = fmt.Fprintf(w, "profile: %s\n", line)
		}
	}
	for _, reason := range s.Unready {
		_, _ = fmt.Fprintf(w, "not ready: %s\n", reason)
	}
	if s.Unread != "" {
		_, _ = fmt.Fprintf(w, "GPUs not read: %s\n", s.Unread)
	}
	leaving := slices.ContainsFunc(s.Resources, func(r agent.ResourceStatus) bool { return r.Leaving > 0 || r.Dropped })
	if leaving && !s.KubeletKnown {
		_, _ = fmt.Fprintln(w, "kubelet: what it holds and has applied is not known; no list loses a device")
	}
	_, _ = fmt.Fprintln(w)
	if err := printResources(w, s.Resources); err != nil {
		return err
	}
	_, _ = fmt.Fprintln(w)
	if err := printUnits(w, s); err != nil {
		return err
	}
	if err := printCut(w, s.Layouts); err != nil {
		return err
	}
	if len(s.Warnings) > 0 {
		_, _ = fmt.Fprintln(w)
	}
	return printWarnings(w, s.Warnings)
}

// profileName is "NAME (SOURCE), generation GENERATION".
func profileName(p sharing.ProfileRef) string {
	name := cmp.Or(p.Source, "-")
	if p.Name != "" {
		name = p.Name + " of " + name
	}
	if p.Generation != "" {
		name += ", generation " + p.Generation
	}
	return name
}

func printResources(w io.Writer, resources []agent.ResourceStatus) error {
	count := func(n *int) string {
		if n == nil {
			return "?"
		}
		return strconv.Itoa(*n)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "RESOURCE\tSTRATEGY\tDEVICES\tHEALTHY\tHELD\tFREE\tLEAVING\tSTREAMS")
	for _, r := range resources {
		strategy := cmp.Or(r.Strategy, "-")
		if r.Dropped {
			strategy = "dropped"
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d\t%d\t%s\t%s\t%d\t%d\n", r.Name, strategy, r.Devices, r.Healthy, count(r.Held), count(r.Free), r.Leaving, r.Streams)
	}
	return table.Flush()
}

func printUnits(w io.Writer, s agent.Status) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "GPU\tUNIT\tMODEL\tRESOURCE\tHELD\tHEALTH\tHOLDERS")
	for _, g := range s.GPUs {
		if len(g.Units) == 0 || g.Units[0].ID != g.UUID && g.Health.State != sharing.Healthy {
			_, _ = fmt.Fprintf(table, "%d\t%s\t%s\t-\t-\t%s\t\n", g.Index, g.UUID, g.Model, healthText(g.Health))
		}
		for _, u := range g.Units {
			model := g.Model
			if u.Profile != "" {
				model = u.Profile
			}
			printUnit(table, u, model, s.HoldersKnown)
		}
	}
	for _, u := range s.Elsewhere {
		printUnit(table, u, "not on this node", s.HoldersKnown)
	}
	return table.Flush()
}

// printCut writes the boards that are cut; nothing where none is.
func printCut(w io.Writer, layouts []sharing.BoardLayout) error {
	if len(layouts) == 0 {
		return nil
	}
	_, _ = fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "GPU\tMIG LAYOUT\tSTATE\tREASON")
	for _, board := range layouts {
		_, _ = fmt.Fprintf(table, "%d\t%s\t%s\t%s\n", board.Index, board.Wanted, board.State, cmp.Or(board.Reason, "-"))
	}
	return table.Flush()
}

func printUnit(table io.Writer, u agent.UnitStatus, what string, holdersKnown bool) {
	held := "?"
	if holdersKnown {
		held = fmt.Sprintf("%d/%d", u.Held(), u.Replicas)
	}
	holders := make([]string, len(u.Holders))
	for i, h := range u.Holders {
		holders[i] = h.Namespace + "/" + h.Pod + "/" + h.Container
	}
	_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", cmp.Or(u.Index, "-"), u.ID, what, cmp.Or(u.Resource, "-"), held, healthText(u.Health), strings.Join(holders, " "))
}

func healthText(h agent.HealthStatus) string {
	if h.Reason == "" {
		return string(h.State)
	}
	return string(h.State) + ": " + h.Reason
}
