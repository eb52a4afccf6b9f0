package simnode

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/virgate/virgate/internal/nvml"
)

// How the simulated driver samples what processes do: a real one takes a sample
// every sixth of a second to a second, and keeps some.
const (
	samplePeriod = time.Second / 6
	samplesKept  = 256
)

// work is what processes do on a whole board. The Node's lock guards it.
type work struct {
	// percent is how busy each process keeps the board, by PID.
	percent map[int]int
	samples []nvml.ProcessSample
	// sampled is when the last sample was taken, in microseconds.
	sampled uint64
}

// Work lets a process, which is on the board already, keep so many percent of
// its multiprocessors busy from now on. Of processes on MIG devices a driver
// tells nothing, so they have no work.
func (n *Node) Work(gpu, pid, percent int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b, err := n.board(gpu)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(b.processes, func(p nvml.Process) bool { return p.PID == pid }) {
		return fmt.Errorf("GPU %d: process %d is not there", gpu, pid)
	}
	if percent < 0 || percent > 100 {
		return fmt.Errorf("GPU %d: %d is not in 0 to 100 percent", gpu, percent)
	}
	if b.work.percent == nil {
		b.work.percent = map[int]int{}
	}
	b.work.percent[pid] = percent
	return nil
}

// Sample lets the driver take a sample of the board's processes now.
func (n *Node) Sample(gpu int) error {
	return n.change(gpu, func(b *board) { b.work.take(max(now(), b.work.sampled+1)) })
}

// Throttle is why the board's clocks are lower than they could be from now on; 0
// for nothing.
func (n *Node) Throttle(gpu int, reasons nvml.ClockReasons) error {
	return n.change(gpu, func(b *board) { b.slowed = reasons })
}

// forget ends the process's work on the board, and the process itself when it
// is on no other one.
func (n *Node) forget(gpu, pid int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if b, err := n.board(gpu); err == nil {
		delete(b.work.percent, pid)
	}
	if !n.runs(pid) {
		delete(n.containers, pid)
	}
}

func now() uint64 { return uint64(time.Now().UnixMicro()) }

// take takes a sample, which has nothing of idle processes.
func (w *work) take(at uint64) {
	w.sampled = at
	for _, pid := range slices.Sorted(maps.Keys(w.percent)) {
		if percent := w.percent[pid]; percent > 0 {
			w.samples = append(w.samples, nvml.ProcessSample{PID: pid, Time: at, SM: percent})
		}
	}
	w.samples = w.samples[max(0, len(w.samples)-samplesKept):]
}

// since are the samples after the time, the one due now among them.
func (w *work) since(lastSeen uint64) []nvml.ProcessSample {
	if at := now(); at >= w.sampled+uint64(samplePeriod.Microseconds()) {
		w.take(at)
	}
	var news []nvml.ProcessSample
	for _, s := range w.samples {
		if s.Time > lastSeen {
			news = append(news, s)
		}
	}
	return news
}

// busy is how busy the board is, in percent.
func (w *work) busy() int {
	sum := 0
	for _, percent := range w.percent {
		sum += percent
	}
	return min(sum, 100)
}
