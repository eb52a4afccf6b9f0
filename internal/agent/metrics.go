package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/virgate/virgate/sharing/metrics"
)

// collector shows how the program itself fares.
type collector struct {
	agent *agent
	build, profileAccepted, inventoryRead, kubeletSeen, kept, warnings,
	streams, devices, registrations, lists *prometheus.Desc
}

func newCollector(a *agent) collector {
	return collector{
		agent:           a,
		build:           desc("build_info", "The running program; always 1.", "version"),
		profileAccepted: desc("config_last_apply_successful", "Whether the profile that should be in force is."),
		inventoryRead:   desc("inventory_last_read_successful", "Whether the GPUs could be read when last tried."),
		kubeletSeen:     desc("kubelet_state_known", "Whether what the kubelet holds and has applied could be read when last needed; while it cannot, no list loses a device."),
		kept:            desc("state_last_write_successful", "Whether what a restarted Virgate needs to know could be written when last tried; while not, serving goes on."),
		warnings:        desc("plan_warnings", "Warnings of the plan in force."),
		streams:         desc("listandwatch_streams", "Streams that the kubelet has open for the resource; 1 is right.", "resource"),
		devices:         desc("listed_devices", "Devices in the resource's list, by state: healthy, unhealthy.", "resource", "state"),
		registrations:   desc("kubelet_registrations_total", "Successful registrations of the resource.", "resource"),
		lists:           desc("listandwatch_updates_total", "Lists sent to the kubelet.", "resource"),
	}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("virgate_"+name, help, labels, nil)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		c.build, c.profileAccepted, c.inventoryRead, c.kubeletSeen, c.kept, c.warnings, c.streams, c.devices, c.registrations, c.lists,
	} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	send := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		ch <- metrics.Constant(desc, kind, value, labels...)
	}
	s := c.agent.state.Load()
	send(c.build, prometheus.GaugeValue, 1, c.agent.Version)
	send(c.profileAccepted, prometheus.GaugeValue, truth(s.profile != nil && s.rejected == nil))
	send(c.inventoryRead, prometheus.GaugeValue, truth(s.planned && s.unread == nil))
	send(c.warnings, prometheus.GaugeValue, float64(len(s.plan.Warnings)))
	send(c.kept, prometheus.GaugeValue, truth(c.agent.unkept() == nil))
	status := c.agent.Plugin.Status()
	send(c.kubeletSeen, prometheus.GaugeValue, truth(status.KubeletSeen))
	for _, r := range status.Resources {
		send(c.streams, prometheus.GaugeValue, float64(r.Streams), r.Name)
		send(c.devices, prometheus.GaugeValue, float64(r.Healthy), r.Name, "healthy")
		send(c.devices, prometheus.GaugeValue, float64(r.Devices-r.Healthy), r.Name, "unhealthy")
		send(c.registrations, prometheus.CounterValue, float64(r.Registrations), r.Name)
		send(c.lists, prometheus.CounterValue, float64(r.Lists), r.Name)
	}
}
