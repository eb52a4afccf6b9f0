package nodereport

// Forecast is what a node would become if a label of its Node named another profile or MIG layout,
// according to the node itself. Its JSON names are an interface, like the names in a status.
type Forecast struct {
	// Node is the name of the Node object; empty if it is not known.
	Node string `json:"node,omitempty"`
	// Unknown says why there is no forecast now; then all other fields are empty.
	Unknown string `json:"unknown,omitempty"`
	// Unfit says why the node would refuse the change, or would have nothing to offer. Then it
	// stays as it is.
	Unfit []string `json:"unfit,omitempty"`
	// LeftTo says why another program makes the node's MIG layouts; empty if none does.
	LeftTo string `json:"leftTo,omitempty"`
	// Resources are the resources before and after the change, by name.
	Resources []ForecastResource `json:"resources"`
	// Busy are the units that keep a GPU from the wanted state until their holders have ended.
	Busy []BusyUnit `json:"busy,omitempty"`
	// Layouts are the GPUs whose partitions would change, by index.
	Layouts []ForecastLayout `json:"layouts,omitempty"`
	// Warnings are the warnings of the new plan that the plan in force does not have.
	Warnings []string `json:"warnings,omitempty"`
}

// ForecastResource counts the healthy devices of a resource.
type ForecastResource struct {
	Name string `json:"name"`
	// Before is the number now. Lowest is the number while units are being switched; no pod can get
	// those units meanwhile.
	Before int `json:"before"`
	Lowest int `json:"lowest"`
	// Then is the number after everything that need not wait for pods. After is the number once
	// those pods have ended, too.
	Then  int `json:"then"`
	After int `json:"after"`
}

// BusyUnit is a unit that is in use in another way than the wanted one.
type BusyUnit struct {
	Unit string `json:"unit"`
	// Index is the driver's: "2", "2:0".
	Index string `json:"index"`
	// Pods hold the unit, as "namespace/name". There are none while the kubelet does not name them,
	// or if a process uses the unit. Reason says more, if there is more to say.
	Pods   []string `json:"pods"`
	Reason string   `json:"reason,omitempty"`
}

// ForecastLayout is what would become of a GPU's partitions.
type ForecastLayout struct {
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// Kept, Destroyed and Made count partitions, once nothing blocks the change any more.
	Kept      int `json:"kept"`
	Destroyed int `json:"destroyed"`
	Made      int `json:"made"`
}
