package main

import (
	"debug/elf"
	"os"
	"syscall"
)

// executable is the file of this process.
const executable = "/proc/self/exe"

// forgetStart has the kernel unmap the program's file, and map what runs from then
// on as it is touched, in small pages where it can: a third of what the start
// leaves resident is code that is not run again. It stays in the kernel's cache. It
// never fails; where it cannot be done, the file stays mapped.
//
// Only the segments are unmapped that nothing writes to; a breakpoint that a
// debugger has written there is lost.
func forgetStart() {
	segments, err := readOnlySegments()
	if err != nil {
		return
	}
	for _, segment := range segments {
		_ = segment.advise(syscall.MADV_NOHUGEPAGE)
		_ = segment.advise(syscall.MADV_DONTNEED)
	}
}

// segment is a part of this process's memory, in whole pages: the addresses of its
// first byte and of the one after its last.
type segment struct{ first, end uint64 }

// readOnlySegments are the parts of the program's file that are mapped as they are
// in the file; none where they may be elsewhere than the file says.
func readOnlySegments() ([]segment, error) {
	file, err := elf.Open(executable)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	if file.Type != elf.ET_EXEC {
		return nil, nil
	}
	var segments []segment
	page := uint64(os.Getpagesize())
	for _, header := range file.Progs {
		if header.Type == elf.PT_LOAD && header.Flags&elf.PF_W == 0 {
			end := header.Vaddr + header.Memsz
			segments = append(segments, segment{header.Vaddr / page * page, (end + page - 1) / page * page})
		}
	}
	return segments, nil
}

// advise is madvise(2).
func (s segment) advise(advice uintptr) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_MADVISE, uintptr(s.first), uintptr(s.end-s.first), advice); errno != 0 {
		return errno
	}
	return nil
}
