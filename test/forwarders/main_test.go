package main

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestForwarders checks that internal/nvml/forwarders.go is what library.go makes of it.
func TestForwarders(t *testing.T) {
	want, err := forwarders("../../internal/nvml/library.go")
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../internal/nvml/forwarders.go")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("go generate ./internal/nvml writes it (-want +got):\n%s", diff)
	}
}
