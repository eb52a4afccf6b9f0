package sharing

// The vendor's domain, under which every resource without a name of its own
// is offered, and the name of a whole GPU (NVIDIA's device plugin,
// internal/rm/rm.go).
const (
	defaultDomain  = "nvidia.com/"
	defaultGPUName = defaultDomain + "gpu"
)

// nameUnits gives each unit the name of its resource. Under MIG strategy
// single a partition is called as its board would be.
func nameUnits(units []candidate, p Profile) {
	for i := range units {
		u := &units[i]
		if u.partition == nil || p.MIGStrategy == MIGSingle {
			u.name = nameOf(u.board.Model, p.GPUNames, defaultGPUName)
			continue
		}
		profile := u.partition.Profile
		u.name = nameOf(profile.String(), p.MIGNames, defaultDomain+profile.ResourceName())
	}
}

// nameOf returns the name of the first rule that matches s.
func nameOf(s string, rules []Naming, otherwise string) string {
	for _, rule := range rules {
		if rule.Pattern.Match(s) {
			return rule.Name
		}
	}
	return otherwise
}
