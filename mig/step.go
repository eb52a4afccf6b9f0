package mig

import "fmt"

// Step is one change of a board, one call of the driver.
type Step struct {
	Action Action `json:"action"`
	// Placement says which GPU instance the step is about, one that is there or
	// one that an earlier step makes: no two of a board have the same. It is zero
	// for a change of the mode.
	Placement Placement `json:"placement"`
	// Profile is the GPU instance's for an instance and the partition's for a
	// compute instance; zero for a change of the mode.
	Profile Profile `json:"profile"`
	// GI is the driver's ID of the GPU instance, CI that of the compute instance
	// that is destroyed, UUID its partition's. GI is -1 for a GPU instance that is
	// not there yet, CI -1 for anything but DestroyCompute.
	GI   int    `json:"gi"`
	CI   int    `json:"ci"`
	UUID string `json:"uuid,omitempty"`
}

// Action is what a Step does.
type Action string

// The actions, in the order in which a Change has them.
const (
	DestroyCompute  Action = "destroy-compute"
	DestroyInstance Action = "destroy-instance"
	DisableMIG      Action = "disable-mig"
	EnableMIG       Action = "enable-mig"
	CreateInstance  Action = "create-instance"
	CreateCompute   Action = "create-compute"
)

// String is the step in words, for a person.
func (s Step) String() string {
	switch s.Action {
	case DestroyCompute:
		return fmt.Sprintf("destroy partition %s at %s (%s)", s.Profile, s.Placement, s.UUID)
	case DestroyInstance:
		return fmt.Sprintf("destroy GPU instance %s at %s", s.Profile, s.Placement)
	case CreateInstance:
		return fmt.Sprintf("create GPU instance %s at %s", s.Profile, s.Placement)
	case CreateCompute:
		return fmt.Sprintf("create partition %s at %s", s.Profile, s.Placement)
	case EnableMIG:
		return "enable MIG mode"
	case DisableMIG:
		return "disable MIG mode"
	}
	return string(s.Action)
}

func modeStep(action Action) Step { return Step{Action: action, GI: -1, CI: -1} }

func instanceStep(action Action, i Instance) Step {
	return Step{Action: action, Profile: i.Profile, Placement: i.Placement, GI: i.GI, CI: -1}
}

// destroy adds the end of a free partition.
func (c *Change) destroy(i Instance, compute Compute) {
	c.Doomed = append(c.Doomed, compute.UUID)
	c.Steps = append(c.Steps, Step{
		Action: DestroyCompute, Profile: i.Partition(compute), Placement: i.Placement,
		GI: i.GI, CI: compute.CI, UUID: compute.UUID,
	})
}

// create adds what can be made of the site now.
func (c *Change) create(s site, r *recut) {
	gi := -1
	if s.have >= 0 {
		gi = r.have[s.have].GI
	} else if s.made() > 0 {
		c.Steps = append(c.Steps, Step{Action: CreateInstance, Profile: s.shape.Profile, Placement: s.placement, GI: -1, CI: -1})
	}
	for n, p := range s.fresh {
		if s.ready[n] {
			c.Steps = append(c.Steps, Step{Action: CreateCompute, Profile: p, Placement: s.placement, GI: gi, CI: -1})
			c.Result = append(c.Result, Placed{p, s.placement})
		}
	}
}
