package configs

import (
	"fmt"
	"strings"

	"github.com/virgate/virgate/sharing"
)

// MIGLayout returns the MIG layout that the file asks for, or the one with the
// name: of a profile, chosen by key as in Select, of a mig-parted document, or
// built in. The profile's mig.manage stays as it is where no name is given; to
// name a layout is to ask for it.
//
// The error says what cannot be chosen, and which layouts there are where a
// document has them and none was named.
func (f File) MIGLayout(key, name string) (sharing.Repartition, error) {
	if layouts, ok := f.onlyLayouts(); ok {
		if key != "" {
			return sharing.Repartition{}, fmt.Errorf("select %s from %s: it has no profile", quote(key), f.Name)
		}
		if name == "" {
			return sharing.Repartition{}, fmt.Errorf("%s has layouts, name one of %s", f.Name, strings.Join(layouts.names(), ", "))
		}
		return Config{Layouts: layouts}.named(name)
	}
	config, err := f.Select(key)
	if err != nil {
		return sharing.Repartition{}, err
	}
	if name == "" {
		return config.Profile.MIG, nil
	}
	return config.named(name)
}

// named is the wish for the layout, with what the profile says beside it.
func (c Config) named(name string) (sharing.Repartition, error) {
	c.Profile.MIG.Manage = true
	selected, err := c.SelectMIG(name)
	if err == nil && selected.Profile.MIG.WhenBusy == "" {
		selected.Profile.MIG.WhenBusy = sharing.Wait
	}
	return selected.Profile.MIG, err
}

// onlyLayouts are the layouts of a file that has no profile; false for one that
// has.
func (f File) onlyLayouts() (MIGConfigs, bool) {
	if f.Kind == KindMIGConfigs {
		return f.MIG, true
	}
	var layouts MIGConfigs
	for _, e := range f.ConfigMap.Entries {
		if e.Kind == KindProfile {
			return nil, false
		}
		layouts = layouts.with(e.MIG)
	}
	return layouts, len(layouts) > 0
}

func (c MIGConfigs) names() []string {
	names := make([]string, len(c))
	for i, layout := range c {
		names[i] = layout.Name
	}
	return names
}
