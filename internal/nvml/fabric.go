package nvml

import (
	"fmt"
	"strings"
	"time"

	"github.com/virgate/virgate/sharing"
)

// joiningTime is how long joining a fabric may take before it counts as a fault of its own. Joining
// takes a while after the driver was loaded (dra-driver-nvidia-gpu#1276), and never ends outside a
// partition of NVSwitches that virtual machines share.
const joiningTime = 5 * time.Minute

// joining is a GPU's progress in joining the fabric since it was last reset or bound to its driver.
type joining struct {
	// completed is true once the GPU has joined. since is when it was first seen not joined, zero
	// while it is joined.
	completed bool
	since     time.Time
}

// observe returns the next joining and the GPU's fault for its fabric; the text is empty if there
// is none.
func (j joining) observe(fabric FabricInfo, now time.Time) (joining, finding) {
	wrong := func(text, todo string) finding {
		return finding{
			cause: sharing.CauseProbe,
			text:  text,
			todo:  todo,
		}
	}
	switch fabric.State {
	case FabricNotSupported:
		return joining{}, finding{}
	case FabricNotStarted, FabricInProgress:
		if j.since.IsZero() {
			j.since = now
		}
		switch {
		case now.Sub(j.since) >= joiningTime:
			return j, wrong("not in the fabric of NVLinks",
				"look at the fabric manager; where others run the NVSwitches, health.fabric: ignore")
		case !j.completed:
			return j, wrong("joins the fabric of NVLinks", "")
		}
		return j, finding{}
	case FabricCompleted:
	default:
		return j, wrong(fmt.Sprintf("fabric of NVLinks: unknown state %d", fabric.State),
			"look up NVML_GPU_FABRIC_STATE_* of this driver's nvml.h")
	}
	j = joining{completed: true}
	const todo = "look at the fabric manager's log and the NVLinks: nvidia-smi -q, section Fabric"
	if fabric.Status != Success {
		return j, wrong("did not join the fabric of NVLinks: "+fabric.Status.String(), todo)
	}
	switch fabric.HealthSummary {
	case FabricHealthUnknown, FabricHealthy, FabricLimitedCapacity:
		return j, finding{}
	case FabricUnhealthy:
		return j, wrong("its fabric of NVLinks is unhealthy"+unhealthyBy(fabric.HealthMask), todo)
	}
	return j, wrong(fmt.Sprintf("fabric of NVLinks: unknown health summary %d", fabric.HealthSummary),
		"look up NVML_GPU_FABRIC_HEALTH_SUMMARY_* of this driver's nvml.h")
}

// unhealthyBy describes the lasting faults in the mask (nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*).
func unhealthyBy(mask uint32) string {
	const is = 1
	configurations := []string{
		2: "incorrect system GUID",
		3: "incorrect chassis serial number",
		4: "no partition",
		5: "insufficient NVLinks",
		6: "incompatible GPU firmware",
		7: "invalid location",
		8: "invalid state of the GPU",
	}
	var texts []string
	if mask&3 == is {
		texts = append(texts, "degraded bandwidth")
	}
	if mask>>4&3 == is {
		texts = append(texts, "unhealthy route")
	}
	switch n := int(mask >> 8 & 15); {
	case n >= len(configurations):
		texts = append(texts, fmt.Sprintf("configuration %d", n))
	case configurations[n] != "":
		texts = append(texts, configurations[n])
	}
	if len(texts) == 0 {
		return ""
	}
	return ": " + strings.Join(texts, ", ")
}

// confidential returns the fault that the ready state means for a GPU of a machine with
// confidential computing.
func confidential(ready uint32) finding {
	switch ready {
	case ConfComputeReady:
		return finding{}
	case ConfComputeNotReady:
		return finding{
			cause: sharing.CauseProbe,
			text:  "confidential computing: the ready state is not set",
			todo:  "set it when the GPUs are attested: nvidia-smi conf-compute -srs 1",
		}
	}
	return finding{
		cause: sharing.CauseProbe,
		text:  fmt.Sprintf("confidential computing: unknown ready state %d", ready),
		todo:  "look up NVML_CC_ACCEPTING_CLIENT_REQUESTS_* of this driver's nvml.h",
	}
}
