package configs

// Overrides are the settings that come from flags and environment variables, by
// the Path of the Setting. They win over the document; which of a flag and a
// variable wins is the caller's to decide.
type Overrides map[string]Override

// Override is one setting from outside the document.
type Override struct {
	// Value is the text as given: "true" or "false" for a switch, items between
	// commas for a list.
	Value string
	// Source names the flag or the variable in messages: "--mig-strategy" or
	// "$MIG_STRATEGY".
	Source string
}
