package dra

import "time"

// SharesCapacity is the name of the capacity that counts shares: each share consumes 1.
const SharesCapacity = "shares"

// Claim is the part of an allocated ResourceClaim that concerns this driver. The state file stores
// claims in this form.
type Claim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Results are this driver's devices that were allocated to the claim.
	Results []Result `json:"results"`
	// ByName is true if Kubernetes made the claim for a pod that requests a resource by its name.
	// Each request of such a claim is for one container.
	ByName bool `json:"byName,omitempty"`
	// Configs are the claim's parameters for this driver, as JSON.
	Configs [][]byte `json:"-"`
}

func (c Claim) String() string { return c.Namespace + "/" + c.Name }

// Result is a device that was allocated to a claim.
type Result struct {
	// Request has the form "request" or "request/subrequest".
	Request string `json:"request"`
	Device  string `json:"device"`
	// ShareID distinguishes several shares of a device. Shares is the number of shares of the
	// claim. Both are empty for an exclusive device.
	ShareID string `json:"shareID,omitempty"`
	Shares  int64  `json:"shares,omitempty"`
	// Admin is true for monitoring access, which holds nothing.
	Admin bool `json:"admin,omitempty"`
}

// UnitName returns the name of the unit, which does not depend on how the unit is shared.
func (r Result) UnitName() string { return UnitNameOf(r.Device) }

// DeviceHealth is the health of a device that a claim has.
type DeviceHealth struct {
	Device  string
	Healthy bool
	// Reason is what is wrong, for people; empty if nothing is.
	Reason string
	// Since is when the device got this health.
	Since time.Time
}

// DriverState is the state of the driver's registration and of its ResourceSlices.
type DriverState struct {
	// Registered is true once the kubelet has accepted the driver.
	Registered bool `json:"registered"`
	// Slices is the number of ResourceSlices in the API server. Written is the time since which the
	// API server has the last offer; zero while it does not have it.
	Slices  int       `json:"slices"`
	Written time.Time `json:"written"`
	// Writes counts the requests that changed ResourceSlices, WriteFailures the attempts that
	// failed. Unwritten is true if the last attempt failed.
	Writes        int  `json:"-"`
	WriteFailures int  `json:"-"`
	Unwritten     bool `json:"-"`
	// Problems describe what does not work now, for people.
	Problems []string `json:"problems,omitempty"`
	// Without are the features that the API server has turned off.
	Without Features `json:"without"`
}

// Features are Kubernetes' DRADeviceTaints, DRAConsumableCapacity and DRAPartitionableDevices. An
// API server that has one turned off drops the fields that belong to it, without an error.
type Features struct {
	Taints   bool `json:"taints"`
	Shares   bool `json:"shares"`
	Counters bool `json:"counters"`
	// Other is true if further fields were dropped that belong to none of these features.
	Other bool `json:"-"`
}
