package simkubelet

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/sets"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const checkpointName = "kubelet_internal_checkpoint"

// checkpoint is the content of the file (cm/devicemanager/checkpoint/checkpoint.go).
//
// The real checksum is a hash over the kubelet's own Go types, and is checked when the file is
// read. Here it is 0 and not checked, so a real kubelet would not accept the file.
type checkpoint struct {
	Data     checkpointData
	Checksum uint64
}

type checkpointData struct {
	PodDeviceEntries []podDevicesEntry
	// RegisteredDevices are the IDs of the healthy devices by resource.
	RegisteredDevices map[string][]string
}

type podDevicesEntry struct {
	PodUID, ContainerName, ResourceName string
	// DeviceIDs maps NUMA nodes to device IDs; noNode stands for none.
	DeviceIDs map[int64][]string
	// AllocResp is a marshaled ContainerAllocateResponse.
	AllocResp []byte
}

// writeCheckpoint replaces the file. Unlike the real kubelet it does not sync the file, which need
// not survive a crash of the machine. The caller holds the lock.
func (k *Kubelet) writeCheckpoint(p *process) {
	if err := p.saveCheckpoint(k.options.Dir); err != nil {
		k.logger.Error("checkpoint not written", "error", err)
	}
}

func (p *process) saveCheckpoint(dir string) error {
	data := checkpointData{RegisteredDevices: map[string][]string{}}
	for _, key := range p.podDevices.keys() {
		info := p.podDevices[key]
		response, err := proto.MarshalOptions{Deterministic: true}.Marshal(info.response)
		if err != nil {
			return fmt.Errorf("marshal response for %s: %w", key.container, err)
		}
		data.PodDeviceEntries = append(data.PodDeviceEntries, podDevicesEntry{
			PodUID:        key.podUID,
			ContainerName: key.container,
			ResourceName:  key.resource,
			DeviceIDs:     info.byNode,
			AllocResp:     response,
		})
	}
	for resource, devices := range p.devices {
		data.RegisteredDevices[resource] = append([]string{}, sets.List(devices.healthy)...)
	}
	text, err := json.Marshal(checkpoint{Data: data})
	if err != nil {
		return err
	}
	path := filepath.Join(dir, checkpointName)
	if err := os.WriteFile(path+".tmp", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// restoreCheckpoint restores which pods hold which devices. The resources have no devices at first,
// and their endpoints count as stopped from now on.
func (p *process) restoreCheckpoint(text []byte, now time.Time) error {
	var read checkpoint
	if err := json.Unmarshal(text, &read); err != nil {
		return fmt.Errorf("parse checkpoint: %w", err)
	}
	for _, entry := range read.Data.PodDeviceEntries {
		response := &api.ContainerAllocateResponse{}
		if err := proto.Unmarshal(entry.AllocResp, response); err != nil {
			return fmt.Errorf("parse checkpoint: response for container %s: %w", entry.ContainerName, err)
		}
		for _, ids := range entry.DeviceIDs {
			slices.Sort(ids)
		}
		key := allocationKey{entry.PodUID, entry.ContainerName, entry.ResourceName}
		p.podDevices[key] = deviceAllocateInfo{entry.DeviceIDs, response}
	}
	for resource := range read.Data.RegisteredDevices {
		p.devices[resource] = &deviceList{healthy: idSet{}, unhealthy: idSet{}}
		p.endpoints[resource] = &endpoint{stopped: now}
	}
	return nil
}
