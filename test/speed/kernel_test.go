package main

import "testing"

func TestKibibytes(t *testing.T) {
	const status = "Name:\tvirgate\nVmRSS:\t   36384 kB\nRssAnon:\t    5472 kB\n"
	for field, want := range map[string]uint64{"VmRSS": 36384 << 10, "RssAnon": 5472 << 10} {
		if got, err := kibibytes(status, field); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", field, got, err, want)
		}
	}
	if _, err := kibibytes(status, "VmHWM"); err == nil {
		t.Error("a field that is not there is read")
	}
}
