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

// Store keeps the table, as the state file does.
type Store interface {
	// Read fills value from the section; false when there is none.
	Read(section string, value any) (bool, error)
	// WriteOrForget makes value the section's content, and returns when it is on disk. On an
	// error the section is as before, and no later write brings value along.
	WriteOrForget(section string, value any) error
}

// section is the table's in the Store.
const section = "dra"

// Options are what a Table works with.
type Options struct {
	Store Store
	// Driver is the DRA driver's name, under which the kubelet tells of this table's claims.
	Driver string
	// Holders says who holds which devices.
	Holders func(ctx context.Context) ([]sharing.Allocation, error)
	// Entries are on disk what only one claim's containers have; nil where there is no such thing.
	Entries Entries
}

// Entries are the CDI entries of claims. The table calls it for one claim at a time.
type Entries interface {
	// Write makes the claim's entries, or makes them again; units are by place.
	Write(c dra.Claim, units map[string]Unit) error
	// Remove removes them, if there are any.
	Remove(c dra.Claim) error
	// Keep removes those of all other claims.
	Keep(all []dra.Claim) error
}

// ModeFault says why the unit cannot be used just now with so many shares by MPS, or in any
// other way, for which shares is 0; empty when it can. It must not wait.
type ModeFault func(unit Unit, shares int) string

// of is why a claim cannot use the unit as this device.
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
	// make is what OnMake was given.
	make func(ctx context.Context, place string) error
	// units are those of the node, by place; nil until they are known.
	units atomic.Pointer[nodeUnits]
	// gpus are the GPUs of which parts are made, by place: who has one from its channel makes them.
	gpus   sync.Map
	view   atomic.Pointer[View]
	health atomic.Pointer[health]

	mu     sync.Mutex
	loaded bool
	kept   kept
	mode   ModeFault
	// refused is in View. It is not kept: the kubelet asks again.
	refused map[string]Refused
}

// NewTable makes a Table that answers nobody before Load.
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

// OnChange has tell called after each change of the table. It is called before Load, and tell
// must not wait.
func (t *Table) OnChange(tell func()) { t.tell = tell }

// Tell calls what OnChange was given, for what has changed elsewhere.
func (t *Table) Tell() {
	if t.tell != nil {
		t.tell()
	}
}

// nodeUnits are the node's units by place, until changed is closed.
type nodeUnits struct {
	byPlace map[string]Unit
	changed chan struct{}
}

// ErrNotServing says that this program does not answer the kubelet, or not yet: another one may.
var ErrNotServing = refuse(NotServing, "this Virgate does not serve claims now")

// Load takes over what the last program on this node left. It is called with the node's lock,
// before anything is offered. Known false says that there is nothing to take over, not even an
// empty table: the state file was lost, or there was no DRA before.
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
	if known && t.options.Entries != nil { // Else nobody knows whose they are.
		err = t.options.Entries.Keep(k.Claims)
	}
	t.changed()
	return known, err
}

// Adopt is for a table that was lost: what the kubelet shows as held by claims of this driver is
// DRA's until those are gone. The claims' UIDs are not known, so the kubelet's next Prepare or
// the end of their pods settles them.
func (t *Table) Adopt(held []sharing.Allocation) error {
	node := t.units.Load()
	if node == nil {
		return errors.New("the node's units are not known yet")
	}
	byID := map[string]Unit{}
	for _, unit := range node.byPlace {
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
					k.Paths[unit.Place] = units.LeavingDRA
					c.Results = append(c.Results, dra.Result{
						Device: cmp.Or(unit.Device, unit.Place),
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

// Adopted says that nobody knows this claim but by its pod; see Adopt.
func Adopted(c dra.Claim) bool { return strings.HasPrefix(c.UID, "adopted:") }

// SetUnits says which units the node has now. It is called before they are offered.
func (t *Table) SetUnits(list []Unit) {
	units := make(map[string]Unit, len(list))
	for _, unit := range list {
		units[unit.Place] = unit
	}
	if before := t.units.Swap(&nodeUnits{units, make(chan struct{})}); before != nil {
		close(before.changed)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look()
}

// SetModes says in which ways units can be used. When it has returned, nobody gets one in another
// way, and whoever has got one is in the View.
func (t *Table) SetModes(mode ModeFault) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mode = mode
	t.look()
}

// Driver is the DRA driver's name.
func (t *Table) Driver() string { return t.options.Driver }

// View returns the table as it is now.
func (t *Table) View() View { return *t.view.Load() }

// changed publishes the view; it must be called with mu held.
func (t *Table) changed() {
	t.view.Store(&View{
		Paths:   t.kept.Paths,
		Claims:  t.kept.Claims,
		Refused: maps.Clone(t.refused),
	})
	t.look()
	t.Tell()
}

// change has a copy of the table changed, and keeps that, on disk first. It must be called with
// mu held.
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

// SetPaths changes units' paths, by place. The caller has made sure of what each step needs. A
// unit that a claim has does not become the plugin's: it came while the caller looked.
func (t *Table) SetPaths(paths map[string]units.Path) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.change(func(k *kept) error {
		for place, path := range paths {
			if path == units.Plugin {
				now := View{Claims: k.Claims}
				_, itself := now.HeldPlaces()[place]
				// A partition of a GPU that never came to DRA may be a claim's: its path is its own.
				if c, held := now.Holder(place); held && (itself || k.Paths[place].ByDRA()) {
					return fmt.Errorf("%s does not leave DRA: claim %s has it", place, c)
				}
				delete(k.Paths, place)
				continue
			}
			k.Paths[place] = path
		}
		return nil
	})
}

// Prepare gives the claim its devices, and has those made that are not there. The same claim
// again gets the same answer. The error says who or what is in the way; the kubelet tries again.
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

// give writes down that the claim has its devices, if it may have them.
func (t *Table) give(c dra.Claim, held []sharing.Allocation, unread error) error {
	units := t.units.Load().byPlace
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
		// What is known of the claim from before does not count against it: after the kubelet
		// has lost its memory, it may have been given other devices.
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

// others are the holders that are not claims of this table, by unit.
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

// Unprepare ends the claim. One that is not known has ended.
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

// Devices are those that claims have, by name. The channel is closed when they may have changed.
func (t *Table) Devices() ([]dra.DeviceHealth, <-chan struct{}) {
	h := t.health.Load()
	return h.devices, h.changed
}

// health is what Devices returns.
type health struct {
	devices []dra.DeviceHealth
	changed chan struct{}
}

// look finds out how the devices are; it must be called with mu held.
func (t *Table) look() {
	before := t.health.Load()
	next := &health{changed: make(chan struct{})}
	units := t.units.Load()
	for _, name := range (View{Claims: t.kept.Claims}).Held() {
		device := dra.DeviceHealth{Device: name, Healthy: true}
		if units != nil {
			unit, known := units.byPlace[dra.PlaceOf(name)]
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
