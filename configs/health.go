package configs

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// The limits of a profile: times that a person would wait for, and temperatures that a GPU can
// have.
const (
	shortestQuiet      = time.Second
	longestQuiet       = 24 * time.Hour
	highestTemperature = 150
)

// readHealth applies the section health, and then NVIDIA's variables, to the defaults.
func readHealth(v value, overrides Overrides) sharing.HealthRules {
	rules := sharing.DefaultHealthRules()
	f := v.mapping(keysOf("health")...)
	if len(f.entries) > 0 {
		v.note("Virgate's own; in NVIDIA's plugin a GPU that reported an XID never comes back")
	}
	for _, e := range f.field("xids").pairs() {
		if e.value.absent() {
			e.value.problem("expected ignore, suspect or fatal")
		}
		code, err := strconv.ParseUint(e.key, 10, 31)
		switch action := readAction(e.value, ""); {
		case e.key == sharing.OtherXID:
			rules.OtherXIDs = cmp.Or(action, rules.OtherXIDs)
		case err != nil || code == 0 || strconv.FormatUint(code, 10) != e.key:
			e.problem("expected the number of an XID, or " + sharing.OtherXID)
		case action != "":
			rules.XIDs[code] = action
			delete(rules.LeftToDriver, code)
		}
	}
	rules.DoubleBitECC = readAction(f.field("ecc"), rules.DoubleBitECC)
	rules.RowRemap, _ = f.field("rowRemap").boolean()
	rules.IgnoreFabric = choice(f.field("fabric"), sharing.FatalError, sharing.IgnoreError,
		sharing.FatalError) == sharing.IgnoreError
	rules.QuietTime = readQuietTime(f.field("quietTime"), rules.QuietTime)
	// A quiet time above the default maximum raises the maximum, unless the document sets it.
	longest := f.field("maxQuietTime")
	rules.MaxQuietTime = readQuietTime(longest, max(rules.MaxQuietTime, rules.QuietTime))
	if rules.MaxQuietTime < rules.QuietTime {
		longest.problem(fmt.Sprintf("expected quietTime, which is %s, or more", rules.QuietTime))
	}
	readTemperature(f.field("temperature"), &rules)
	applyHealthCheckVariables(v.source, overrides, &rules)
	return rules
}

func readAction(v value, otherwise sharing.ErrorAction) sharing.ErrorAction {
	return choice(v, otherwise, sharing.IgnoreError, sharing.SuspectError, sharing.FatalError)
}

func readQuietTime(v value, otherwise time.Duration) time.Duration {
	if quiet, ok := v.duration(shortestQuiet, longestQuiet, "expected a duration from 1s to 24h, such as 5m"); ok {
		return quiet
	}
	return otherwise
}

func readTemperature(v value, rules *sharing.HealthRules) {
	f := v.mapping(keysOf(pathTemperature)...)
	hysteresis := rules.TemperatureLimit - rules.TemperatureSafe
	if limit, ok := f.field("limit").number(); ok {
		if limit < 1 || limit > highestTemperature {
			f.field("limit").problem(fmt.Sprintf("expected degrees Celsius from 1 to %d", highestTemperature))
			return
		}
		rules.TemperatureLimit, rules.BoardTemperature = limit, false
	}
	if degrees, ok := f.field("hysteresis").number(); ok {
		if degrees < 0 || degrees > rules.TemperatureLimit {
			f.field("hysteresis").problem("expected degrees from 0 to the limit")
			return
		}
		hysteresis = degrees
	}
	rules.TemperatureSafe = max(rules.TemperatureLimit-hysteresis, 0)
}

const (
	pathDisableChecks = "health.disable"
	pathEnableChecks  = "health.enable"
)

// applyHealthCheckVariables applies the variables, which override the document. Enabling overrides
// disabling, as in NVIDIA's plugin (k8s-device-plugin v0.20, internal/rm/health.go). Enabling an
// ignored XID restores its default action or, if it is ignored by default, makes it suspect.
func applyHealthCheckVariables(from *source, overrides Overrides, rules *sharing.HealthRules) {
	all, codes := readXIDList(from, pathDisableChecks, overrides, rules.XIDs)
	if all {
		rules.OtherXIDs = sharing.IgnoreError
		rules.DoubleBitECC = sharing.IgnoreError
		rules.RowRemap = false
	}
	for _, code := range codes {
		rules.XIDs[code] = sharing.IgnoreError
	}

	defaults := sharing.DefaultHealthRules()
	enable := func(now, byDefault sharing.ErrorAction) sharing.ErrorAction {
		switch {
		case now != sharing.IgnoreError:
			return now
		case byDefault != sharing.IgnoreError:
			return byDefault
		}
		return sharing.SuspectError
	}
	all, codes = readXIDList(from, pathEnableChecks, overrides, rules.XIDs)
	for _, code := range codes {
		if rules.XID(code) == sharing.IgnoreError && defaults.LeftToDriver[code] {
			rules.LeftToDriver[code] = true
		}
		rules.XIDs[code] = enable(rules.XID(code), defaults.XID(code))
	}
	if all {
		rules.OtherXIDs = enable(rules.OtherXIDs, defaults.OtherXIDs)
		rules.DoubleBitECC = enable(rules.DoubleBitECC, defaults.DoubleBitECC)
	}
}

// readXIDList reads a variable: either all, for the known XIDs and all others, or a list of XIDs.
// It adds a note about items that it cannot read and applies the others, as NVIDIA's plugin does.
func readXIDList(
	from *source,
	path string,
	overrides Overrides,
	known map[uint64]sharing.ErrorAction,
) (all bool, codes []uint64) {
	override := overrides[path]
	for item := range strings.SplitSeq(strings.ToLower(override.Value), ",") {
		switch item = strings.TrimSpace(item); item {
		case "":
		case "all", "xids":
			all, codes = true, slices.AppendSeq(codes, maps.Keys(known))
		default:
			code, err := strconv.ParseUint(item, 10, 64)
			if err != nil || code == 0 {
				message := override.Source + ": " + quote(item) +
					" is ignored: expected all, xids or the number of an XID"
				from.notes = append(from.notes, Note{Path: "health.xids", Message: message})
				continue
			}
			codes = append(codes, code)
		}
	}
	return all, codes
}
