package configs

import (
	"slices"
	"strconv"
	"strings"

	"github.com/virgate/virgate/sharing"
)

const (
	pathDisableChecks = "health.disable"
	pathEnableChecks  = "health.enable"
)

// Variables returns the settings of NVIDIA's plugin that only an environment
// variable gives: they have no Flag, and no place in a document. Their Path is a
// key for Overrides all the same.
func Variables() []Setting {
	const form = "all, xids, or XIDs between commas"
	return []Setting{
		{Path: pathDisableChecks, Env: "DP_DISABLE_HEALTHCHECKS", Kind: KindList, Usage: "XIDs to ignore: " + form},
		{Path: pathEnableChecks, Env: "DP_ENABLE_HEALTHCHECKS", Kind: KindList, Usage: "XIDs not to ignore: " + form},
	}
}

func isVariable(path string) bool {
	return slices.ContainsFunc(Variables(), func(s Setting) bool { return s.Path == path })
}

// applyCheckVariables lets the variables win over the document, and enabling
// over disabling, as in NVIDIA's plugin (k8s-device-plugin v0.20,
// internal/rm/health.go). An XID that is enabled and would be ignored has the
// meaning of the built-in table or, if that ignores it too, is suspect.
func applyCheckVariables(from *source, overrides Overrides, rules *sharing.HealthRules) {
	if all, codes := readChecks(from, pathDisableChecks, overrides); all {
		for code := range rules.XIDs {
			rules.XIDs[code] = sharing.IgnoreError
		}
		rules.OtherXIDs, rules.DoubleBitECC = sharing.IgnoreError, sharing.IgnoreError
	} else {
		for _, code := range codes {
			rules.XIDs[code] = sharing.IgnoreError
		}
	}
	builtIn := sharing.DefaultHealthRules()
	enable := func(have, usual sharing.ErrorAction) sharing.ErrorAction {
		switch {
		case have != sharing.IgnoreError:
			return have
		case usual != sharing.IgnoreError:
			return usual
		}
		return sharing.SuspectError
	}
	all, codes := readChecks(from, pathEnableChecks, overrides)
	for _, code := range codes {
		rules.XIDs[code] = enable(rules.XID(code), builtIn.XID(code))
	}
	if all {
		for code, have := range rules.XIDs {
			rules.XIDs[code] = enable(have, builtIn.XID(code))
		}
		rules.OtherXIDs = enable(rules.OtherXIDs, builtIn.OtherXIDs)
		rules.DoubleBitECC = enable(rules.DoubleBitECC, builtIn.DoubleBitECC)
	}
}

// readChecks reads a variable: all, or some XIDs.
func readChecks(from *source, path string, overrides Overrides) (all bool, codes []uint64) {
	override := overrides[path]
	for item := range strings.SplitSeq(strings.ToLower(override.Value), ",") {
		switch item = strings.TrimSpace(item); item {
		case "":
		case "all", "xids":
			all = true
		default:
			code, err := strconv.ParseUint(item, 10, 31)
			if err != nil {
				from.problem(place{file: override.Source, path: "health.xids"}, quote(item), "expected all, xids or the number of an XID")
				continue
			}
			codes = append(codes, code)
		}
	}
	return all, codes
}
