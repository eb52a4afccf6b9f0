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

	"github.com/virgate/virgate/internal/agent"
	"github.com/virgate/virgate/internal/cdi"
	"github.com/virgate/virgate/internal/claims"
	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/dradriver"
	"github.com/virgate/virgate/internal/host"
	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/podresources"
	"github.com/virgate/virgate/internal/state"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

// newDRA makes what serves claims on the node.
func newDRA(o Options, node *nvml.Node, kubelet *podresources.Source, file *state.File, entries claimEntries) (agent.DRAOptions, error) {
	name := o.DRA.Driver
	pool := dra.PoolName(o.NodeName, name)
	table := claims.NewTable(claims.Options{Store: file, Driver: name, Holders: kubelet.HeldTogether, Entries: entries})
	options := *o.DRA
	options.Node, options.Dir = o.NodeName, filepath.Join(o.DRA.Dir, name)
	calls := agent.NewClaimCalls()
	options.Claims, options.Changed, options.Logger = preparer{table, name, pool}, table.Tell, o.Logger
	options.Observe = func(call dradriver.Call, took time.Duration, err error) { calls.Observe(string(call), took, err) }
	driver, err := dradriver.New(options)
	if err != nil {
		return agent.DRAOptions{}, fmt.Errorf("serve claims: %w", err)
	}
	sys := os.DirFS("/sys")
	return agent.DRAOptions{
		Driver: draDriver{driver, pool}, Claims: table, Calls: calls,
		Node: func() dra.Node {
			versions := node.Versions()
			return dra.Node{Name: o.NodeName, Driver: name, DriverVersion: versions.Driver, CUDA: versions.CUDA}
		},
		PCIeRoot: func(busID string) string { return host.PCIeRoot(sys, busID) },
	}, nil
}

// draDriver is the driver as the agent sees it.
type draDriver struct {
	*dradriver.Driver
	pool string
}

func (d draDriver) Allocated(ctx context.Context) (map[string][]string, error) {
	return d.Driver.Allocated(ctx, d.pool)
}

func (d draDriver) Publish(offer dra.Offer) { d.Driver.Publish(offer.Slices) }

func (d draDriver) State() agent.DRAState {
	s := d.Status()
	state := agent.DRAState{
		Registered: s.Registered, Slices: s.Published, Written: s.Written, Writes: s.Writes, WriteFailures: s.Failures, Unwritten: s.Unpublished != "",
		Without: agent.DRAFeatures{Taints: s.Dropped.Taints, Shares: s.Dropped.Shares, Counters: s.Dropped.Counters},
	}
	for _, problem := range []string{s.Unserved, s.Unpublished} {
		if problem != "" {
			state.Problems = append(state.Problems, problem)
		}
	}
	return state
}

// preparer is the table as the driver sees it: the driver's claims have other drivers' devices
// too, and its answers CDI names.
type preparer struct {
	table        *claims.Table
	driver, pool string
}

// sharesName is the capacity of which each share takes one.
const sharesName = "shares"

func (p preparer) claim(from dradriver.Claim) claims.Claim {
	c := claims.Claim{UID: from.UID, Namespace: from.Namespace, Name: from.Name, ByName: from.ByName}
	for _, r := range from.Results {
		if r.Driver == p.driver && r.Pool == p.pool {
			c.Results = append(c.Results, claims.Result{Request: r.Request, Device: r.Device, ShareID: r.ShareID, Shares: r.Consumed[sharesName], Admin: r.Admin})
		}
	}
	return c
}

// Prepare implements dradriver.Claims.
func (p preparer) Prepare(ctx context.Context, from dradriver.Claim) (dradriver.Prepared, error) {
	c := p.claim(from)
	for _, config := range from.Configs {
		if err := checkConfig(config); err != nil {
			return dradriver.Prepared{}, fmt.Errorf("claim %s: its configuration for %s: %w", c, p.driver, err)
		}
	}
	if err := p.table.Prepare(ctx, c); err != nil {
		return dradriver.Prepared{}, err
	}
	var prepared dradriver.Prepared
	for i, r := range c.Results {
		names := []string{plugin.CDIName(plugin.CDIClass, dra.PlaceOf(r.Device))}
		if byMPS(r) {
			names = append(names, cdi.ClaimName(c.UID, i))
		}
		prepared.Devices = append(prepared.Devices, dradriver.PreparedDevice{
			Requests: []string{r.Request}, Pool: p.pool, Device: r.Device, ShareID: r.ShareID, CDI: names,
		})
	}
	return prepared, nil
}

// checkConfig says what a claim wants of this driver that it would not get. How a device is shared is
// for the profile to say; a claim for NVIDIA's driver may ask for time slices, of any length, and
// has them where it has been given a share.
func checkConfig(raw []byte) error {
	var config struct {
		APIVersion, Kind string
		Sharing          struct{ Strategy string }
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return err
	}
	known := strings.HasPrefix(config.APIVersion, "resource.nvidia.com/") && (config.Kind == "GpuConfig" || config.Kind == "MigDeviceConfig")
	switch {
	case !known:
		return fmt.Errorf("%q of %q is not known", config.Kind, config.APIVersion)
	case config.Sharing.Strategy != "" && config.Sharing.Strategy != "TimeSlicing":
		return fmt.Errorf("sharing.strategy %q: the node's profile says how devices are shared", config.Sharing.Strategy)
	}
	return nil
}

// claimEntries are the CDI entries of claims that have shares by MPS: the limits of as many as
// each has.
type claimEntries struct {
	cdi.ClaimSpecs
	mpsRoot string
}

// byMPS says that the device has an entry of the claim.
func byMPS(r claims.Result) bool { return dra.ModeOf(r.Device).Shares > 0 && !r.Admin }

// Write implements claims.Entries.
func (e claimEntries) Write(c claims.Claim, units map[string]claims.Unit) error {
	entries := map[int]cdi.ClaimEntry{}
	for i, r := range c.Results {
		if byMPS(r) {
			unit := units[dra.PlaceOf(r.Device)]
			env, mounts := plugin.MPSAccess(e.mpsRoot, unit.ID, sharing.NewMPSLimit(int(r.Shares), dra.ModeOf(r.Device).Shares, unit.Memory))
			entries[i] = cdi.ClaimEntry{Env: env, Mounts: mounts}
		}
	}
	return e.ClaimSpecs.Write(c.UID, entries)
}

// Remove implements claims.Entries.
func (e claimEntries) Remove(c claims.Claim) error { return e.ClaimSpecs.Remove(c.UID) }

// Keep implements claims.Entries.
func (e claimEntries) Keep(all []claims.Claim) error {
	uids := make([]string, len(all))
	for i, c := range all {
		uids[i] = c.UID
	}
	return e.ClaimSpecs.Keep(uids)
}

// Unprepare implements dradriver.Claims.
func (p preparer) Unprepare(_ context.Context, from dradriver.Claim) error {
	return p.table.Unprepare(p.claim(from))
}

// Devices implements dradriver.Claims.
func (p preparer) Devices() (list []dradriver.DeviceHealth, changed <-chan struct{}) {
	devices, changed := p.table.Devices()
	for _, d := range devices {
		list = append(list, dradriver.DeviceHealth{Pool: p.pool, Device: d.Name, Healthy: d.Healthy, Reason: d.Reason, Since: d.Since})
	}
	return list, changed
}

// placeNames are the names of the GPUs' units as claims have them, by UUID.
func placeNames(gpus []sharing.GPU) map[string]string {
	names := map[string]string{}
	for id, place := range dra.Places(gpus) {
		names[id] = place.Name
	}
	return names
}

// claimedUnits are the units of a claim's devices; those of other drivers are looked up in the
// CDI specs. Of a partition that is gone nobody has anything: after a reboot the kubelet shows the
// claims of all pods at once, and each is to have its partition made again.
func claimedUnits(inventory func() ([]sharing.GPU, error), others *cdi.Claims) func(driver string, devices, names []string) ([]string, bool) {
	return func(driver string, devices, names []string) (units []string, guessed bool) {
		if driver != dra.DriverName && driver != dra.NVIDIADriver {
			return others.Units(driver, devices, names)
		}
		gpus, _ := inventory() // With an error they are the last ones known.
		for id, place := range placeNames(gpus) {
			for _, device := range devices {
				if dra.PlaceOf(device) == place {
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

// isOurs says that a device has a name that internal/dra gives: with its GPU's UUID. NVIDIA's driver
// counts: gpu-0, gpu-0-mig-1g10gb-0.
func isOurs(device string) bool {
	return strings.Count(strings.TrimPrefix(device, "gpu-"), "-") >= 4 && len(device) >= len("gpu-")+36
}
