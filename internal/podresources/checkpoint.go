package podresources

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// checkpointName is the file's name (pkg/kubelet/cm/devicemanager/manager.go,
// Kubernetes 1.36).
const checkpointName = "kubelet_internal_checkpoint"

// maxCheckpoint is the largest file read, in bytes. 56,000 devices make 2.8 MB.
const maxCheckpoint = 64 << 20

// Checkpoint is the device manager's memory on disk.
type Checkpoint struct {
	// Entries are what containers hold, in the file's order.
	Entries []Entry
	// Registered are the healthy devices by resource, sorted, each once, at the
	// time of the last write. A resource without any is not in the map.
	Registered map[string][]string
}

// Entry is what one container holds of one resource.
type Entry struct {
	PodUID, Container, Resource string
	// Devices are the held IDs, sorted, each once; nil for none.
	Devices []string
}

// ParseCheckpoint reads the text of a checkpoint file. The format is internal
// to the kubelet and has no version; this is the one of Kubernetes 1.20 to 1.36
// (pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go). Keys it does not
// know are passed over. Where one that it needs is missing or has another shape
// the error says so and the Checkpoint is empty: half of it would be worse than
// none. The checksum is not checked, for it hashes a dump of the kubelet's own
// types.
func ParseCheckpoint(text []byte) (Checkpoint, error) {
	var file struct {
		Data *struct {
			PodDeviceEntries []struct {
				PodUID, ContainerName, ResourceName string
				// DeviceIDs are by NUMA node, -1 for none; one on two nodes is
				// there twice.
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
			return Checkpoint{}, fmt.Errorf("parse checkpoint: PodDeviceEntries[%d] lacks a pod, container, resource or devices", i)
		}
		checkpoint.Entries = append(checkpoint.Entries, Entry{
			PodUID:    entry.PodUID,
			Container: entry.ContainerName,
			Resource:  entry.ResourceName,
			Devices:   sortedUnion(*entry.DeviceIDs),
		})
	}
	for resource, ids := range *file.Data.RegisteredDevices {
		if len(ids) > 0 {
			slices.Sort(ids)
			checkpoint.Registered[resource] = slices.Compact(ids)
		}
	}
	return checkpoint, nil
}

// readCheckpoint tries twice: the kubelet replaces the file by renaming, and
// may do so between two steps here.
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
	file, err := os.Open(path)
	if err != nil {
		return Checkpoint{}, err
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, maxCheckpoint+1))
	if err != nil {
		return Checkpoint{}, err
	}
	if len(text) > maxCheckpoint {
		return Checkpoint{}, fmt.Errorf("checkpoint %s has more than %d bytes", path, maxCheckpoint)
	}
	checkpoint, err := ParseCheckpoint(text)
	if err != nil {
		return Checkpoint{}, fmt.Errorf("%s: %w", path, err)
	}
	return checkpoint, nil
}
