package simkubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const checkpointName = "kubelet_internal_checkpoint"

// checkpoint is the file's shape (devicemanager/checkpoint/checkpoint.go).
//
// The real kubelet's checksum is a hash over a dump of its own Go types and is
// checked when it reads the file. Here it is 0 and not checked, so a real
// kubelet would not read the file.
type checkpoint struct {
	Data     checkpointData
	Checksum uint64
}

type checkpointData struct {
	PodDeviceEntries []podDevicesEntry
	// RegisteredDevices are the healthy IDs by resource.
	RegisteredDevices map[string][]string
}

type podDevicesEntry struct {
	PodUID, ContainerName, ResourceName string
	// DeviceIDs are by NUMA node, -1 for none.
	DeviceIDs map[int64][]string
	// AllocResp is a marshalled ContainerAllocateResponse.
	AllocResp []byte
}

// writeCheckpoint replaces the file. The real kubelet syncs it to the disk
// first; nothing here survives a crash, so this does not. The caller holds the
// lock.
func (k *Kubelet) writeCheckpoint(p *process) {
	if err := p.saveCheckpoint(k.options.Dir); err != nil {
		k.logger.Error("checkpoint not written", "error", err)
	}
}

func (p *process) saveCheckpoint(dir string) error {
	data := checkpointData{RegisteredDevices: map[string][]string{}}
	for _, holder := range p.ledger.holders() {
		holding := p.ledger[holder]
		response, err := proto.MarshalOptions{Deterministic: true}.Marshal(holding.response)
		if err != nil {
			return fmt.Errorf("marshal response for %s: %w", holder.container, err)
		}
		data.PodDeviceEntries = append(data.PodDeviceEntries, podDevicesEntry{
			PodUID:        holder.uid,
			ContainerName: holder.container,
			ResourceName:  holder.resource,
			DeviceIDs:     holding.byNode,
			AllocResp:     response,
		})
	}
	for resource, devices := range p.devices {
		data.RegisteredDevices[resource] = append([]string{}, devices.healthy.sorted()...)
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

// readCheckpoint restores the file. No file is no memory.
func (p *process) readCheckpoint(dir string, now time.Time) error {
	text, err := os.ReadFile(filepath.Join(dir, checkpointName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return p.restoreCheckpoint(text, now)
}

// restoreCheckpoint restores who holds what. Resources come back without
// devices and with an endpoint that has been stopped now.
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
		p.ledger[holder{entry.PodUID, entry.ContainerName, entry.ResourceName}] = holding{entry.DeviceIDs, response}
	}
	p.recount()
	for resource := range read.Data.RegisteredDevices {
		p.devices[resource] = &devices{healthy: set{}, unhealthy: set{}}
		p.endpoints[resource] = &endpoint{stopped: now}
	}
	return nil
}
