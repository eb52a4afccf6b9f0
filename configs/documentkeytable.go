package configs

import "github.com/virgate/virgate/sharing"

const (
	formText     = "text"
	formSwitch   = "true or false"
	formName     = "resource name"
	formDevices  = "list of indexes, UUIDs and PCI bus IDs"
	formAction   = "ignore, suspect or fatal"
	formDuration = "duration from 1s to 24h"

	pathTimeSlicing = "sharing.timeSlicing"
	pathShare       = pathTimeSlicing + ".resources[]"
	pathMPS         = "sharing.mps"
	pathMIGBlock    = "mig.configs.NAME[]"
	pathTemperature = "health.temperature"
)

// documentKeys has every key of a profile outside flags and imex, in the order
// of the documentation. What stands under mig.configs may stand under mig-configs
// of a mig-parted document too. It is a function so that no caller can change
// another's copy.
func documentKeys() []documentKey {
	return []documentKey{
		{path: "version", form: formText, initial: versionV1, choices: []string{versionV1}, usage: "the form of the document"},

		{path: "resources.gpus[].pattern", form: formText, required: true,
			usage: "matched with the product name, as in NVIDIA A100-SXM4-40GB; * stands for any text"},
		{path: "resources.gpus[].name", form: formName, required: true, usage: "what whole GPUs of the pattern are called; nvidia.com/gpu without a match"},
		{path: "resources.mig[].pattern", form: formText, required: true, usage: "matched with the MIG profile, as in 1g.5gb"},
		{path: "resources.mig[].name", form: formName, required: true,
			usage: "what partitions of the pattern are called; nvidia.com/mig- and the profile without a match"},

		{path: pathTimeSlicing + ".renameByDefault", form: formSwitch, initial: "false", usage: "offer shares under the name with .shared appended"},
		{path: pathTimeSlicing + ".failRequestsGreaterThanOne", form: formSwitch, initial: "false",
			usage: "refuse a container that asks for several devices where one of them is a share"},
		{path: pathShare + ".name", form: formName, required: true, usage: "the units to share, by the name they would have without sharing"},
		{path: pathShare + ".rename", form: formName, usage: "the name to offer them under"},
		{path: pathShare + ".devices", form: "all, a whole number from 1, or a " + formDevices, initial: "all",
			usage: "which of them; a number takes the first so many, by index"},
		{path: pathShare + ".replicas", form: "whole number from 1", required: true, usage: "how often each unit is offered; 1 is exclusive"},
		{path: pathShare + ".policy", form: formText, own: true,
			choices: []string{string(sharing.Distributed), string(sharing.Packed), string(sharing.Spread)},
			usage:   "which devices a container gets when there is a choice; without it, " + pathPolicy},
		{path: pathShare + ".spread", form: formText, own: true, choices: []string{"strict"},
			usage: "refuse a container that would get two devices of one unit; only with policy spread"},
		{path: pathMPS + ".renameByDefault", form: formSwitch, initial: "false", usage: "no effect: Virgate has no MPS"},
		{path: pathMPS + ".failRequestsGreaterThanOne", form: formSwitch, initial: "false", usage: "no effect"},
		{path: pathMPS + ".resources", form: "list", usage: "refused with entries"},

		{path: "exclude", form: formDevices, own: true, usage: "what is never offered under any name"},

		{path: "mig.manage", form: formSwitch, initial: "false", own: true, usage: "let Virgate make and destroy partitions and change MIG modes"},
		{path: "mig.config", form: formText, own: true, usage: "the name of the wanted layout; the node label nvidia.com/mig.config wins over it"},
		{path: "mig.whenBusy", form: formText, initial: string(sharing.Wait), own: true, choices: []string{string(sharing.Wait), string(sharing.Refuse)},
			usage: "a GPU with partitions in use that the layout has no place for: do what can be done and wait for the rest, or leave it as it is"},
		{path: pathMIGBlock + ".device-filter", form: "text, or a list of it", usage: "the boards meant, by PCI device and vendor ID: 0x20B010DE; all without it"},
		{path: pathMIGBlock + ".devices", form: "all, or a list of GPU indexes", required: true, usage: "which GPUs of them"},
		{path: pathMIGBlock + ".mig-enabled", form: formSwitch, required: true, usage: "whether MIG mode is on"},
		{path: pathMIGBlock + ".mig-devices", form: "mapping from MIG profiles to whole numbers",
			usage: "the partitions of each; {} for none; required where mig-enabled is true"},

		{path: "health.xids", form: "mapping from XIDs, and other, to " + formAction, own: true,
			usage: "what an XID means; other stands for those in neither the mapping nor Virgate's table"},
		{path: "health.ecc", form: formText, initial: string(sharing.SuspectError), own: true,
			choices: []string{string(sharing.IgnoreError), string(sharing.SuspectError), string(sharing.FatalError)},
			usage:   "what the event of a memory error means that could not be corrected"},
		{path: "health.quietTime", form: formDuration, initial: "5m", own: true, usage: "how long a suspect unit must be quiet; doubles when it flaps"},
		{path: "health.maxQuietTime", form: formDuration, initial: "1h", own: true, usage: "the longest quiet time; quietTime where that is longer"},
		{path: pathTemperature + ".limit", form: "whole number from 1 to 150", initial: "90", own: true,
			usage: "the core temperature in °C above which a board is out of use"},
		{path: pathTemperature + ".hysteresis", form: "whole number from 0 to the limit", initial: "5", own: true,
			usage: "by how many °C it must cool below the limit to be back"},
	}
}
