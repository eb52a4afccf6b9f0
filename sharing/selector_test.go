package sharing

import (
	"strings"
	"testing"
)

const (
	testUUID  = "4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"
	otherUUID = "b1028956-cfa2-0990-bf4a-5da9abb51763"
)

func TestParseSelector(t *testing.T) {
	for _, test := range []struct{ name, s, want string }{
		{"GPU index", "0", "0"},
		{"large GPU index", "15", "15"},
		{"GPU UUID", "GPU-" + testUUID, "GPU-" + testUUID},
		{"GPU UUID in upper case", "GPU-" + strings.ToUpper(testUUID), "GPU-" + testUUID},
		{"MIG index", "2:10", "2:10"},
		{"MIG UUID", "MIG-" + testUUID, "MIG-" + testUUID},
		{"old MIG UUID", "MIG-GPU-" + testUUID + "/3/0", "MIG-GPU-" + testUUID + "/3/0"},
		{"old MIG UUID in upper case", "MIG-GPU-" + strings.ToUpper(testUUID) + "/3/0", "MIG-GPU-" + testUUID + "/3/0"},
		{"bus ID as NVML prints it", "00000000:3B:00.0", "00000000:3B:00.0"},
		{"bus ID in lower case", "00000000:3b:00.0", "00000000:3B:00.0"},
		{"bus ID as lspci prints it", "0000:3b:00.0", "00000000:3B:00.0"},
		{"bus ID in another domain", "0001:3b:00.0", "00000001:3B:00.0"},
		{"bus ID of digits only", "1234:56:00.0", "00001234:56:00.0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := ParseSelector(test.s)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != test.want {
				t.Errorf("ParseSelector(%q) = %q, want %q", test.s, got, test.want)
			}
			normal, err := ParseSelector(test.want)
			if err != nil || normal != got {
				t.Errorf("ParseSelector(%q) = %#v, %v; want it equal to %#v", test.want, normal, err, got)
			}
		})
	}
}

func TestParseSelectorRefuses(t *testing.T) {
	for _, s := range []string{
		"", "all", "-1", "+1", "01", "1.0", " 1", "0x1", "99999999999999999999",
		":", "0:", ":1", "0:1:2", "0:01", "0:-1", "00:1",
		"GPU-", "GPU-" + testUUID[1:], "GPU-" + testUUID + "0", "gpu-" + testUUID, testUUID,
		"GPU-" + strings.ReplaceAll(testUUID, "-", ""), "GPU-" + strings.Replace(testUUID, "4", "g", 1),
		"MIG-", "MIG-GPU-" + testUUID, "MIG-GPU-" + testUUID + "/1", "MIG-GPU-" + testUUID + "/1/",
		"MIG-GPU-" + testUUID + "/1/2/3", "MIG-" + testUUID + "/1/2", "MIG-GPU-" + testUUID + "/a/0",
		"3B:00.0", "000:3B:00.0", "00000:3B:00.0", "0000:3B:00:0", "0000:3G:00.0", "0000:3B:00.00",
	} {
		t.Run(s, func(t *testing.T) {
			got, err := ParseSelector(s)
			if err == nil {
				t.Fatalf("ParseSelector(%q) = %q, want an error", s, got)
			}
			if got != (Selector{}) {
				t.Errorf("ParseSelector(%q) = %#v beside an error", s, got)
			}
		})
	}
}

func TestSelectorMatch(t *testing.T) {
	first := Partition{UUID: "MIG-" + otherUUID, Index: 0, GI: 7, CI: 0}
	second := Partition{UUID: "MIG-" + testUUID, Index: 1, GI: 8, CI: 2}
	gpu := GPU{
		UUID: "GPU-" + testUUID, Index: 3, PCIBusID: "00000000:3B:00.0",
		MIG: true, Partitions: []Partition{first, second},
	}
	for _, test := range []struct {
		name, selector      string
		gpu, first, second2 bool
	}{
		{"GPU index", "3", true, true, true},
		{"other GPU index", "1", false, false, false},
		{"GPU UUID", "GPU-" + testUUID, true, true, true},
		{"GPU UUID in upper case", "GPU-" + strings.ToUpper(testUUID), true, true, true},
		{"other GPU UUID", "GPU-" + otherUUID, false, false, false},
		{"bus ID", "00000000:3b:00.0", true, true, true},
		{"short bus ID", "0000:3B:00.0", true, true, true},
		{"other slot", "0000:3C:00.0", false, false, false},
		{"other domain", "00010000:3B:00.0", false, false, false},
		{"MIG index", "3:1", false, false, true},
		{"MIG index on another GPU", "1:1", false, false, false},
		{"MIG UUID", "MIG-" + testUUID, false, false, true},
		{"old MIG UUID", "MIG-GPU-" + testUUID + "/8/2", false, false, true},
		{"old MIG UUID, other compute instance", "MIG-GPU-" + testUUID + "/8/0", false, false, false},
		{"old MIG UUID, other GPU instance", "MIG-GPU-" + testUUID + "/9/2", false, false, false},
		{"old MIG UUID, other GPU", "MIG-GPU-" + otherUUID + "/8/2", false, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			selector := selectors(t, test.selector)[0]
			if got := selector.MatchGPU(gpu); got != test.gpu {
				t.Errorf("MatchGPU = %v, want %v", got, test.gpu)
			}
			if got := selector.MatchPartition(gpu, first); got != test.first {
				t.Errorf("MatchPartition(first) = %v, want %v", got, test.first)
			}
			if got := selector.MatchPartition(gpu, second); got != test.second2 {
				t.Errorf("MatchPartition(second) = %v, want %v", got, test.second2)
			}
		})
	}
}

func TestZeroSelector(t *testing.T) {
	var none Selector
	if none.MatchGPU(GPU{}) || none.MatchPartition(GPU{}, Partition{}) {
		t.Error("the zero selector selects something")
	}
	if s := none.String(); s != "" {
		t.Errorf("String() = %q, want nothing", s)
	}
}

// A GPU with an unknown bus ID is not in slot "".
func TestSelectorUnknownBusID(t *testing.T) {
	if selectors(t, "0000:3B:00.0")[0].MatchGPU(GPU{}) {
		t.Error("a bus ID matches a GPU without one")
	}
}

func FuzzParseSelector(f *testing.F) {
	for _, s := range []string{
		"", "0", "0:1", "00:1", "GPU-" + testUUID, "MIG-" + testUUID, "MIG-GPU-" + testUUID + "/1/2",
		"00000000:3B:00.0", "0000:3b:00.0", "1234:56:00.0",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		selector, err := ParseSelector(s)
		if err != nil {
			if selector != (Selector{}) {
				t.Errorf("ParseSelector(%q) = %#v beside an error", s, selector)
			}
			return
		}
		normal := selector.String()
		again, err := ParseSelector(normal)
		if err != nil || again != selector {
			t.Errorf("ParseSelector(%q) = %#v; written %q, it reads as %#v, %v", s, selector, normal, again, err)
		}
		if again.String() != normal {
			t.Errorf("%q is written %q", normal, again)
		}
		if !strings.Contains(s, ":") && !strings.EqualFold(s, normal) {
			t.Errorf("ParseSelector(%q) means %q", s, normal)
		}
	})
}

// selectors parses selectors that are known to be valid.
func selectors(t testing.TB, texts ...string) []Selector {
	t.Helper()
	list := make([]Selector, 0, len(texts))
	for _, text := range texts {
		selector, err := ParseSelector(text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, selector)
	}
	return list
}
