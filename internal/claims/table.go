package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/internal/units"
	"github.com/virgate/virgate/sharing"
)

// Store stores the table, as the state file does.
type Store interface {
	// Read fills value from the section; false if there is no such section.
	Read(section string, value any) (bool, error)
	// WriteOrForget makes value the section's content, and returns when it is on disk. After an
	// error the section has its previous content, and no later write includes value.
	WriteOrForget(section string, value any) error
}

// section is the table's section in the Store.
const section = "dra"

// Options are what a Table needs.
type Options struct {
	Store Store
	// Driver is the name of the DRA driver, under which the kubelet reports this table's claims.
	Driver string
	// Holders returns the holders of devices.
	Holders func(ctx context.Context) ([]sharing.Allocation, error)
	// Entries are files for the containers of a single claim; nil if there are none.
	Entries Entries
}

// Entries are the CDI entries of claims. The table calls the methods for one claim at a time.
type Entries interface {
	// Write makes or replaces the claim's entries. units are by name.
	Write(c dra.Claim, units map[string]Unit) error
	// Remove removes the claim's entries, if there are any.
	Remove(c dra.Claim) error
	// Keep removes the entries of all other claims.
	Keep(all []dra.Claim) error
}

// ModeFault returns why the unit cannot be used now with this many MPS shares or, if shares is 0,
// in another way; empty if it can. It must not wait.
type ModeFault func(unit Unit, shares int) string

// of returns why a claim cannot use the unit as this device.
func (f ModeFault) of(unit Unit, device string) string {
	if unit.Fault != "" || f == nil {
		return unit.Fault
	}
	return f(unit, dra.ModeOf(device).Shares)
}

// Table is the table of claims. Its methods may be called from any goroutine.
type Table struct {
	options Options
	// tell is called after each change.
	tell func()
	// make is the function set by OnMake.
	make func(ctx context.Context, unitName string) error
	// units are the node's units by name; nil until they are known.
	units atomic.Pointer[nodeUnits]
	// gpus has the GPUs whose parts are made, by unit name. The goroutine that has taken a GPU from
	// its channel makes its parts.
	gpus   sync.Map
	view   atomic.Pointer[View]
	health atomic.Pointer[health]

	mu     sync.Mutex
	loaded bool
	kept   kept
	mode   ModeFault
	// refused is part of the View. It is not stored, because the kubelet asks again.
	refused map[string]Refused
}

// NewTable returns a Table that serves no claims before Load.
func NewTable(options Options) *Table {
	t := &Table{
		options: options,
		refused: map[string]Refused{},
		kept:    kept{Paths: map[string]units.Path{}},
	}
	t.view.Store(&View{})
	t.health.Store(&health{changed: make(chan struct{})})
	return t
}

// OnChange sets the function that is called after each change of the table. It must be called
// before Load, and tell must not wait.
func (t *Table) OnChange(tell func()) { t.tell = tell }

// Tell calls the function set by OnChange, for a change elsewhere.
func (t *Table) Tell() {
	if t.tell != nil {
		t.tell()
	}
}

// nodeUnits are the node's units by name. They are valid until changed is closed.
type nodeUnits struct {
	byName  map[string]Unit
	changed chan struct{}
}

// ErrNotServing means that this program does not answer the kubelet, or not yet; another program
// may.
var ErrNotServing = refuse(NotServing, "this Virgate does not serve claims now")

// Load takes over the data of the last program on this node. It must be called with the node's lock
// held, before anything is offered. known is false if there is nothing to take over, not even an
// empty table: the state file was lost, or DRA was not used before.
func (t *Table) Load() (known bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var k kept
	known, err = t.options.Store.Read(section, &k)
	if err != nil {
		known, k = false, kept{} // As if the file were lost.
	}
	if k.Paths == nil {
		k.Paths = map[string]units.Path{}
	}
	t.loaded, t.kept = true, k
	if known && t.options.Entries != nil { // Otherwise the owners of the entries are unknown.
		err = t.options.Entries.Keep(k.Claims)
	}
	t.changed()
	return known, err
}

// Adopt restores a table that was lost: units that the kubelet reports as held by claims of this
// driver remain DRA's until these claims are gone. The UIDs of the claims are unknown, so they are
// adopted provisionally, until the kubelet's next Prepare or the end of their pods.
func (t *Table) Adopt(held []sharing.Allocation) error {
	node := t.units.Load()
	if node == nil {
		return errors.New("the node's units are not known yet")
	}
	byID := map[string]Unit{}
	for _, unit := range node.byName {
		byID[unit.ID] = unit
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.change(func(k *kept) error {
		for _, a := range held {
			if a.Claim == "" || a.Resource != t.options.Driver {
				continue
			}
			c := dra.Claim{
				UID:       "adopted:" + a.Namespace + "/" + a.Claim,
				Namespace: a.Namespace,
				Name:      a.Claim,
			}
			for _, id := range a.Devices {
				if unit, ok := byID[id]; ok {
					k.Paths[unit.Name] = units.LeavingDRA
					c.Results = append(c.Results, dra.Result{
						Device: cmp.Or(unit.Device, unit.Name),
						Shares: min(unit.Shares, 1),
					})
				}
			}
			if !slices.ContainsFunc(k.Claims,
				func(o dra.Claim) bool { return o.Namespace == c.Namespace && o.Name == c.Name }) && c.Results != nil {
				k.Claims = append(k.Claims, c)
			}
		}
		return nil
	})
}

// Adopted reports whether the claim is known only by its pod; see Adopt.
func Adopted(c dra.Claim) bool { return strings.HasPrefix(c.UID, "adopted:") }

// SetUnits sets the node's units. It must be called before they are offered.
func (t *Table) SetUnits(list []Unit) {
	units := make(map[string]Unit, len(list))
	for _, unit := range list {
		units[unit.Name] = unit
	}
	if before := t.units.Swap(&nodeUnits{units, make(chan struct{})}); before != nil {
		close(before.changed)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
}

// SetModes sets how units can be used. After it returns, no claim gets a unit in another way, and
// every claim that already has one is in the View.
func (t *Table) SetModes(mode ModeFault) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mode = mode
	t.look()
}

// Driver returns the name of the DRA driver.
func (t *Table) Driver() string { return t.options.Driver }

// View returns the table as it is now.
func (t *Table) View() View { return *t.view.Load() }

// changed publishes the view. It must be called with mu held.
func (t *Table) changed() {
	t.view.Store(&View{
		Paths:   t.kept.Paths,
		Claims:  t.kept.Claims,
		Refused: maps.Clone(t.refused),
	})
	t.look()
	t.Tell()
}

// change applies change to a copy of the table, writes the copy to disk, and then uses it. It must
// be called with mu held.
func (t *Table) change(change func(k *kept) error) error {
	if !t.loaded {
		return ErrNotServing
	}
	next := kept{Paths: maps.Clone(t.kept.Paths), Claims: slices.Clone(t.kept.Claims)}
	if err := change(&next); err != nil {
		return err
	}
	if reflect.DeepEqual(next, t.kept) {
		return nil
	}
	if err := t.options.Store.WriteOrForget(section, next); err != nil {
		return refuse(Unwritten, "keep the claims for a restart: %w", err)
	}
	t.kept = next
	t.changed()
	return nil
}

// SetPaths changes the paths of units, by unit name. The caller must have checked the conditions of
// each step. It is an error if a unit that a claim has would become the plugin's: the claim came
// while the caller checked.
func (t *Table) SetPaths(paths map[string]units.Path) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.change(func(k *kept) error {
		for unitName, path := range paths {
			if path == units.Plugin {
				now := View{Claims: k.Claims}
				_, itself := now.HeldUnits()[unitName]
				// A partition of a GPU that never became DRA's may have a path of its own and be a
				// claim's.
				if c, held := now.Holder(unitName); held && (itself || k.Paths[unitName].ByDRA()) {
					return fmt.Errorf("%s does not leave DRA: claim %s has it", unitName, c)
				}
				delete(k.Paths, unitName)
				continue
			}
			k.Paths[unitName] = path
		}
		return nil
	})
}

// Prepare gives the claim its devices, and makes those that do not exist yet. The same claim gets
// the same answer again. The error names what is in the way; the kubelet tries again.
func (t *Table) Prepare(ctx context.Context, c dra.Claim) error {
	if t.units.Load() == nil {
		return ErrNotServing
	}
	unlock, err := t.lockGPUs(ctx, c)
	if err != nil {
		return err
	}
	defer unlock()
	held, unread := t.options.Holders(ctx)
	err = t.give(c, held, unread)
	given := err == nil
	if given {
		err = t.makeMissing(ctx, c)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.loaded {
		return ErrNotServing
	}
	if given && !slices.ContainsFunc(t.kept.Claims, func(o dra.Claim) bool { return o.UID == c.UID }) {
		return cmp.Or(err, refuse(NotMade, "claim %s ended while its devices were being made", c))
	}
	before, was := t.refused[c.UID]
	if err == nil && was {
		delete(t.refused, c.UID)
		t.changed()
	}
	if err != nil && (!was || before.Reason != err.Error()) {
		t.refused[c.UID] = Refused{
			Claim:  c,
			Reason: err.Error(),
			Cause:  CauseOf(err),
		}
		t.changed()
	}
	return err
}

// give records that the claim has its devices, if it may have them.
func (t *Table) give(c dra.Claim, held []sharing.Allocation, unread error) error {
	units := t.units.Load().byName
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.change(func(k *kept) error {
		if slices.ContainsFunc(k.Claims,
			func(o dra.Claim) bool { return o.UID == c.UID && reflect.DeepEqual(o.Results, c.Results) }) {
			if err := k.there(c, units); err != nil {
				return err
			}
			return t.writeEntries(c, units)
		}
		if unread != nil {
			return refuse(Unread, "claim %s: who has the node's devices cannot be read: %w", c, unread)
		}
		// Earlier records of the claim are ignored, because after the kubelet lost its state, the
		// claim may have been allocated other devices.
		k.Claims = slices.DeleteFunc(k.Claims,
			func(o dra.Claim) bool { return o.UID == c.UID || Adopted(o) && o.String() == c.String() })
		if err := k.check(c, units, t.others(held), t.mode); err != nil {
			return err
		}
		k.Claims = append(k.Claims, c)
		slices.SortFunc(k.Claims, func(a, b dra.Claim) int { return strings.Compare(a.UID, b.UID) })
		return t.writeEntries(c, units)
	})
}

func (t *Table) writeEntries(c dra.Claim, units map[string]Unit) error {
	if t.options.Entries == nil {
		return nil
	}
	if err := t.options.Entries.Write(c, units); err != nil {
		return refuse(Unwritten, "claim %s: write its CDI entries: %w", c, err)
	}
	return nil
}

// others returns the holders that are not claims of this table, by unit.
func (t *Table) others(held []sharing.Allocation) map[string]string {
	others := map[string]string{}
	for unit, holders := range sharing.HoldersByUnit(held) {
		for _, a := range holders {
			if a.Claim == "" || a.Resource != t.options.Driver {
				others[unit] = a.Holder()
			}
		}
	}
	return others
}

// Unprepare ends the claim. A claim that is not known has already ended.
func (t *Table) Unprepare(claim dra.Claim) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.loaded && t.options.Entries != nil {
		if err := t.options.Entries.Remove(claim); err != nil {
			return fmt.Errorf("claim %s: remove its CDI entries: %w", claim, err)
		}
	}
	_, refused := t.refused[claim.UID]
	delete(t.refused, claim.UID)
	err := t.change(func(k *kept) error {
		k.Claims = slices.DeleteFunc(k.Claims, func(o dra.Claim) bool {
			return o.UID == claim.UID || Adopted(o) && o.String() == claim.String()
		})
		return nil
	})
	if refused && t.loaded {
		t.changed()
	}
	return err
}

// Devices returns the devices that claims have, by name. The channel is closed when they may have
// changed.
func (t *Table) Devices() ([]dra.DeviceHealth, <-chan struct{}) {
	h := t.health.Load()
	return h.devices, h.changed
}

// health is the result of Devices.
type health struct {
	devices []dra.DeviceHealth
	changed chan struct{}
}

// look updates the health of the devices. It must be called with mu held.
func (t *Table) look() {
	before := t.health.Load()
	next := &health{changed: make(chan struct{})}
	units := t.units.Load()
	for _, name := range (View{Claims: t.kept.Claims}).Held() {
		device := dra.DeviceHealth{Device: name, Healthy: true}
		if units != nil {
			unit, known := units.byName[dra.UnitNameOf(name)]
			device.Reason = t.mode.of(unit, name)
			if !known {
				device.Reason = "the node does not have it any more"
			}
			device.Healthy = device.Reason == ""
		}
		device.Since = time.Now()
		for _, was := range before.devices {
			if was.Device == name && was.Reason == device.Reason {
				device.Since = was.Since
			}
		}
		next.devices = append(next.devices, device)
	}
	if !slices.Equal(before.devices, next.devices) {
		t.health.Store(next)
		close(before.changed)
	}
}
