package state

import (
	"time"

	"github.com/virgate/virgate/sharing"
)

// healthSection is the section that Health keeps.
const healthSection = "health"

// Health keeps the fatal errors of units.
type Health struct{ File *File }

// storedHealth is a unit with fatal errors.
type storedHealth struct {
	GPU     string    `json:"gpu"`
	Unit    string    `json:"unit"`
	Reasons []string  `json:"reasons"`
	Since   time.Time `json:"since"`
	Boot    string    `json:"boot,omitempty"`
	Driver  string    `json:"driver,omitempty"`
}

// Load returns the fatal errors of the last run; none without a state file.
func (h Health) Load() ([]sharing.FatalHealth, error) {
	var stored []storedHealth
	if ok, err := h.File.Read(healthSection, &stored); !ok {
		return nil, err
	}
	var list []sharing.FatalHealth
	for _, s := range stored {
		list = append(list, sharing.FatalHealth(s))
	}
	return list, nil
}

// Save keeps the fatal errors and returns when they are on disk.
func (h Health) Save(list []sharing.FatalHealth) error {
	stored := make([]storedHealth, 0, len(list))
	for _, f := range list {
		stored = append(stored, storedHealth(f))
	}
	return h.File.Write(healthSection, stored)
}
