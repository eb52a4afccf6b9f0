package mig

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Profile is the size of a partition: its number of compute slices, and the slices and memory of
// its GPU instance. Profiles can be compared with ==. The zero value is no profile.
//
// Profiles are written as NVIDIA does (MIG User Guide, "MIG Device Names"):
//
//	profile = [ C "c." ] G "g." M "gb" [ "+" name { "," name } | "-" name ]
//
// as in 1g.5gb, 1c.2g.10gb, 1g.5gb+me and 1g.24gb-me. "Cc." is written only if the partition has
// fewer compute slices than its GPU instance.
type Profile struct {
	// Compute is the number of the partition's compute slices, the C of "Cc.Gg.Mgb". It is less
	// than Slices for a compute instance that shares its GPU instance with others.
	Compute int
	// Slices is the number of compute slices of the GPU instance.
	Slices int
	// MemoryGB is the GPU instance's memory in GiB, rounded as in its name.
	MemoryGB int
	// Attributes are the GPU instance's features besides compute and memory, including the sign: ""
	// for the GPU's default, "+me" for the media extensions, "+me.all" for all media engines, "-me"
	// for none, "+gfx" for graphics.
	Attributes string
}

// IsZero reports whether there is no profile, as for a whole GPU.
func (p Profile) IsZero() bool { return p == Profile{} }

// Instance returns the profile of the partition's GPU instance: the same, but with all compute
// slices.
func (p Profile) Instance() Profile {
	p.Compute = p.Slices
	return p
}

// String returns the profile as text; "" for the zero profile.
func (p Profile) String() string {
	if p.IsZero() {
		return ""
	}
	compute := ""
	if p.Compute != p.Slices {
		compute = strconv.Itoa(p.Compute) + "c."
	}
	return compute + strconv.Itoa(p.Slices) + "g." + strconv.Itoa(p.MemoryGB) + "gb" + p.Attributes
}

// ResourceName returns the profile's resource name without the domain, for example "mig-1g.5gb.me";
// "" for the zero profile. Kubernetes allows neither "+" nor "," in it, so both become ".", as "+"
// does in NVIDIA's device plugin. "-me" stays.
func (p Profile) ResourceName() string {
	if p.IsZero() {
		return ""
	}
	return "mig-" + strings.NewReplacer("+", ".", ",", ".").Replace(p.String())
}

// Compare orders profiles by memory, then by slices, compute slices and
// attributes. It returns -1 if p comes first, 0 if they are equal, otherwise +1.
func (p Profile) Compare(q Profile) int {
	return cmp.Or(
		cmp.Compare(p.MemoryGB, q.MemoryGB),
		cmp.Compare(p.Slices, q.Slices),
		cmp.Compare(p.Compute, q.Compute),
		cmp.Compare(p.Attributes, q.Attributes),
	)
}

// MarshalText returns the same text as String, so JSON has "1g.5gb".
func (p Profile) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText parses the text of MarshalText. Empty text is the zero profile.
func (p *Profile) UnmarshalText(text []byte) (err error) {
	*p = Profile{}
	if len(text) > 0 {
		*p, err = ParseProfile(string(text))
	}
	return err
}

// ParseProfile parses a profile; see Profile for the syntax. It also accepts "1c.1g.5gb" for
// 1g.5gb, and attributes in any order. Unknown attributes are accepted, because a newer driver may
// have them; a Geometry has the profiles of a GPU.
//
// Numbers are 1 to 9999 without leading zeros. The name of an attribute begins with a letter and
// consists of lower-case letters and digits, with dots between them (me.all).
func ParseProfile(s string) (Profile, error) {
	p, err := parseProfile(s)
	if err != nil {
		return Profile{}, fmt.Errorf("MIG profile %q: %w", s, err)
	}
	return p, nil
}

// The parts of a profile's name. An attribute's name has dots only between its parts.
const (
	number    = `([1-9][0-9]{0,3})`
	attribute = `[a-z][a-z0-9]*(?:\.[a-z0-9]+)*`
)

var name = regexp.MustCompile(`^(?:` + number + `c\.)?` + number + `g\.` + number + `gb(?:([+-])(` + attribute +
	`(?:,` + attribute + `)*))?$`)

func parseProfile(s string) (Profile, error) {
	parts := name.FindStringSubmatch(s)
	if parts == nil {
		return Profile{}, errors.New("not of the form of 1g.5gb, 1c.2g.10gb or 1g.5gb+me")
	}
	var p Profile
	p.Slices, _ = strconv.Atoi(parts[2])
	p.MemoryGB, _ = strconv.Atoi(parts[3])
	p.Compute = p.Slices
	if parts[1] != "" {
		p.Compute, _ = strconv.Atoi(parts[1])
	}
	if p.Compute > p.Slices {
		return Profile{}, fmt.Errorf("%d compute slices are more than the %d of the GPU instance", p.Compute, p.Slices)
	}
	if names := strings.Split(parts[5], ","); parts[5] != "" {
		slices.Sort(names)
		if len(slices.Compact(slices.Clone(names))) != len(names) {
			return Profile{}, fmt.Errorf("%q repeats an attribute", parts[4]+parts[5])
		}
		p.Attributes = parts[4] + strings.Join(names, ",")
	}
	return p, nil
}
