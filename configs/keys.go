package configs

import (
	_ "embed" // for keyFile
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// The paths of the settings that are named in several places.
const (
	pathMIGStrategy         = "flags.migStrategy"
	pathFailOnInitError     = "flags.failOnInitError"
	pathDriverRoot          = "flags.nvidiaDriverRoot"
	pathDevRoot             = "flags.nvidiaDevRoot"
	pathDiscovery           = "flags.deviceDiscoveryStrategy"
	pathPolicy              = "flags.plugin.sharedDevicesAllocationPolicy"
	pathContainerDriverRoot = "flags.plugin.containerDriverRoot"
	pathCDIHook             = "flags.plugin.nvidiaCDIHookPath"
	pathCDIFeatures         = "flags.plugin.cdiFeatureFlags"
)

// keyTable is keys.json, what profiles may say, in the order of
// docs/configuration-reference.md. It is read at every start, so it is JSON: decoding
// YAML makes ten times as many objects. Nothing changes it.
var keyTable = readKeyTable(keyFile)

//go:embed keys.json
var keyFile []byte

// keysAndSettings is all that documents, flags and variables can say. Settings are those
// that a flag or a variable can give too: every key of the sections flags and imex that
// k8s-device-plugin v0.20 knows, and Virgate's own.
type keysAndSettings struct {
	Settings, Variables []Setting
	Keys                []documentKey
}

func readKeyTable(file []byte) (table keysAndSettings) {
	if err := json.Unmarshal(file, &table); err != nil {
		panic(fmt.Sprintf("keys.json: %v", err)) // Every test would see it.
	}
	return table
}

// documentKey describes a key that is not a Setting. Documents may have only
// these keys, and docs/configuration-reference.md is generated from them.
type documentKey struct {
	// Path is the key's place: "mig.configs.NAME[].devices".
	Path string
	// Form describes the value: "text", "whole number from 1".
	Form string
	// Default is what a document would write, "" for none.
	Default  string
	Required bool
	// Choices are the possible values, if they are few.
	Choices []string
	// Usage says what the key does.
	Usage string
	// Own says that NVIDIA's plugin, or mig-parted, has no such key.
	Own bool
}

// keysOf returns the sorted keys that a mapping at the path may have.
func keysOf(path string) []string {
	var keys []string
	for _, key := range keyTable.Keys {
		if rest, ok := strings.CutPrefix(key.Path, path+"."); ok {
			first, _, _ := strings.Cut(rest, ".")
			keys = append(keys, strings.TrimSuffix(first, "[]"))
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// The paths of the sections and list entries that are read by themselves.
const (
	pathTimeSlicing = "sharing.timeSlicing"
	pathShare       = pathTimeSlicing + ".resources[]"
	pathMPS         = "sharing.mps"
	pathMIGBlock    = "mig.configs.NAME[]"
	pathTemperature = "health.temperature"
	pathRetireAfter = "retireAfter"
)
