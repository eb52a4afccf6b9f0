package podresources

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// checkpointName is the file's name (pkg/kubelet/cm/devicemanager/manager.go,
// Kubernetes 1.36).
const checkpointName = "kubelet_internal_checkpoint"

// maxCheckpoint is the largest file read, in bytes. 56,000 devices make 2.8 MB.
const maxCheckpoint = 64 << 20

// Checkpoint is what the kubelet's device manager keeps on disk.
type Checkpoint struct {
	// Entries are what containers hold, in the file's order.
	Entries []Entry
	// Registered are the healthy devices by resource at the time of the last write, sorted and
	// without duplicates. A resource without healthy devices is not in the map.
	Registered map[string][]string
}

// Entry is what one container holds of one resource.
type Entry struct {
	PodUID, Container, Resource string
	// Devices are the held IDs, sorted and without duplicates; nil for none.
	Devices []string
}

// ParseCheckpoint parses the text of a checkpoint file. The format is internal to the kubelet and has no
// version; this is the format of Kubernetes 1.20 to 1.36
// (pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go). Unknown keys are ignored. If a required key is
// missing or has another form, the error says so and the Checkpoint is empty: half of it would be worse
// than none. The checksum is not verified, because it is computed from a dump of the kubelet's own types.
func ParseCheckpoint(text []byte) (Checkpoint, error) {
	var file struct {
		Data *struct {
			PodDeviceEntries []struct {
				PodUID, ContainerName, ResourceName string
				// DeviceIDs are by NUMA node, -1 for none. A device on two nodes is there twice.
				DeviceIDs *map[int64][]string
			}
			RegisteredDevices *map[string][]string
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return Checkpoint{}, fmt.Errorf("parse checkpoint: %w", err)
	}
	switch {
	case file.Data == nil:
		return Checkpoint{}, errors.New("parse checkpoint: it has no Data")
	case file.Data.RegisteredDevices == nil:
		return Checkpoint{}, errors.New("parse checkpoint: it has no RegisteredDevices")
	}
	checkpoint := Checkpoint{Registered: map[string][]string{}}
	for i, entry := range file.Data.PodDeviceEntries {
		if entry.PodUID == "" || entry.ContainerName == "" || entry.ResourceName == "" || entry.DeviceIDs == nil {
			return Checkpoint{}, fmt.Errorf(
				"parse checkpoint: PodDeviceEntries[%d] lacks a pod, container, resource or devices", i)
		}
		devices := slices.Concat(slices.Collect(maps.Values(*entry.DeviceIDs))...)
		slices.Sort(devices)
		checkpoint.Entries = append(checkpoint.Entries,
			Entry{entry.PodUID, entry.ContainerName, entry.ResourceName, slices.Compact(devices)})
	}
	for resource, ids := range *file.Data.RegisteredDevices {
		if len(ids) > 0 {
			slices.Sort(ids)
			checkpoint.Registered[resource] = slices.Compact(ids)
		}
	}
	return checkpoint, nil
}

// readCheckpoint tries twice, because the kubelet may replace the file, by renaming, while it is read.
func (s *Source) readCheckpoint() (Checkpoint, error) {
	if s.options.CheckpointDir == "" {
		return Checkpoint{}, errNoCheckpoint
	}
	path := filepath.Join(s.options.CheckpointDir, checkpointName)
	checkpoint, err := readCheckpointFile(path)
	if err != nil {
		checkpoint, err = readCheckpointFile(path)
	}
	return checkpoint, err
}

func readCheckpointFile(path string) (Checkpoint, error) {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxCheckpoint) {
		err = fmt.Errorf("checkpoint %s is no file of at most %d bytes", path, maxCheckpoint)
	}
	if err != nil {
		return Checkpoint{}, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return Checkpoint{}, err
	}
	checkpoint, err := ParseCheckpoint(text)
	if err != nil {
		return Checkpoint{}, fmt.Errorf("%s: %w", path, err)
	}
	return checkpoint, nil
}
