package nodemetrics

import (
	_ "embed"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/internal/status"
	"github.com/virgate/virgate/mig"
	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
	"github.com/virgate/virgate/sharing/metrics"
)

//go:embed program.txt
var programFamilies string

// Program is the state of the program at one moment, with the progress of the wanted profile and of
// the GPUs that Virgate partitions.
type Program struct {
	Version string
	// Accepted is true if the wanted profile is planned with, Read if the GPUs could be read.
	Accepted, Read bool
	// Unmatched and OtherWarnings count the plan's warnings.
	Unmatched, OtherWarnings int
	// Saved is true if the last write of the state file succeeded.
	Saved bool
	// PodResources and Checkpoint are true if that source of the kubelet could be read.
	PodResources, Checkpoint bool
	Plugin                   plugin.Status
	Waits                    []nodereport.Wait
	State                    nodereport.ProfileState
	// Applied is the profile whose device lists the kubelet has had since AppliedAt; zero before
	// the first.
	Applied   nodereport.ProfileRef
	AppliedAt time.Time
	// Settings are the settings of the driver, by GPU.
	Settings map[string][]status.GPUSetting
	// Announcements counts the device numbers that were written to the Node ahead of the kubelet,
	// by result; nil if none are written.
	Announcements map[string]uint64
	// Evictions counts the evictions that the memory guard requested, by result; nil without a
	// guard.
	Evictions map[string]int
	// MPS is nil if there can be no MPS daemons.
	MPS          *MPS
	Layouts      []nodereport.GPULayout
	Repartitions Repartitions
}

// MPS is the known state of the MPS daemons.
type MPS struct {
	Connected bool
	Daemons   []nodereport.MPSState
	GPUs      []sharing.GPU
}

// Repartitions counts the outcomes of changes of MIG layouts that had begun.
type Repartitions struct{ Applied, Undone, Failed uint64 }

// NewProgramCollector returns a collector that shows what read returns at each scrape.
func NewProgramCollector(read func() Program) prometheus.Collector {
	return metrics.OfTable(programFamilies, func(send metrics.Send) { collectProgram(send, read()) })
}

func collectProgram(send metrics.Send, p Program) {
	send("build_info", 1, p.Version)
	send("config_last_apply_successful", metrics.BoolToFloat(p.Accepted))
	send("inventory_last_read_successful", metrics.BoolToFloat(p.Read))
	send("plan_warnings", float64(p.Unmatched), "unmatched")
	send("plan_warnings", float64(p.OtherWarnings), "other")
	send("state_last_write_successful", metrics.BoolToFloat(p.Saved))
	send("kubelet_state_known", metrics.BoolToFloat(p.Plugin.KubeletSeen))
	send("kubelet_source_up", metrics.BoolToFloat(p.PodResources), "pod_resources")
	send("kubelet_source_up", metrics.BoolToFloat(p.Checkpoint), "checkpoint")
	for _, r := range p.Plugin.Resources {
		send("listandwatch_streams", float64(r.Streams), r.Name)
		send("listed_devices", float64(r.Healthy), r.Name, "healthy")
		send("listed_devices", float64(r.Devices-r.Healthy), r.Name, "unhealthy")
		waiting := 0
		for _, w := range p.Waits {
			if w.Resource == r.Name {
				waiting++
			}
		}
		send("switch_waiting_units", float64(waiting), r.Name)
		send("kubelet_registrations_total", float64(r.Registrations), r.Name)
		send("listandwatch_updates_total", float64(r.Lists), r.Name)
		send("allocations_total", float64(r.Granted), r.Name)
		for _, reason := range plugin.RefusalReasons() {
			send("allocate_failures_total", float64(r.Refused[reason]), r.Name, string(reason))
		}
		send("same_unit_grants_total", float64(r.SameUnit), r.Name)
	}
	for _, state := range nodereport.ProfileStates() {
		send("config_state", metrics.BoolToFloat(state == p.State), string(state))
	}
	if p.Applied.Generation != "" {
		send("config_last_apply_timestamp_seconds", float64(p.AppliedAt.UnixMilli())/1000)
		send("config_info", 1, p.Applied.Name, p.Applied.Source, p.Applied.Generation)
		if p.Applied.By != "" {
			send("config_choice_info", 1, p.Applied.ChosenBy(), ruleNumber(p.Applied.Rule))
		}
	}
	for gpu, list := range p.Settings {
		for _, s := range list {
			send("gpu_setting_applied", metrics.BoolToFloat(s.State == status.SettingApplied), gpu, s.Setting, s.Value)
		}
	}
	for result, count := range p.Announcements {
		send("announcements_total", float64(count), result)
	}
	for result, count := range p.Evictions {
		send("memory_guard_evictions_total", float64(count), result)
	}
	p.MPS.collect(send)
	collectLayouts(send, p.Layouts)
	send("mig_repartitions_total", float64(p.Repartitions.Applied), "applied")
	send("mig_repartitions_total", float64(p.Repartitions.Undone), "undone")
	send("mig_repartitions_total", float64(p.Repartitions.Failed), "failed")
}

// ruleNumber returns the rule's number; empty if there is no rule.
func ruleNumber(rule int) string {
	if rule == 0 {
		return ""
	}
	return strconv.Itoa(rule)
}

// collect sends nothing if m is nil: there can be no MPS daemons.
func (m *MPS) collect(send metrics.Send) {
	if m == nil {
		return
	}
	send("mps_up", metrics.BoolToFloat(m.Connected))
	if !m.Connected {
		return // The last known states may no longer be true.
	}
	gpu := sharing.GPUByUnit(m.GPUs)
	for _, state := range m.Daemons {
		for _, phase := range nodereport.MPSPhases() {
			send("mps_daemon_state", metrics.BoolToFloat(state.Phase == phase), gpu[state.ID], state.ID, string(phase))
		}
		send("mps_daemon_restarts_total", float64(state.Restarts), gpu[state.ID], state.ID)
	}
}

// collectLayouts sends the progress of the GPUs that Virgate partitions.
func collectLayouts(send metrics.Send, gpus []nodereport.GPULayout) {
	for _, gpu := range gpus {
		for _, state := range nodereport.LayoutStates() {
			send("mig_layout_state", metrics.BoolToFloat(state == gpu.State), gpu.GPU, gpu.Wanted, string(state))
		}
		used := 0
		type kind struct{ profile, state string }
		counts := map[kind]int{}
		for _, instance := range gpu.Instances {
			used += instance.Placement.Size
			state := "free"
			if slices.ContainsFunc(instance.Computes, func(c mig.Compute) bool { return c.Busy }) {
				state = "in_use"
			}
			counts[kind{instance.Profile.String(), state}]++
		}
		send("mig_slots", float64(used), gpu.GPU, "used")
		send("mig_slots", float64(gpu.Slots-used-gpu.Unreachable), gpu.GPU, "free")
		send("mig_slots", float64(gpu.Unreachable), gpu.GPU, "unreachable")
		for k, count := range counts {
			send("mig_instances", float64(count), gpu.GPU, k.profile, k.state)
		}
	}
}
