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

// readHealth applies the section health, and then NVIDIA's variables, to the defaults.
func readHealth(v value, overrides Overrides) sharing.HealthRules {
	rules := sharing.DefaultHealthRules()
	for _, e := range v.at("xids").entries {
		code, err := strconv.ParseUint(e.key, 10, 31)
		switch action := sharing.ErrorAction(content[string](e.value)); {
		case e.key == sharing.OtherXID:
			rules.OtherXIDs = cmp.Or(action, rules.OtherXIDs)
		case err != nil || code == 0 || strconv.FormatUint(code, 10) != e.key:
			e.problem("expected the number of an XID, or " + sharing.OtherXID)
		case action != "":
			rules.XIDs[code] = action
			delete(rules.LeftToDriver, code)
		}
	}
	rules.DoubleBitECC = sharing.ErrorAction(get[string](v, "ecc"))
	rules.RowRemap = get[bool](v, "rowRemap")
	rules.IgnoreFabric = get[string](v, "fabric") == string(sharing.IgnoreError)
	rules.RecoverAfter = get[time.Duration](v, "recoverAfter")
	rules.MaxRecoverAfter = get[time.Duration](v, "maxRecoverAfter")
	// A recovery delay above the default maximum raises the maximum, unless the document sets it.
	if longest := v.at("maxRecoverAfter"); longest.absent() {
		rules.MaxRecoverAfter = max(rules.MaxRecoverAfter, rules.RecoverAfter)
	} else if longest.content != nil && rules.MaxRecoverAfter < rules.RecoverAfter {
		longest.problem(fmt.Sprintf("expected recoverAfter, which is %s, or more", rules.RecoverAfter))
	}
	if limit := get[int](v, "temperature.limit"); limit > 0 {
		rules.TemperatureLimit, rules.BoardTemperature = limit, false
	}
	hysteresis := get[int](v, "temperature.hysteresis")
	if written := v.at("temperature.hysteresis"); hysteresis > rules.TemperatureLimit && !written.absent() {
		written.problem("expected degrees from 0 to the limit")
	}
	rules.TemperatureSafe = max(rules.TemperatureLimit-hysteresis, 0)
	applyHealthCheckVariables(v.source, overrides, &rules)
	return rules
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
