package mig

import (
	"cmp"
	"strconv"
	"strings"
)

// Profile says what a partition is: so many compute slices of a GPU instance
// with so much memory. It is comparable; the zero value is no profile.
//
// Its written form is NVIDIA's (MIG User Guide, "MIG Device Names"):
//
//	profile = [ C "c." ] G "g." M "gb" [ "+" name { "," name } | "-" name ]
//
// as in 1g.5gb, 1c.2g.10gb, 1g.5gb+me and 1g.24gb-me. "Cc." is written only
// where the partition computes on fewer slices than its GPU instance has.
type Profile struct {
	// Compute is the number of compute slices that the partition computes on,
	// the C of "Cc.Gg.Mgb": equal to Slices but for a compute instance that
	// shares its GPU instance with others.
	Compute int
	// Slices is the number of compute slices of the GPU instance.
	Slices int
	// MemoryGB is the GPU instance's memory as its name rounds it, in GiB.
	MemoryGB int
	// Attributes say what the GPU instance has beside compute and memory, sign
	// included: "" for the board's default, "+me" for the media extensions,
	// "+me.all" for all media engines, "-me" for none, "+gfx" for graphics.
	Attributes string
}

// IsZero says that the profile is no profile, as a whole GPU has it.
func (p Profile) IsZero() bool { return p == Profile{} }

// Instance is the profile of the GPU instance that a partition lies in: the
// profile itself, but for a partition that computes on a part of the slices.
func (p Profile) Instance() Profile {
	p.Compute = p.Slices
	return p
}

// String is the written form, "" for the zero profile.
func (p Profile) String() string {
	if p.IsZero() {
		return ""
	}
	var b strings.Builder
	if p.Compute != p.Slices {
		b.WriteString(strconv.Itoa(p.Compute))
		b.WriteString("c.")
	}
	b.WriteString(strconv.Itoa(p.Slices))
	b.WriteString("g.")
	b.WriteString(strconv.Itoa(p.MemoryGB))
	b.WriteString("gb")
	b.WriteString(p.Attributes)
	return b.String()
}

// ResourceName is the profile's resource name without its domain, for example
// "mig-1g.5gb.me"; "" for the zero profile. Kubernetes allows neither "+" nor
// ",": for the first NVIDIA's device plugin writes ".", and so do we for both.
// "-me" stays.
func (p Profile) ResourceName() string {
	if p.IsZero() {
		return ""
	}
	return "mig-" + strings.NewReplacer("+", ".", ",", ".").Replace(p.String())
}

// Compare orders profiles, smaller first: by memory, then by slices, compute
// slices and attributes. It returns -1, 0 or +1, as cmp.Compare does.
func Compare(p, q Profile) int {
	return cmp.Or(
		cmp.Compare(p.MemoryGB, q.MemoryGB),
		cmp.Compare(p.Slices, q.Slices),
		cmp.Compare(p.Compute, q.Compute),
		cmp.Compare(p.Attributes, q.Attributes),
	)
}

// MarshalText writes the profile as String does, so that JSON shows "1g.5gb".
func (p Profile) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what MarshalText wrote; empty text is the zero profile.
func (p *Profile) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*p = Profile{}
		return nil
	}
	parsed, err := ParseProfile(string(text))
	if err != nil {
		return err
	}
	*p = parsed
	return nil
}
