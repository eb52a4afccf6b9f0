package nvml

// Architecture is NVML's device architecture.
type Architecture uint32

// The architectures that NVML's header names (nvml.h, NVML_DEVICE_ARCH_*).
const (
	Kepler    Architecture = 2
	Maxwell   Architecture = 3
	Pascal    Architecture = 4
	Volta     Architecture = 5
	Turing    Architecture = 6
	Ampere    Architecture = 7
	Ada       Architecture = 8
	Hopper    Architecture = 9
	Blackwell Architecture = 10
)

// String is the lower-case family name, "" for an architecture that is newer
// than this list.
func (a Architecture) String() string {
	switch a {
	case Kepler:
		return "kepler"
	case Maxwell:
		return "maxwell"
	case Pascal:
		return "pascal"
	case Volta:
		return "volta"
	case Turing:
		return "turing"
	case Ampere:
		return "ampere"
	case Ada:
		return "ada"
	case Hopper:
		return "hopper"
	case Blackwell:
		return "blackwell"
	}
	return ""
}
