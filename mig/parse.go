package mig

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ParseProfile reads a profile's written form; see Profile for the syntax. It
// also takes "1c.1g.5gb" for 1g.5gb, and attributes in any order. Attribute
// names that are not known yet are kept, so that a newer driver's profiles can
// be named; whether a board has the profile, its Geometry says.
//
// Numbers are 1 to 9999 without leading zeros. A name is of lower-case letters
// and digits, begins with a letter, and may have parts between dots (me.all).
func ParseProfile(s string) (Profile, error) {
	p, err := parseProfile(s)
	if err != nil {
		return Profile{}, fmt.Errorf("MIG profile %q: %w", s, err)
	}
	return p, nil
}

func parseProfile(s string) (Profile, error) {
	size, sign, names := cutAttributes(s)
	fields := strings.Split(size, ".")
	units := []string{"c", "g", "gb"}
	if len(fields) == 2 {
		units = units[1:]
	}
	if len(fields) != len(units) {
		return Profile{}, errors.New("not of the form of 1g.5gb or 1c.2g.10gb")
	}
	numbers := make([]int, len(fields))
	for i, field := range fields {
		n, err := parseNumber(field, units[i])
		if err != nil {
			return Profile{}, err
		}
		numbers[i] = n
	}
	attributes, err := parseAttributes(sign, names)
	if err != nil {
		return Profile{}, err
	}
	p := Profile{
		Compute:    numbers[0],
		Slices:     numbers[len(numbers)-2],
		MemoryGB:   numbers[len(numbers)-1],
		Attributes: attributes,
	}
	if p.Compute > p.Slices {
		return Profile{}, fmt.Errorf("%d compute slices are more than the %d of the GPU instance", p.Compute, p.Slices)
	}
	return p, nil
}

// cutAttributes splits a profile at its sign; sign is "" where it has none.
func cutAttributes(s string) (size, sign, names string) {
	i := strings.IndexAny(s, "+-")
	if i < 0 {
		return s, "", ""
	}
	return s[:i], s[i : i+1], s[i+1:]
}

func parseNumber(field, unit string) (int, error) {
	digits, ok := strings.CutSuffix(field, unit)
	if !ok {
		return 0, fmt.Errorf("%q has no unit %q", field, unit)
	}
	notDigit := func(r rune) bool { return r < '0' || r > '9' }
	if digits == "" || len(digits) > 4 || digits[0] == '0' || strings.ContainsFunc(digits, notDigit) {
		return 0, fmt.Errorf("%q is not a number from 1 to 9999 before %q", digits, unit)
	}
	return strconv.Atoi(digits)
}

// parseAttributes returns the canonical spelling: sorted, with the sign.
func parseAttributes(sign, names string) (string, error) {
	if sign == "" {
		return "", nil
	}
	list := strings.Split(names, ",")
	for _, name := range list {
		if !validAttribute(name) {
			return "", fmt.Errorf("%q is not the name of an attribute such as me, me.all or gfx", name)
		}
	}
	slices.Sort(list)
	if len(slices.Compact(slices.Clone(list))) != len(list) {
		return "", fmt.Errorf("%q repeats an attribute", sign+names)
	}
	return sign + strings.Join(list, ","), nil
}

func validAttribute(name string) bool {
	for part := range strings.SplitSeq(name, ".") {
		if part == "" || strings.ContainsFunc(part, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < '0' || r > '9')
		}) {
			return false
		}
	}
	return name[0] >= 'a'
}
