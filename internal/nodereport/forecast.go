package nodereport

// Forecast is what a node would become if a label of its Node named another profile or MIG
// layout, as the node itself says. Its JSON names are an interface, as those of a status.
type Forecast struct {
	// Node is the Node object's name; empty when it is not known.
	Node string `json:"node,omitempty"`
	// Unknown says why nothing can be said now; all that follows is empty then.
	Unknown string `json:"unknown,omitempty"`
	// Unfit says why the node would refuse it, or have nothing to offer. It stays as it is then.
	Unfit []string `json:"unfit,omitempty"`
	// LeftTo says that another program makes the node's MIG layouts; empty for none.
	LeftTo string `json:"leftTo,omitempty"`
	// Resources are those before and after, by name.
	Resources []ForecastResource `json:"resources"`
	// Busy are the units that keep a GPU from what is wanted until their holders have ended.
	Busy []BusyUnit `json:"busy,omitempty"`
	// Layouts are the GPUs whose partitions would change, by index.
	Layouts []ForecastLayout `json:"layouts,omitempty"`
	// Warnings are those of the new plan that the plan in force does not have.
	Warnings []string `json:"warnings,omitempty"`
}

// ForecastResource counts the healthy devices of a resource.
type ForecastResource struct {
	Name string `json:"name"`
	// Before is now. Lowest is while units are being switched, which are offered to nobody then.
	Before int `json:"before"`
	Lowest int `json:"lowest"`
	// Then is when all is done that need not wait for pods, After when those have ended too.
	Then  int `json:"then"`
	After int `json:"after"`
}

// BusyUnit is a unit that is in use in another way than is wanted.
type BusyUnit struct {
	Unit string `json:"unit"`
	// Index is the driver's: "2", "2:0".
	Index string `json:"index"`
	// Pods hold it, as "namespace/name"; none while the kubelet does not name them, or where it is
	// a process that uses it: Reason says more, if there is more to say.
	Pods   []string `json:"pods"`
	Reason string   `json:"reason,omitempty"`
}

// ForecastLayout says what would become of a GPU's partitions.
type ForecastLayout struct {
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Kept, Destroyed and Made count partitions, once nothing is in the way any more.
	Kept      int `json:"kept"`
	Destroyed int `json:"destroyed"`
	Made      int `json:"made"`
}
