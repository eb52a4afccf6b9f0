package dra

import "time"

// SharesCapacity is the name of the capacity that counts shares: each share takes 1.
const SharesCapacity = "shares"

// Claim is a ResourceClaim that has been allocated, as far as it is this driver's. The state file
// has claims in this form.
type Claim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Results are the devices of this driver that it has been given.
	Results []Result `json:"results"`
	// ByName is true if Kubernetes made the claim for a pod that asks for a resource by its name:
	// each of its requests is one container's.
	ByName bool `json:"byName,omitempty"`
	// Configs are what it wants of this driver, as JSON.
	Configs [][]byte `json:"-"`
}

func (c Claim) String() string { return c.Namespace + "/" + c.Name }

// Result is a device that a claim has been given.
type Result struct {
	// Request is "request", or "request/subrequest".
	Request string `json:"request"`
	Device  string `json:"device"`
	// ShareID tells several shares of a device apart, Shares is how many the claim has; both
	// are empty for an exclusive device.
	ShareID string `json:"shareID,omitempty"`
	Shares  int64  `json:"shares,omitempty"`
	// Admin is access for monitoring: it holds nothing.
	Admin bool `json:"admin,omitempty"`
}

// Place is the unit's, whichever way it is shared.
func (r Result) Place() string { return PlaceOf(r.Device) }

// DeviceHealth is how a device that a claim has is.
type DeviceHealth struct {
	Device  string
	Healthy bool
	// Reason is what is wrong, for people; empty when nothing is.
	Reason string
	// Since is when it became so.
	Since time.Time
}

// DriverState is how the driver's registration and its ResourceSlices are.
type DriverState struct {
	// Registered is true after the kubelet has accepted the driver.
	Registered bool `json:"registered"`
	// Slices is how many ResourceSlices the API server has. Written is since when it has the last
	// offer; zero while it has not.
	Slices  int       `json:"slices"`
	Written time.Time `json:"written"`
	// Writes counts the requests that have changed ResourceSlices, WriteFailures the attempts that
	// ended with an error. Unwritten is true if the last one did.
	Writes        int  `json:"-"`
	WriteFailures int  `json:"-"`
	Unwritten     bool `json:"-"`
	// Problems are what does not work now, for people.
	Problems []string `json:"problems,omitempty"`
	// Without are the features that are turned off in the API server.
	Without Features `json:"without"`
}

// Features are Kubernetes' DRADeviceTaints, DRAConsumableCapacity and DRAPartitionableDevices. An
// API server in which one is turned off leaves out the fields that belong to it, without an error.
type Features struct {
	Taints   bool `json:"taints"`
	Shares   bool `json:"shares"`
	Counters bool `json:"counters"`
	// Other fields are left out too, which none of the features explains.
	Other bool `json:"-"`
}
