package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/drapath"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nodemetrics"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin/grant"
	"github.com/virgate/virgate/sharing"
)

// newDRA makes the driver that serves claims on the node, and what measures the kubelet's calls.
func newDRA(
	o Options,
	node *nvml.Node,
	kubelet *podresources.Source,
	file *state.File,
	entries claimEntries,
) (drapath.Options, *nodemetrics.ClaimCalls, error) {
	if o.DRA == nil {
		return drapath.Options{}, nil, nil
	}
	name, calls := o.DRA.Driver, nodemetrics.NewClaimCalls()
	table := claims.NewTable(claims.Options{
		Store:   file,
		Driver:  name,
		Holders: kubelet.HeldTogether,
		Entries: entries,
	})
	options := *o.DRA
	options.Node, options.Dir = o.NodeName, filepath.Join(o.DRA.Dir, name)
	options.Claims = preparer{table, name}
	options.Changed = table.Tell
	options.Logger = o.Logger
	options.Observe = func(call dradriver.Call, took time.Duration, err error) {
		calls.Observe(string(call), took, err)
	}
	driver, err := dradriver.New(options)
	if err != nil {
		return drapath.Options{}, nil, fmt.Errorf("serve claims: %w", err)
	}
	sys := os.DirFS("/sys")
	return drapath.Options{
		Driver: driver,
		Claims: table,
		Node: func() dra.Node {
			versions := node.Versions()
			return dra.Node{
				Name:          o.NodeName,
				Driver:        name,
				DriverVersion: versions.Driver,
				CUDA:          versions.CUDA,
			}
		},
		PCIeRoot: func(busID string) string { return host.PCIeRoot(sys, busID) },
	}, calls, nil
}

// preparer adapts the table for the driver, which wants CDI names.
type preparer struct {
	*claims.Table
	driver string
}

// Prepare implements dradriver.Claims.
func (p preparer) Prepare(ctx context.Context, c dra.Claim) (names [][]string, err error) {
	for _, config := range c.Configs {
		if err := checkConfig(config); err != nil {
			return nil, fmt.Errorf("claim %s: its configuration for %s: %w", c, p.driver, err)
		}
	}
	if err := p.Table.Prepare(ctx, c); err != nil {
		return nil, err
	}
	for i, r := range c.Results {
		all := []string{grant.CDIName(grant.CDIClass, r.UnitName())}
		if byMPS(r) {
			all = append(all, cdi.ClaimName(c.UID, i))
		}
		names = append(names, all)
	}
	return names, nil
}

// checkConfig returns an error for a claim's configuration that this driver cannot fulfil. The
// profile decides how a device is shared. A claim for NVIDIA's driver may ask for time slices of
// any length, and gets them if it has a share.
func checkConfig(raw []byte) error {
	var config struct {
		APIVersion, Kind string
		Sharing          struct{ Strategy string }
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return err
	}
	known := strings.HasPrefix(config.APIVersion, "resource.nvidia.com/") &&
		(config.Kind == "GpuConfig" || config.Kind == "MigDeviceConfig")
	switch {
	case !known:
		return fmt.Errorf("%q of %q is not known", config.Kind, config.APIVersion)
	case config.Sharing.Strategy != "" && config.Sharing.Strategy != "TimeSlicing":
		return fmt.Errorf("sharing.strategy %q: the node's profile says how devices are shared",
			config.Sharing.Strategy)
	}
	return nil
}

// claimEntries are the CDI entries of claims with MPS shares: they set the limits for the claim's
// number of shares.
type claimEntries struct {
	cdi.ClaimSpecs
	mpsRoot string
}

// byMPS reports whether the claim has an entry for the device.
func byMPS(r dra.Result) bool { return dra.ModeOf(r.Device).Shares > 0 && !r.Admin }

// Write implements claims.Entries.
func (e claimEntries) Write(c dra.Claim, units map[string]claims.Unit) error {
	entries := map[int]grant.Edits{}
	for i, r := range c.Results {
		if byMPS(r) {
			unit := units[r.UnitName()]
			entries[i] = grant.MPSAccess(e.mpsRoot, unit.ID,
				sharing.NewMPSLimit(int(r.Shares), dra.ModeOf(r.Device).Shares, unit.Memory))
		}
	}
	return e.ClaimSpecs.Write(c.UID, entries)
}

// Remove implements claims.Entries.
func (e claimEntries) Remove(c dra.Claim) error { return e.ClaimSpecs.Remove(c.UID) }

// Keep implements claims.Entries.
func (e claimEntries) Keep(all []dra.Claim) error {
	uids := make([]string, len(all))
	for i, c := range all {
		uids[i] = c.UID
	}
	return e.ClaimSpecs.Keep(uids)
}

// unitNames returns the names of the GPUs' units in claims, by UUID.
func unitNames(gpus []sharing.GPU) map[string]string {
	names := map[string]string{}
	for id, named := range dra.UnitNames(gpus) {
		names[id] = named.Name
	}
	return names
}

// claimedUnits returns the units of a claim's devices. Devices of other drivers are looked up in
// the CDI specs. A claim holds nothing of a partition that no longer exists: after a reboot, the
// kubelet shows the claims of all pods at once, and each partition must be made again.
func claimedUnits(
	inventory func() ([]sharing.GPU, error),
	others *cdi.Claims,
) func(driver string, devices, names []string) ([]string, bool) {
	return func(driver string, devices, names []string) (units []string, guessed bool) {
		if driver != dra.DriverName && driver != dra.NVIDIADriver {
			return others.Units(driver, devices, names)
		}
		gpus, _ := inventory() // After an error they are the last known ones.
		for id, unitName := range unitNames(gpus) {
			for _, device := range devices {
				if dra.UnitNameOf(device) == unitName {
					units = append(units, id)
				}
			}
		}
		if units == nil && driver == dra.NVIDIADriver && !slices.ContainsFunc(devices, isOurs) {
			return others.Units(driver, devices, names)
		}
		return units, false
	}
}

// isOurs reports whether internal/dra made the device's name, which has its GPU's UUID. NVIDIA's
// driver uses numbers: gpu-0, gpu-0-mig-1g10gb-0.
func isOurs(device string) bool {
	return strings.Count(strings.TrimPrefix(device, "gpu-"), "-") >= 4 && len(device) >= len("gpu-")+36
}
