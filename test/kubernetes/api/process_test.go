package api

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of processor time in /proc (proc_pid_stat(5)); Linux has 100 a
// second on every platform that Go knows.
const tick = 10 * time.Millisecond

func (s *server) proc(file string) []byte {
	s.t.Helper()
	data, err := os.ReadFile("/proc/" + strconv.Itoa(s.process.Process.Pid) + "/" + file)
	s.must(err)
	return data
}

// cpu is the processor time that the server has used, of all its threads and the
// kernel on its behalf.
func (s *server) cpu() time.Duration {
	s.t.Helper()
	stat := s.proc("stat")
	// The second field, a name in parentheses, may hold spaces.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const user, system = 14 - 3, 15 - 3 // numbered as in the manual, from the third field
	total := time.Duration(0)
	for _, field := range []int{user, system} {
		ticks, err := strconv.Atoi(fields[field])
		s.must(err)
		total += time.Duration(ticks) * tick
	}
	return total
}

// memory is what the server has in use right after a garbage collection.
type memory struct {
	// resident and heap are bytes.
	resident, heap float64
	goroutines     float64
}

func (s *server) memory() memory {
	s.t.Helper()
	_, err := s.admin.RESTClient().Get().AbsPath("/debug/pprof/heap").Param("gc", "1").DoRaw(s.t.Context())
	s.must(err)
	m := memory{heap: s.metric("go_memstats_heap_alloc_bytes"), goroutines: s.metric("go_goroutines")}
	for line := range strings.Lines(string(s.proc("status"))) {
		if fields := strings.Fields(line); fields[0] == "VmRSS:" {
			kibibytes, err := strconv.ParseFloat(fields[1], 64)
			s.must(err)
			m.resident = kibibytes * 1024
		}
	}
	return m
}

// metric is the sum of the server's series of that name.
func (s *server) metric(name string) float64 {
	s.t.Helper()
	exposition, err := s.admin.RESTClient().Get().AbsPath("/metrics").DoRaw(s.t.Context())
	s.must(err)
	sum := 0.0
	for line := range strings.Lines(string(exposition)) {
		if rest, ok := strings.CutPrefix(line, name); ok && strings.ContainsAny(rest[:1], "{ ") {
			value, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
			s.must(err)
			sum += value
		}
	}
	return sum
}
