package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/virgate/virgate/plugin"
	"github.com/virgate/virgate/sharing"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestWriteThenLoad(t *testing.T) {
	dir := t.TempDir()
	file := NewFile(dir, discard())
	file.Load()
	for section, value := range map[string]string{"a": "1", "b": "2", "c": "x<&>\u2028"} {
		if err := file.Write(section, value); err != nil {
			t.Fatal(err)
		}
	}
	again := NewFile(dir, discard())
	again.Load()
	for section, want := range map[string]string{"a": "1", "b": "2", "c": "x<&>\u2028"} {
		var got string
		if ok, err := again.Read(section, &got); !ok || err != nil || got != want {
			t.Errorf("%s: %q, %t, %v", section, got, ok, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 1 {
		t.Errorf("files %v, want the state alone", left)
	}
}

func TestBadFilesAreSetAside(t *testing.T) {
	valid := func(t *testing.T) []byte {
		dir := t.TempDir()
		if err := NewFile(dir, discard()).Write("a", "value"); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(dir, Name))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	for _, test := range []struct {
		name string
		make func(t *testing.T) []byte
	}{
		{"empty", func(*testing.T) []byte { return nil }},
		{"torn", func(t *testing.T) []byte { return valid(t)[:40] }},
		{"a flipped byte", func(t *testing.T) []byte { return bytes.Replace(valid(t), []byte("value"), []byte("valuf"), 1) }},
		{"of a later version", func(t *testing.T) []byte {
			return bytes.Replace(valid(t), []byte(`"version":1`), []byte(`"version":2`), 1)
		}},
		{"foreign", func(*testing.T) []byte { return []byte(`{"Data":{"PodDeviceEntries":null},"Checksum":1}`) }},
		{"not JSON", func(*testing.T) []byte { return []byte("\x00\x01\x02") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, Name)
			if err := os.WriteFile(path, test.make(t), 0o600); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			file := NewFile(dir, slog.New(slog.NewTextHandler(&log, nil)))
			file.Load()
			if ok, err := file.Read("a", new(string)); ok || err != nil {
				t.Errorf("read %t, %v from a bad file", ok, err)
			}
			if _, err := os.Stat(path + ".bad"); err != nil {
				t.Errorf("not set aside: %v", err)
			}
			if !strings.Contains(log.String(), "level=WARN") {
				t.Errorf("no warning: %s", log.String())
			}
			if err := file.Write("a", "new"); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLoadWithoutFile(t *testing.T) {
	var log bytes.Buffer
	file := NewFile(filepath.Join(t.TempDir(), "missing"), slog.New(slog.NewTextHandler(&log, nil)))
	file.Load()
	if log.Len() > 0 {
		t.Errorf("logged: %s", log.String())
	}
	if err := file.Write("a", 1); err == nil {
		t.Error("written into a directory that is not there")
	}
}

func TestFailedWriteLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	// A directory in the file's place is what rename refuses, also for root.
	blocked := NewFile(dir, discard())
	blocked.path = filepath.Join(dir, "sub")
	if err := os.MkdirAll(filepath.Join(blocked.path, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := blocked.Write("a", "new"); err == nil {
		t.Error("a directory was replaced")
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestListsRoundTrip(t *testing.T) {
	dir := t.TempDir()
	since := time.Unix(1000, 0).UTC()
	device := func(id, unit string, numa int) sharing.Device {
		return sharing.Device{ID: id, Unit: unit, NUMANode: numa, Healthy: true}
	}
	lists := plugin.Lists{
		"nvidia.com/gpu": {Entries: []plugin.Entry{
			{Device: device("A::0", "A", 1), Index: "0", Phase: plugin.Offered},
			{Device: device("A::1", "A", 1), Index: "0", Phase: plugin.Closing, Since: since},
			{Device: sharing.Device{ID: "A::2", Unit: "A", NUMANode: 1}, Index: "0", Phase: plugin.Retiring, Since: since},
		}},
		"nvidia.com/old": {Dropped: since},
	}
	if err := (Lists{NewFile(dir, discard())}).Save(lists); err != nil {
		t.Fatal(err)
	}
	file := NewFile(dir, discard())
	file.Load()
	got, err := Lists{file}.Load()
	if err != nil {
		t.Fatal(err)
	}
	// What was retiring starts anew, as surplus that is not yet known to be free.
	want := plugin.Lists{
		"nvidia.com/gpu": {Entries: []plugin.Entry{
			lists["nvidia.com/gpu"].Entries[0],
			lists["nvidia.com/gpu"].Entries[1],
			{Device: sharing.Device{ID: "A::2", Unit: "A", NUMANode: 1}, Index: "0", Phase: plugin.Offered},
		}},
		"nvidia.com/old": {},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestListsOfAnotherShape(t *testing.T) {
	file := NewFile(t.TempDir(), discard())
	if err := file.Write(listsSection, "text"); err != nil {
		t.Fatal(err)
	}
	if _, err := (Lists{file}).Load(); err == nil {
		t.Error("read lists from text")
	}
}

func TestLockIsHeldByOne(t *testing.T) {
	dir := t.TempDir()
	first, err := Acquire(t.Context(), dir, func(error) { t.Error("waited for nobody") })
	if err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	acquired := make(chan error, 1)
	go func() {
		second, err := Acquire(t.Context(), dir, func(err error) { waiting <- err })
		if err == nil {
			err = second.Release()
		}
		acquired <- err
	}()
	if err := <-waiting; !errors.Is(err, ErrLocked) {
		t.Errorf("waits because of %v", err)
	}
	select {
	case err := <-acquired:
		t.Fatalf("two have the lock: %v", err)
	default:
	}
	if err := first.Release(); err != nil {
		t.Fatal(err)
	}
	if err := <-acquired; err != nil {
		t.Error(err)
	}
}

func TestLockSaysWhyItWaits(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, LockName), 0o700); err != nil { // No file can be opened there.
		t.Fatal(err)
	}
	reasons := make(chan error, 10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := Acquire(ctx, dir, func(err error) { reasons <- err })
		ended <- err
	}()
	if err := <-reasons; errors.Is(err, ErrLocked) {
		t.Errorf("waits because of %v", err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
	if len(reasons) > 0 {
		t.Errorf("the same reason again: %v", <-reasons)
	}
}

func TestLockWaitEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Acquire(ctx, filepath.Join(t.TempDir(), "missing"), func(error) {}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"checksum":0,"sections":{}}`))
	f.Add([]byte(`{"version":1,"checksum":3523407757,"sections":{"a":1}}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, data []byte) {
		sections, err := parse(data)
		if (err == nil) != (sections != nil) {
			t.Fatalf("sections %v with error %v", sections, err)
		}
		for name, raw := range sections {
			if !json.Valid(raw) {
				t.Errorf("section %q is not JSON", name)
			}
		}
	})
}
