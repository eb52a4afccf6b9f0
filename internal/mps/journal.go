package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/virgate/virgate/sharing"
)

// journal records, by UUID, the compute modes that GPUs had before their daemons were started. It
// is kept in a file so that the modes are restored after a kill too. The file is in a tmpfs,
// because no compute mode outlasts a reboot either.
type journal struct {
	path string

	mu     sync.Mutex
	before map[string]sharing.ComputeMode
}

func openJournal(root string) (*journal, error) {
	j := &journal{path: filepath.Join(root, "compute-modes.json"), before: map[string]sharing.ComputeMode{}}
	data, err := os.ReadFile(j.path)
	if errors.Is(err, os.ErrNotExist) {
		return j, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &j.before)
	}
	if err != nil {
		return nil, fmt.Errorf("read the compute modes to restore: %s: %w", j.path, err)
	}
	return j, nil
}

// gpus returns the modes to restore, by GPU.
func (j *journal) gpus() map[string]sharing.ComputeMode {
	j.mu.Lock()
	defer j.mu.Unlock()
	return maps.Clone(j.before)
}

// keep records the GPU's mode, unless an earlier start recorded one.
func (j *journal) keep(gpu string, mode sharing.ComputeMode) error {
	return j.change(gpu, func(before map[string]sharing.ComputeMode) {
		if before[gpu] == "" {
			before[gpu] = mode
		}
	})
}

func (j *journal) forget(gpu string) error {
	return j.change(gpu, func(before map[string]sharing.ComputeMode) { delete(before, gpu) })
}

// change writes the file first and then updates the map, so that the two never disagree.
func (j *journal) change(gpu string, change func(map[string]sharing.ComputeMode)) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	next := maps.Clone(j.before)
	change(next)
	if maps.Equal(next, j.before) {
		return nil
	}
	data, err := json.Marshal(next)
	if err == nil {
		err = os.WriteFile(j.path+".next", data, 0o600)
	}
	if err == nil {
		err = os.Rename(j.path+".next", j.path)
	}
	if err != nil {
		return fmt.Errorf("keep the compute mode of %s: %w", gpu, err)
	}
	j.before = next
	return nil
}
