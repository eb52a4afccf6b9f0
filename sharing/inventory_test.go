package sharing

import (
	"encoding/json"
	"testing"
)

func TestParseDeviceID(t *testing.T) {
	const gpu = "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
	for _, test := range []struct {
		name    string
		id      string
		unit    string
		replica int
		shared  bool
	}{
		{"exclusive", gpu, gpu, 0, false},
		{"first replica", gpu + "::0", gpu, 0, true},
		{"later replica", gpu + "::17", gpu, 17, true},
		{"last mark counts", "a::1::2", "a::1", 2, true},
		{"no number", gpu + "::", gpu + "::", 0, false},
		{"no unit", "::1", "::1", 0, false},
		{"empty", "", "", 0, false},
		{"negative", "a::-1", "a::-1", 0, false},
		{"signed", "a::+1", "a::+1", 0, false},
		{"leading zero", "a::01", "a::01", 0, false},
		{"one colon", "a:1", "a:1", 0, false},
		{"text", "a::b", "a::b", 0, false},
		{"MPS", gpu + "::3of10", gpu, 3, true},
		{"MPS, not one of them", "a::10of10", "a::10of10", 0, false},
		{"MPS, of no number", "a::1of", "a::1of", 0, false},
		{"MPS, leading zero", "a::1of010", "a::1of010", 0, false},
		{"MPS, no replica", "a::of4", "a::of4", 0, false},
		{"too large", "a::99999999999999999999", "a::99999999999999999999", 0, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			unit, replica, shared := ParseDeviceID(test.id)
			if unit != test.unit || replica != test.replica || shared != test.shared {
				t.Errorf("ParseDeviceID(%q) = %q, %d, %v; want %q, %d, %v",
					test.id, unit, replica, shared, test.unit, test.replica, test.shared)
			}
		})
	}
}

func FuzzParseDeviceID(f *testing.F) {
	for _, id := range []string{"", "a", "a::0", "a::12", "::1", "a::01", "a::1::2", "a::-1", "a:::1", "a::1of2", "a::2of2", "a::1of2of3"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		unit, replica, shared := ParseDeviceID(id)
		if mode := ModeOf(id); (mode != Exclusive) != shared {
			t.Errorf("ModeOf(%q) = %v; shared is %t", id, mode, shared)
		}
		if !shared {
			if unit != id || replica != 0 {
				t.Errorf("ParseDeviceID(%q) = %q, %d, false; want the ID itself and 0", id, unit, replica)
			}
			return
		}
		if unit == "" || replica < 0 {
			t.Errorf("ParseDeviceID(%q) = %q, %d", id, unit, replica)
		}
		again := NewDeviceID(unit, replica)
		if shares := ModeOf(id).Shares; shares > 0 {
			again = NewMPSDeviceID(unit, replica, shares)
		}
		if again != id {
			t.Errorf("ParseDeviceID(%q) = %q, %d, which is written %q", id, unit, replica, again)
		}
	})
}

// TestHealthJSON checks that a GPU's health is written as its reason, and left out when it is healthy.
func TestHealthJSON(t *testing.T) {
	type gpu struct {
		Health Health `json:"fault,omitzero"`
	}
	for _, test := range []struct {
		health Health
		want   string
	}{
		{Health{}, `{}`},
		{Faulty("XID 79"), `{"fault":"XID 79"}`},
		{Faulty(""), `{"fault":"unknown fault"}`},
	} {
		data, err := json.Marshal(gpu{test.health})
		if err != nil || string(data) != test.want {
			t.Errorf("%+v is written as %s, want %s (%v)", test.health, data, test.want, err)
		}
		var back gpu
		if err := json.Unmarshal(data, &back); err != nil || back.Health != test.health {
			t.Errorf("%s is read as %+v, want %+v (%v)", data, back.Health, test.health, err)
		}
	}
}
