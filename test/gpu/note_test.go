package gpu

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// note leaves a finding in findings.jsonl, in $OUT.
func note(t *testing.T, what string, value any) {
	t.Helper()
	if duration, ok := value.(time.Duration); ok {
		value = duration.String()
	}
	line, err := json.Marshal(struct {
		Test  string `json:"test"`
		What  string `json:"what"`
		Value any    `json:"value"`
	}{t.Name(), what, value})
	must(t, err)
	t.Logf("%s", line)
	folder := os.Getenv("OUT")
	if folder == "" {
		return
	}
	file, err := os.OpenFile(filepath.Join(folder, "findings.jsonl"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	must(t, err)
	_, err = fmt.Fprintf(file, "%s\n", line)
	must(t, err)
	must(t, file.Close())
}

// TestCalls notes what the calls of a probe cost.
func TestCalls(t *testing.T) {
	program(t)
	lib := open(t)
	version, err := lib.SystemGetDriverVersion()
	must(t, err)
	note(t, "driver", version)
	gpu, err := lib.DeviceGetHandleByIndex(0)
	must(t, err)
	for name, call := range map[string]func(nvml.Device) error{
		"DeviceGetMemoryInfo":   func(d nvml.Device) error { _, err := lib.DeviceGetMemoryInfo(d); return err },
		"DeviceGetTemperature":  func(d nvml.Device) error { _, err := lib.DeviceGetTemperature(d); return err },
		"DeviceGetRemappedRows": func(d nvml.Device) error { _, err := lib.DeviceGetRemappedRows(d); return err },
		"DeviceGetUUID":         func(d nvml.Device) error { _, err := lib.DeviceGetUUID(d); return err },
	} {
		const times = 100
		start := time.Now()
		for range times {
			if err := call(gpu); err != nil {
				note(t, name, err.Error())
				break
			}
		}
		note(t, name+", each", time.Since(start)/times)
	}
}
