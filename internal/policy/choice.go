package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Fallback is what to do when neither the node's label nor a default chooses a
// profile. The names are those of NVIDIA's config-manager (k8s-device-plugin
// v0.17, cmd/config-manager).
type Fallback string

const (
	// Named takes the profile that is called "default".
	Named Fallback = "named"
	// Single takes the only profile there is.
	Single Fallback = "single"
	// Empty takes the document without settings: everything exclusive.
	Empty Fallback = "empty"
)

// namedFallback is the profile's name that Named looks for.
const namedFallback = "default"

// ParseFallbacks reads a list of fallbacks between commas, in the order in which
// they are tried; "" is none.
func ParseFallbacks(s string) ([]Fallback, error) {
	var fallbacks []Fallback
	for item := range strings.SplitSeq(s, ",") {
		item = strings.TrimSpace(item)
		switch f := Fallback(item); {
		case item == "":
		case f != Named && f != Single && f != Empty:
			return nil, fmt.Errorf("expected %s, %s or %s (got %q)", Named, Single, Empty, item)
		case slices.Contains(fallbacks, f):
			return nil, fmt.Errorf("%s is listed twice", f)
		default:
			fallbacks = append(fallbacks, f)
		}
	}
	return fallbacks, nil
}

// Wish is all that a choice follows from.
type Wish struct {
	// Label is the node label's value, LabelName its name. Without the label, or
	// where none is looked at, Label is "".
	LabelName, Label string
	// Default is the profile of a node without the label; "" for none.
	Default string
	// Fallbacks are tried in order where there is no Default.
	Fallbacks []Fallback
	// Names are the profiles there are.
	Names []string
}

// Choose returns the name of the profile that the node should have; "" for the
// empty document. It is a pure function. With an error, the name is what was
// wanted, if anything was; the error then lists what there is.
func Choose(w Wish) (name string, err error) {
	switch {
	case w.Label != "":
		return w.Label, w.need(w.Label, "the node label "+w.LabelName)
	case w.Default != "":
		return w.Default, w.need(w.Default, "the default")
	case len(w.Names) == 0:
		return "", errors.New("it holds no profile")
	}
	for _, fallback := range w.Fallbacks {
		switch {
		case fallback == Named && slices.Contains(w.Names, namedFallback):
			return namedFallback, nil
		case fallback == Single && len(w.Names) == 1:
			return w.Names[0], nil
		case fallback == Empty:
			return "", nil
		}
	}
	without := "there is no default"
	if w.LabelName != "" {
		without = fmt.Sprintf("the node has no label %s, and %s", w.LabelName, without)
	}
	return "", fmt.Errorf("%s, and no fallback of %q applies: %s", without, w.Fallbacks, w.available())
}

func (w Wish) need(name, says string) error {
	if slices.Contains(w.Names, name) {
		return nil
	}
	return fmt.Errorf("%s wants %q: %s", says, name, w.available())
}

// available lists what there is.
func (w Wish) available() string {
	if len(w.Names) == 0 {
		return "it holds no profile"
	}
	names := slices.Sorted(slices.Values(w.Names))
	return "it holds " + strings.Join(names, ", ")
}
