package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/virgate/virgate/internal/command"
	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/sharing"
)

// statusTimeout is how long a running program may take to answer.
const statusTimeout = 10 * time.Second

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:  "status",
		Usage: "shows the state of a running Virgate",
		Description: "Asks a virgate run over HTTP for its profile, resources and GPUs, and who holds what.\n\n" +
			"Example: virgate status --addr localhost:9400",
		Flags: append(flagTable.Of(nil, "addr"), command.OutputFlag()),
		Action: func(ctx context.Context, cmd *cli.Command) error {
			address, err := dialAddress(cmd.String("addr"))
			if err != nil {
				return command.Usage(fmt.Errorf("--addr: %w", err))
			}
			status, answer, err := getStatus(ctx, address, onCluster(cmd, "addr"))
			if err != nil {
				return err
			}
			var resources []string
			for _, resource := range status.Resources {
				resources = append(resources, resource.Name)
			}
			return show(cmd, json.RawMessage(answer), resources, func(out *text) { out.status(status) })
		},
	}
}

// dialAddress returns the address to connect to, for an address as in --listen; without a host it
// is this machine.
func dialAddress(text string) (string, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "", fmt.Errorf("%q is not HOST:PORT", text)
	}
	if port == "" {
		return "", fmt.Errorf("%q has no port", text)
	}
	return net.JoinHostPort(cmp.Or(host, "localhost"), port), nil
}

// getStatus returns the program's status, and the JSON as received. The hint is added to the error
// if no program answers.
func getStatus(ctx context.Context, address, hint string) (status status.Status, answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	code, answer, err := fetch(ctx, http.MethodGet, "http://"+address+"/api/v1/status", nil)
	switch {
	case err != nil:
		return status, nil, fmt.Errorf("no Virgate answers at %s: %w%s", address, err, hint)
	case code == http.StatusNotFound:
		return status, nil, fmt.Errorf("%s has no status: is a Virgate listening there? "+
			"It answers on its loopback alone: use kubectl exec or port-forward", address)
	case code != http.StatusOK:
		return status, nil, fmt.Errorf("%s answers %d %s: %s", address, code, http.StatusText(code),
			strings.TrimSpace(string(answer)))
	}
	if err := json.Unmarshal(answer, &status); err != nil {
		return status, nil, fmt.Errorf("read the answer of %s: %w", address, err)
	}
	return status, answer, nil
}

// status prints a status.
func (t *text) status(s status.Status) {
	ready := "not ready"
	if s.Ready {
		ready = "ready"
	}
	applied := "none"
	if s.Profile.Applied != nil {
		applied = profileName(*s.Profile.Applied)
	}
	table := t.Table()
	table.Row("node", cmp.Or(s.Node, "-"))
	table.Row("virgate", fmt.Sprintf("%s, %s, %s", s.Version, s.Role, ready))
	table.Row("profile", fmt.Sprintf("%s since %s", s.Profile.State, s.Profile.Since.Format(time.RFC3339)))
	table.Row("  wanted", profileName(s.Profile.Wanted))
	if s.Profile.Wanted.By != "" {
		table.Row("  chosen by", s.Profile.Wanted.By)
	}
	table.Row("  applied", applied)
	if s.Profile.Delayed != nil {
		table.Row("  delayed", "the changed ConfigMap is taken at "+s.Profile.Delayed.UTC().Format(time.RFC3339))
	}
	if s.HoldersAt != nil {
		table.Row("holders", fmt.Sprintf("as the kubelet said %s ago", s.At.Sub(*s.HoldersAt).Round(time.Millisecond)))
	}
	table.End()
	list := func(what string, lines ...string) {
		for _, line := range lines {
			if line != "" {
				t.Line("%s: %s", what, line)
			}
		}
	}
	list("profile", strings.Split(s.Profile.Error, "\n")...)
	list("waits", nodereport.Waiting(s.Layouts, s.Waits)...)
	list("not ready", s.Unready...)
	list("GPUs not read", s.Unread)
	leaving := slices.ContainsFunc(s.Resources, func(r status.Resource) bool { return r.Leaving > 0 || r.Dropped })
	if leaving && !s.KubeletKnown {
		t.Line("kubelet: what it holds and has applied is not known; no device is removed")
	}
	t.Line("")
	t.resources(s.Resources)
	t.Line("")
	t.units(s)
	if len(s.Layouts) > 0 {
		t.Line("")
		t.layouts(s.Layouts)
	}
	t.daemons(s.GPUs)
	if s.DRA != nil {
		t.byClaims(*s.DRA)
	}
	if len(s.Warnings) > 0 {
		t.Line("")
		t.Warnings(s.Warnings)
	}
}

// profileName returns "NAME of SOURCE, generation GENERATION".
func profileName(p nodereport.ProfileRef) string {
	name := cmp.Or(p.Source, "-")
	if p.Name != "" {
		name = p.Name + " of " + name
	}
	if p.Generation != "" {
		name += ", generation " + p.Generation
	}
	return name
}

func (t *text) resources(resources []status.Resource) {
	count := func(n *int) string {
		if n == nil {
			return "?"
		}
		return strconv.Itoa(*n)
	}
	table := t.Table("RESOURCE", "STRATEGY", "DEVICES", "HEALTHY", "HELD", "FREE", "LEAVING", "STREAMS")
	for _, r := range resources {
		strategy := cmp.Or(r.Strategy, "-")
		if r.Dropped {
			strategy = "dropped"
		}
		table.Row(r.Name, strategy, r.Devices, r.Healthy, count(r.Held), count(r.Free), r.Leaving, r.Streams)
	}
	table.End()
}

func (t *text) units(s status.Status) {
	table := t.Table("GPU", "UNIT", "MODEL", "RESOURCE", "HELD", "HEALTH", "HOLDERS")
	unit := func(u status.Unit, model string) {
		held := "?"
		if s.HoldersKnown {
			held = fmt.Sprintf("%d/%d", u.Held(), u.Replicas)
		}
		holders := make([]string, len(u.Holders))
		for i, h := range u.Holders {
			holders[i] = h.Namespace + "/" + h.Pod + "/" + h.Container
			if claim := h.ByClaim(); claim != "" {
				holders[i] += " (" + claim + ")"
			}
		}
		table.Row(cmp.Or(u.Index, "-"), u.ID, model, cmp.Or(u.Resource, "-"), held, healthText(u.Health),
			strings.Join(holders, " "))
	}
	for _, g := range s.GPUs {
		if len(g.Units) == 0 || g.Units[0].ID != g.UUID && g.Health.State != sharing.Healthy {
			table.Row(g.Index, g.UUID, g.Model, "-", "-", healthText(g.Health), "")
		}
		for _, u := range g.Units {
			unit(u, cmp.Or(u.Profile, g.Model))
		}
	}
	for _, u := range s.Elsewhere {
		unit(u, "not on this node")
	}
	table.End()
}

// daemons prints the MPS daemons, if there are any.
func (t *text) daemons(gpus []status.GPU) {
	if !slices.ContainsFunc(gpus, func(g status.GPU) bool { return len(g.MPS) > 0 }) {
		return
	}
	t.Line("")
	table := t.Table("GPU", "MPS DAEMON OF", "STATE", "REASON")
	for _, g := range gpus {
		for _, d := range g.MPS {
			table.Row(g.Index, d.ID, d.Phase, cmp.Or(d.Reason, "-"))
		}
	}
	table.End()
}

// byClaims prints what is offered by Dynamic Resource Allocation.
func (t *text) byClaims(s status.DRA) {
	registered := "not registered with the kubelet"
	if s.Registered {
		registered = "registered with the kubelet"
	}
	t.Line("")
	t.Line("DRA: %s, %d ResourceSlices", registered, s.Slices)
	for _, line := range s.Unwell() {
		t.Line("%s", line)
	}
	table := t.Table("DEVICE BY CLAIMS", "PATH", "CLAIMS")
	for _, d := range s.Devices() {
		table.Row(d.Name, d.Path, cmp.Or(strings.Join(d.Claims, " "), "-"))
	}
	table.End()
}

// layouts prints the GPUs that are partitioned.
func (t *text) layouts(layouts []nodereport.GPULayout) {
	table := t.Table("GPU", "MIG LAYOUT", "STATE", "REASON")
	for _, gpu := range layouts {
		table.Row(gpu.Index, gpu.Wanted, gpu.State, cmp.Or(gpu.Reason, "-"))
	}
	table.End()
}

func healthText(h status.Health) string {
	if h.Reason == "" {
		return string(h.State)
	}
	return strings.TrimSuffix(fmt.Sprintf("%s: %s (%s)", h.State, h.Reason, h.Explanation), " ()")
}
