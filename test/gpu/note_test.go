package gpu

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// note writes a finding about a GPU, or about the machine, to findings.jsonl in $OUT.
func note(t *testing.T, of, what string, value any) {
	t.Helper()
	if duration, ok := value.(time.Duration); ok {
		value = duration.String()
	}
	line, err := json.Marshal(finding{t.Name(), of, what, value})
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

// elapsed measures the driver's times for notes.
func elapsed(began time.Time) time.Duration {
	return time.Since(began) //nolint:forbidigo // measured to be noted, not judged
}

type finding struct {
	Test  string `json:"test"`
	Of    string `json:"of,omitempty"`
	What  string `json:"what"`
	Value any    `json:"value"`
}

// TestTimes notes the cost of a session with the driver and of a probe's calls, with deadlines and without.
// machine.txt says whether the persistence daemon runs.
func TestTimes(t *testing.T) {
	program(t)
	for _, when := range []string{"first", "second"} {
		start := time.Now()
		lib := bare(t)
		note(t, "", when+" Init", elapsed(start))
		start = time.Now()
		_, err := lib.DeviceGetHandleByIndex(0)
		note(t, "", when+" lookup of GPU 0", answer(elapsed(start).String(), err))
		start = time.Now()
		must(t, lib.Shutdown())
		note(t, "", when+" Shutdown", elapsed(start))
	}
	lib := bare(t)
	defer func() { must(t, lib.Shutdown()) }()
	version, err := lib.SystemGetDriverVersion()
	must(t, err)
	note(t, "", "driver", version)
	for how, lib := range map[string]nvml.Library{"without deadlines": lib, "with deadlines": nvml.WithDeadlines(lib, nvml.Limits{})} {
		gpu, err := lib.DeviceGetHandleByIndex(0)
		must(t, err)
		for name, call := range map[string]func(nvml.Device) error{
			"DeviceGetMemoryInfo":   func(d nvml.Device) error { _, err := lib.DeviceGetMemoryInfo(d); return err },
			"DeviceGetTemperature":  func(d nvml.Device) error { _, err := lib.DeviceGetTemperature(d); return err },
			"DeviceGetFieldValues":  func(d nvml.Device) error { _, err := lib.DeviceGetFieldValues(d, nvml.RecoveryAction); return err },
			"DeviceGetRemappedRows": func(d nvml.Device) error { _, err := lib.DeviceGetRemappedRows(d); return err },
			"DeviceGetUUID":         func(d nvml.Device) error { _, err := lib.DeviceGetUUID(d); return err },
		} {
			const times = 100
			start := time.Now()
			for range times {
				err = errors.Join(err, call(gpu))
			}
			each := elapsed(start) / times
			note(t, "GPU 0", "time of "+name+" "+how, answer(each.String(), err))
			err = nil
		}
	}
}
