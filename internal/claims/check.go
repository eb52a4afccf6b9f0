package claims

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/virgate/virgate/internal/dra"
	"github.com/virgate/virgate/sharing"
)

// Cause is why a claim does not get its devices, as one word, for metrics.
type Cause string

// The causes of refusals.
const (
	// NoDevice means that the node does not have the device now, InPlugin that the device plugin
	// still offers it, InUse that a pod has it in another way, Taken that another claim has it.
	NoDevice Cause = "no_device"
	InPlugin Cause = "device_plugin"
	InUse    Cause = "in_use"
	Faulty   Cause = "unhealthy"
	Taken    Cause = "taken"
	// TooMany means that the claim asks for more shares than there are, or than one container can use.
	TooMany Cause = "too_many"
	// NotMade means that a partition could not be made for the claim.
	NotMade Cause = "not_made"
	// Unread means that the claim, or what the kubelet holds, cannot be read, NotServing that this
	// program does not serve claims, Unwritten that the state file cannot be written.
	Unread     Cause = "unread"
	NotServing Cause = "not_serving"
	Unwritten  Cause = "state_not_written"
)

// Causes returns all causes.
func Causes() []Cause {
	return []Cause{NoDevice, InPlugin, InUse, Faulty, Taken, TooMany, NotMade, Unread, NotServing, Unwritten}
}

type refusal struct {
	error
	cause Cause
}

func (r refusal) Unwrap() error { return r.error }

func refuse(cause Cause, format string, args ...any) error {
	return refusal{fmt.Errorf(format, args...), cause}
}

// CauseOf returns why Prepare or Unprepare failed. An error from outside this package comes from
// the caller that reads the claim, so it is Unread.
func CauseOf(err error) Cause {
	if r, ok := errors.AsType[refusal](err); ok {
		return r.cause
	}
	return Unread
}

// check returns why the claim may not have its devices; nil if it may. units are the node's units
// by unit name. others are the holders of units that are not claims of this table, by the unit's UUID:
// pods of the device plugin and of other drivers.
//
// A device that is no longer offered, or not in that way, is acceptable while its unit is DRA's and
// free. The scheduler allocated it before it knew, and the pod would otherwise wait forever.
func (k kept) check(c dra.Claim, units map[string]Unit, others map[string]string, mode ModeFault) error {
	if len(c.Results) == 0 {
		return refuse(NoDevice, "claim %s has no device of this driver", c)
	}
	if err := k.there(c, units); err != nil {
		return err
	}
	if err := oneDaemon(c); err != nil {
		return err
	}
	for _, r := range c.Results {
		unit := units[r.UnitName()]
		if r.Admin {
			continue
		}
		if path := k.Paths[cmp.Or(unit.Parent, unit.Name)]; !path.ByDRA() {
			return refuse(InPlugin,
				"claim %s: %s is offered by the device plugin, which gives it up for this claim as soon as no "+
					"pod has it", c, r.Device)
		}
		if holder := others[unit.ID]; unit.ID != "" && holder != "" {
			return refuse(InUse, "claim %s: %s still has %s", c, holder, r.Device)
		}
		if fault := mode.of(unit, r.Device); fault != "" {
			return refuse(Faulty, "claim %s: %s is faulty: %s", c, r.Device, fault)
		}
		if err := k.room(c, r, unit); err != nil {
			return err
		}
		if err := k.fits(c, r, unit, units); err != nil {
			return err
		}
	}
	return nil
}

// fits returns an error naming a claim that has hardware from which the unit would have to be made:
// partitions that overlap, or the whole GPU.
func (k kept) fits(c dra.Claim, r dra.Result, unit Unit, units map[string]Unit) error {
	if unit.Parent == "" {
		return nil
	}
	counted, left := map[string]bool{}, maps.Clone(unit.Supply)
	take := func(u Unit) (ok bool) {
		ok = true
		if !counted[u.Name] {
			counted[u.Name] = true
			for name, n := range u.Needs {
				left[name] -= n
				ok = ok && left[name] >= 0
			}
		}
		return ok
	}
	take(unit)
	for _, other := range append([]dra.Claim{c}, k.Claims...) {
		for _, has := range other.Results {
			if has.Admin || !within(unit.Parent, has.UnitName()) {
				continue
			}
			taken, known := units[has.UnitName()]
			if !known { // It is unknown which part of the GPU that was.
				return refuse(Taken, "claim %s: claim %s still has %s", c, other, has.Device)
			}
			if !take(taken) {
				return refuse(Taken, "claim %s: claim %s has %s, beside which the GPU has no room for %s", c, other,
					has.Device, r.Device)
			}
		}
	}
	return nil
}

// there returns an error naming a device of the claim that the node does not have.
func (kept) there(c dra.Claim, units map[string]Unit) error {
	for _, r := range c.Results {
		if _, known := units[r.UnitName()]; !known {
			return refuse(NoDevice, "claim %s: the node has no %s now", c, r.Device)
		}
	}
	return nil
}

// room returns an error if another claim is in the way, if too few shares are left, or if the claim
// has the unit twice.
func (k kept) room(c dra.Claim, r dra.Result, unit Unit) error {
	shared := dra.ModeOf(r.Device) != sharing.Exclusive
	taken := int64(0)
	for _, other := range k.Claims {
		for _, has := range other.Results {
			switch {
			case has.Admin || has.UnitName() != unit.Name || other.UID == c.UID:
			case !shared || has.Device != r.Device:
				return refuse(Taken, "claim %s: claim %s still has %s", c, other, has.Device)
			default:
				taken += has.Shares
			}
		}
	}
	if !shared {
		if slices.ContainsFunc(c.Results,
			func(o dra.Result) bool { return o != r && !o.Admin && o.UnitName() == unit.Name }) {
			return refuse(TooMany, "claim %s has %s twice", c, r.Device)
		}
		return nil
	}
	for _, own := range c.Results {
		if own.UnitName() == unit.Name && !own.Admin {
			taken += own.Shares
		}
	}
	most := int64(dra.ModeOf(r.Device).Shares)
	if unit.Device == r.Device {
		most = unit.Shares
	}
	if most > 0 && taken > most {
		return refuse(TooMany, "claim %s: with it %d shares of %s would be given, of %d", c, taken, r.Device, most)
	}
	return nil
}

// oneDaemon refuses a claim that would give a container MPS shares of two units. The container has
// the variables of only one daemon, and its programs would never see the other unit. A container
// gets the devices of all requests of a claim, unless it names one of them, which is not known
// here.
func oneDaemon(c dra.Claim) error {
	of := map[string]string{}
	for _, r := range c.Results {
		if dra.ModeOf(r.Device).Shares == 0 || r.Admin {
			continue
		}
		request := ""
		if c.ByName {
			request = r.Request
		}
		if first, two := of[request]; two && dra.UnitNameOf(first) != r.UnitName() {
			return refuse(TooMany,
				"claim %s has shares by MPS of two units, %s and %s: a program talks to the daemon of one, so a "+
					"container's shares must be of one unit", c, first, r.Device)
		}
		of[request] = r.Device
	}
	return nil
}
