package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/procfs"
)

// TestForgetStart maps the whole program first.
func TestForgetStart(t *testing.T) {
	segments, err := readOnlySegments()
	if err != nil {
		t.Fatal(err)
	}
	if len(segments) == 0 {
		t.Skip("this test is built as position-independent code, which is left as it is")
	}
	const populateRead = 22 // MADV_POPULATE_READ, Linux 5.14.
	for _, segment := range segments {
		if err := segment.advise(populateRead); err != nil {
			t.Skipf("this kernel cannot map all of a file at once: %v", err)
		}
	}
	before := fileResident(t)
	forgetStart()
	if after := fileResident(t); after >= before {
		t.Errorf("%d bytes of files are resident, before %d", after, before)
	}
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		return // This kernel knows small pages only.
	}
	mappings, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	for _, segment := range segments {
		_, mapping, _ := strings.Cut(string(mappings), fmt.Sprintf("%08x-%08x ", segment.first, segment.end))
		_, flags, _ := strings.Cut(mapping, "VmFlags:")
		if flags, _, _ := strings.Cut(flags, "\n"); !strings.Contains(flags, " nh") {
			t.Errorf("%x to %x may be mapped in large pages, flags%s", segment.first, segment.end, flags)
		}
	}
}

// fileResident is what this process has mapped of files, in bytes.
func fileResident(t *testing.T) uint64 {
	t.Helper()
	self, err := procfs.Self()
	if err != nil {
		t.Fatal(err)
	}
	status, err := self.NewStatus()
	if err != nil {
		t.Fatal(err)
	}
	return status.RssFile
}
