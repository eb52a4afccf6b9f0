package sharing

// ErrorAction is what an error that a board reports means for the units that it
// hits.
type ErrorAction string

const (
	// IgnoreError counts the error and does nothing else.
	IgnoreError ErrorAction = "ignore"
	// SuspectError withdraws the unit until it has been quiet for a time.
	SuspectError ErrorAction = "suspect"
	// FatalError withdraws the unit until its board is reset or somebody says
	// that it may be used.
	FatalError ErrorAction = "fatal"
)

// xidActions is what each XID means unless the profile says otherwise. It
// follows the immediate action that NVIDIA's XID catalogue names
// (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, for Ampere and
// later): what it ignores or blames on the program is ignored, what it asks for
// a reset or a visit is fatal. docs/health.md has the reason of each.
//
// XIDs that are missing are suspect: those for which the catalogue has the
// program started again without blaming it, those that it says nothing of, and
// those that are newer than this list.
func xidActions() map[uint64]ErrorAction {
	actions := map[uint64]ErrorAction{}
	for action, codes := range map[ErrorAction][]uint64{
		IgnoreError: {
			// What programs do, as NVIDIA's device plugin and DRA driver have it too.
			// Of these, 45 follows another XID, and for 109 the catalogue wants a
			// reset, but a kernel that runs for too long causes it as well.
			13, 31, 43, 45, 68, 109,
			// The catalogue says to look at the program.
			11, 25, 32, 69, 80,
			// The catalogue says to ignore them. 63 is a memory row that will be
			// replaced, which the probe for pending repairs sees.
			14, 37, 38, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161,
		},
		SuspectError: {
			// An uncorrectable memory error that hit one program only.
			94,
			// NVLink: the registers in the kernel's log decide, and NVML has them not.
			74, 144, 145, 146, 147, 148, 149,
			// The driver's advice has changed; NVML does not tell to what.
			154,
		},
		FatalError: {
			// Memory: uncorrectable, could not be repaired, not contained, escaped.
			48, 64, 95, 140,
			// The board hangs, has no power, halts, is off the bus, does not start.
			46, 54, 62, 79, 143, 158,
			// Its processors for security and management.
			110, 119, 120, 151,
			// Links that do not train, that lost their engine or need a reset.
			136, 150, 155,
			// Parts that a reset must take out of use.
			156,
		},
	} {
		for _, code := range codes {
			actions[code] = action
		}
	}
	return actions
}
