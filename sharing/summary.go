package sharing

// Summary is a plan in figures, as it is shown to people and programs.
type Summary struct {
	Resources []ResourceSummary `json:"resources"`
	Warnings  []string          `json:"warnings"`
}

// ResourceSummary is a resource in figures.
type ResourceSummary struct {
	Name string `json:"name"`
	// Strategy is Resource.Strategy.
	Strategy string `json:"strategy"`
	// Replicas is the number of devices a unit, the largest where units differ.
	Replicas int `json:"replicas"`
	// Units, Devices and Healthy are counts; Healthy is of devices.
	Units   int `json:"units"`
	Devices int `json:"devices"`
	Healthy int `json:"healthy"`
}

// Summary returns the plan in figures. Its slices are never nil.
func (p Plan) Summary() Summary {
	s := Summary{Resources: make([]ResourceSummary, len(p.Resources)), Warnings: append([]string{}, p.Warnings...)}
	for i, r := range p.Resources {
		s.Resources[i] = ResourceSummary{
			Name: r.Name, Strategy: r.Strategy(), Replicas: r.Replicas(),
			Units: len(r.Units), Devices: len(r.Devices), Healthy: r.Healthy(),
		}
	}
	return s
}
