package podresources

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// kubeletText has the shape that Kubernetes 1.36.3 writes.
const kubeletText = `{"Data":{"PodDeviceEntries":[` +
	`{"PodUID":"u1","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{"1":["b","a"],"0":["a"],"-1":["x"]},"AllocResp":"CgA="},` +
	`{"PodUID":"u2","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{},"AllocResp":""}` +
	`],"RegisteredDevices":{"nvidia.com/gpu":["b","a","b"],"nvidia.com/old":[]}},"Checksum":2840165293}`

func TestParseCheckpoint(t *testing.T) {
	entry := func(change string) string {
		return `{"Data":{"PodDeviceEntries":[` + change + `],"RegisteredDevices":{}}}`
	}
	for _, row := range []struct {
		name, text string
		want       Checkpoint
		err        string
	}{
		{name: "kubelet's", text: kubeletText, want: Checkpoint{
			Entries: []Entry{
				{PodUID: "u1", Container: "c", Resource: "nvidia.com/gpu", Devices: []string{"a", "b", "x"}},
				{PodUID: "u2", Container: "c", Resource: "nvidia.com/gpu"},
			},
			Registered: map[string][]string{"nvidia.com/gpu": {"a", "b"}},
		}},
		{
			name: "no pods, keys to come", text: `{"Version":2,"Data":{"PodDeviceEntries":null,"RegisteredDevices":{},"More":[1]}}`,
			want: Checkpoint{Registered: map[string][]string{}},
		},
		{name: "empty", text: "", err: "parse checkpoint: unexpected end"},
		{name: "cut off", text: kubeletText[:len(kubeletText)/2], err: "parse checkpoint: unexpected end"},
		{name: "two documents", text: kubeletText + kubeletText, err: "after top-level value"},
		{name: "null", text: "null", err: "no Data"},
		{name: "no data", text: `{"Checksum":1}`, err: "no Data"},
		{name: "no registered devices", text: `{"Data":{"PodDeviceEntries":null}}`, err: "no RegisteredDevices"},
		{name: "devices as before 1.20", text: entry(`{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":["a"]}`), err: "DeviceIDs"},
		{name: "node is no number", text: entry(`{"PodUID":"u","ContainerName":"c","ResourceName":"r","DeviceIDs":{"x":["a"]}}`), err: "DeviceIDs"},
		{name: "no devices", text: entry(`{"PodUID":"u","ContainerName":"c","ResourceName":"r"}`), err: "PodDeviceEntries[0] lacks"},
		{name: "no pod", text: entry(`{"ContainerName":"c","ResourceName":"r","DeviceIDs":{}}`), err: "PodDeviceEntries[0] lacks"},
		{name: "no container", text: entry(`{"PodUID":"u","ResourceName":"r","DeviceIDs":{}}`), err: "PodDeviceEntries[0] lacks"},
		{name: "no resource", text: entry(`{"PodUID":"u","ContainerName":"c","DeviceIDs":{}}`), err: "PodDeviceEntries[0] lacks"},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := ParseCheckpoint([]byte(row.text))
			if row.err != "" {
				if err == nil || !strings.Contains(err.Error(), row.err) {
					t.Errorf("got %v, want %q", err, row.err)
				}
			} else if err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzParseCheckpoint(f *testing.F) {
	f.Add([]byte(kubeletText))
	f.Add([]byte(`{"data":{"RegisteredDevices":{"r":null}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		checkpoint, err := ParseCheckpoint(text)
		if err != nil {
			if checkpoint.Entries != nil || checkpoint.Registered != nil {
				t.Errorf("half of a checkpoint: %+v", checkpoint)
			}
			return
		}
		if !json.Valid(text) {
			t.Error("accepted what is no JSON")
		}
		for _, entry := range checkpoint.Entries {
			if entry.PodUID == "" || entry.Container == "" || entry.Resource == "" || !strictlySorted(entry.Devices) {
				t.Errorf("entry %+v", entry)
			}
		}
		for resource, ids := range checkpoint.Registered {
			if len(ids) == 0 || !strictlySorted(ids) {
				t.Errorf("%s: %q", resource, ids)
			}
		}
	})
}

func strictlySorted(ids []string) bool {
	return slices.Equal(ids, slices.Compact(slices.Sorted(slices.Values(ids))))
}
