package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/simkubelet"
	"github.com/virgate/virgate/test/nvmltest"
)

// changes measures the time from a cause outside the program until the kubelet has the list that
// follows from it.
func changes(ctx context.Context, b bench) ([]figure, error) {
	return ofSizes(ctx, b, "changes", changesOf)
}

// ofSizes returns the figures for each number of devices.
func ofSizes(ctx context.Context, b bench, what string, of func(ctx context.Context, b bench, devices int) ([]figure, error)) ([]figure, error) {
	var figures []figure
	for _, devices := range sizes {
		found, err := of(ctx, b, devices)
		if err != nil {
			return nil, fmt.Errorf("%s with %d devices: %w", what, devices, err)
		}
		figures = append(figures, found...)
	}
	return figures, nil
}

func changesOf(ctx context.Context, b bench, devices int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.share(devices); err != nil {
		return nil, err
	}
	p, err := s.run(ctx, s.configured()...)
	if err != nil {
		return nil, err
	}
	if err := s.shows(ctx, devices); err != nil {
		return nil, err
	}
	switched, err := s.switches(ctx, b.rounds(8), devices)
	if err != nil {
		return nil, err
	}
	last := devices + b.rounds(8)*gpus
	failed, err := s.failures(ctx, last)
	if err != nil {
		return nil, err
	}
	kept, err := footprint(p)
	if err != nil {
		return nil, err
	}
	return prefixed(fmt.Sprintf("change/%d", devices), append([]figure{
		{"profile", milliseconds(switched.median()), "ms"},
		{"health", milliseconds(failed.median()), "ms"},
	}, kept...)), p.stop()
}

// settle is longer than the time within which lists are merged into one.
const settle = 300 * time.Millisecond

func pause(ctx context.Context, length time.Duration) error {
	select {
	case <-time.After(length):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// switches measures profiles that each have one replica more: a list that shrinks would wait for
// the removal delay.
func (s *stage) switches(ctx context.Context, times, devices int) (sample, error) {
	var took sample
	for range times {
		devices += gpus
		if err := pause(ctx, settle); err != nil {
			return nil, err
		}
		if err := took.timed(func() error {
			if err := s.share(devices); err != nil {
				return err
			}
			return s.shows(ctx, devices)
		}); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// failures measures GPUs that report a fatal error, one after the other.
func (s *stage) failures(ctx context.Context, devices int) (sample, error) {
	var took sample
	for gpu := range gpus - 1 {
		if err := pause(ctx, settle); err != nil {
			return nil, err
		}
		if err := took.timed(func() error {
			if err := nvmltest.Post(ctx, s.path("control.sock"), "xid", url.Values{"gpu": {strconv.Itoa(gpu)}, "code": {"79"}}); err != nil {
				return err
			}
			return s.shows(ctx, devices-(gpu+1)*devices/gpus)
		}); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// looks measures scrapes of the metrics.
func looks(_ context.Context, b bench, virgate *process, _ plugin) ([]figure, error) {
	var scraped sample
	var objects counts
	for range b.rounds(15) {
		if err := scraped.timed(func() error { _, err := virgate.get("/metrics"); return err }); err != nil {
			return nil, err
		}
		// Between two scrapes the program has made the objects of one scrape.
		if err := objects.counted(virgate, func() error { return nil }); err != nil {
			return nil, err
		}
	}
	return []figure{
		{"scrape", milliseconds(scraped.median()), "ms"},
		{"scrape-objects", objects.median(), ""},
	}, nil
}

// atRest is the time after which everything that follows the start is over, such as the second
// scrape and the first writes to the Node.
const atRest = 10 * time.Second

// rest measures a program that has everything turned on (it watches and writes to the API server,
// its metrics are scraped, its page is shown) and then has nothing to do.
func rest(ctx context.Context, b bench) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.unpack(); err != nil {
		return nil, err
	}
	const devices = 80
	p, end, err := s.runWithAPI(ctx, devices)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := s.shows(ctx, devices); err != nil {
		return nil, err
	}
	for _, path := range []string{"/metrics", "/status", "/metrics", "/status"} {
		if _, err := p.get(path); err != nil {
			return nil, err
		}
	}
	if err := pause(ctx, atRest); err != nil {
		return nil, err
	}
	before, err := p.work()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := pause(ctx, time.Duration(b.rounds(20))*time.Second); err != nil {
		return nil, err
	}
	after, err := p.work()
	if err != nil {
		return nil, err
	}
	seconds := time.Since(began).Seconds()
	kept, err := footprint(p)
	if err != nil {
		return nil, err
	}
	if err := p.stop(); err != nil {
		return nil, fmt.Errorf("rest: %w", err)
	}
	return prefixed("rest", append([]figure{
		{"cpu", milliseconds(after.cpu-before.cpu) / seconds, "ms/s"},
		{"wakes", float64(after.wakes-before.wakes) / seconds, "/s"},
	}, kept...)), nil
}

// runWithAPI starts virgate with a profile for that many devices from an API server. end stops the
// API server.
func (s *stage) runWithAPI(ctx context.Context, devices int) (p *process, end func(), err error) {
	api, err := newAPIServer(map[string]string{"shared": string(profile(devices))})
	if err != nil {
		return nil, nil, err
	}
	end = func() {
		api.CloseClientConnections()
		api.Close()
	}
	if err := api.kubeconfig(s.path("kubeconfig")); err != nil {
		end()
		return nil, nil, err
	}
	p, err = s.run(ctx, "--kubeconfig", s.path("kubeconfig"), "--node-name", nodeName, "--config-map", namespace+"/"+configMapName)
	if err != nil {
		end()
		return nil, nil, err
	}
	return p, end, nil
}

// startup measures the time from before the process is created until the kubelet has the list,
// beside a process of the same binary that only prints its version. The two alternate.
func startup(ctx context.Context, b bench) ([]figure, error) {
	return ofSizes(ctx, b, "start", startupOf)
}

func startupOf(ctx context.Context, b bench, devices int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := s.share(devices); err != nil {
		return nil, err
	}
	var bare, bareWork, advertised, work, kubelet sample
	var objects, goroutines, own, all counts
	for range b.rounds(10) {
		version := exec.CommandContext(ctx, b.binary, "version")
		if err := bare.timed(version.Run); err != nil {
			return nil, err
		}
		bareWork = append(bareWork, version.ProcessState.UserTime()+version.ProcessState.SystemTime())
		runtime.GC() // Keeps this process's garbage out of the measurement.
		before, err := ownWork()
		if err != nil {
			return nil, err
		}
		var p *process
		if err := advertised.timed(func() error {
			if p, err = s.run(ctx, s.configured()...); err != nil {
				return err
			}
			return s.shows(ctx, devices)
		}); err != nil {
			return nil, err
		}
		after, err := ownWork()
		if err != nil {
			return nil, err
		}
		kubelet = append(kubelet, after-before)
		done, err := p.work()
		if err != nil {
			return nil, err
		}
		work = append(work, done.cpu)
		resident, err := p.memory()
		if err != nil {
			return nil, err
		}
		own, all = append(own, megabytes(resident.own)), append(all, megabytes(resident.all))
		made, err := p.series("go_memstats_mallocs_total")
		if err != nil {
			return nil, err
		}
		running, err := p.series("go_goroutines")
		if err != nil {
			return nil, err
		}
		objects, goroutines = append(objects, made), append(goroutines, running)
		if err := p.stop(); err != nil {
			return nil, err
		}
		if err := s.forget(ctx); err != nil {
			return nil, err
		}
	}
	name := func(what string) string { return fmt.Sprintf("start/%d/%s", devices, what) }
	return []figure{
		{name("process"), milliseconds(bare.median()), "ms"},
		{name("advertised"), milliseconds(advertised.median()), "ms"},
		{name("over-process"), milliseconds(advertised.median() - bare.median()), "ms"},
		{name("least-over-process"), milliseconds(advertised.quantile(0) - bare.quantile(0)), "ms"},
		{name("kubelet-cpu"), milliseconds(kubelet.median()), "ms"},
		{name("processes"), advertised.over(bare), "×"},
		{name("cpu"), milliseconds(work.median() - bareWork.median()), "ms"},
		{name("objects"), objects.median(), ""},
		{name("goroutines"), goroutines.median(), ""},
		{name("own"), own.median(), "MB"},
		{name("resident"), all.median(), "MB"},
	}, nil
}

// replicas is the number of devices of a GPU in a succession.
const replicas = 4

// succession measures how long the kubelet is without devices when one virgate takes over from
// another, as in a rollout: from the end of the first stream to the last resource's list. The new
// one stands by before that.
func succession(ctx context.Context, b bench) ([]figure, error) {
	var figures []figure
	for _, resources := range []int{1, gpus} {
		found, err := successionOf(ctx, b, resources)
		if err != nil {
			return nil, fmt.Errorf("succession with %d resources: %w", resources, err)
		}
		figures = append(figures, found...)
	}
	return figures, nil
}

func successionOf(ctx context.Context, b bench, resources int) ([]figure, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	if err := os.WriteFile(s.path("profile.yaml"), named(resources), 0o600); err != nil {
		return nil, fmt.Errorf("write the profile: %w", err)
	}
	serving, err := s.alone(ctx)
	if err != nil {
		return nil, err
	}
	var without, ended sample
	for range b.rounds(20) {
		if err := s.await(ctx, func(k simkubelet.Snapshot) bool { return allocatable(k) == gpus*replicas }); err != nil {
			return nil, err
		}
		next, err := s.alone(ctx)
		if err != nil {
			return nil, err
		}
		if err := next.standsBy(ctx); err != nil {
			return nil, err
		}
		stopped := make(chan error, 1)
		began := time.Now()
		go func() { stopped <- serving.stop() }()
		if err := s.await(ctx, func(k simkubelet.Snapshot) bool { return allocatable(k) < gpus*replicas }); err != nil {
			return nil, err
		}
		lost := time.Now()
		if err := s.await(ctx, func(k simkubelet.Snapshot) bool { return allocatable(k) == gpus*replicas }); err != nil {
			return nil, err
		}
		without = append(without, time.Since(lost))
		if err := <-stopped; err != nil {
			return nil, err
		}
		ended = append(ended, lost.Sub(began))
		serving = next
	}
	name := func(what string) string { return fmt.Sprintf("succession/%d/%s", resources, what) }
	return []figure{
		{name("until-lost"), milliseconds(ended.median()), "ms"},
		{name("without-least"), milliseconds(without.quantile(0)), "ms"},
		{name("without"), milliseconds(without.median()), "ms"},
		{name("without-most"), milliseconds(without.quantile(1)), "ms"},
	}, serving.stop()
}

// named offers all GPUs under one name, or each under its own.
func named(resources int) []byte {
	text := "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
	if resources == 1 {
		return fmt.Appendf(nil, text+"    - {name: %s, replicas: %d}\n", resource, replicas)
	}
	var entries strings.Builder
	for i := range gpus {
		fmt.Fprintf(&entries, "    - {name: %s, devices: [%d], replicas: %d, rename: nvidia.com/GPU-%d}\n", resource, i, replicas, i)
	}
	return []byte(text + entries.String())
}

func (s *stage) await(ctx context.Context, condition func(simkubelet.Snapshot) bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return s.kubelet.Await(ctx, condition)
}

// allocatable counts the healthy devices of all resources.
func allocatable(k simkubelet.Snapshot) int {
	count := 0
	for _, r := range k.Resources {
		count += r.Allocatable
	}
	return count
}

// standsBy waits until the process is ready, while the other one serves.
func (p *process) standsBy(ctx context.Context) error {
	for late := time.Now().Add(patience); ; {
		_, err := p.get("/readyz")
		if err == nil || time.Now().After(late) {
			return err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// alone starts a virgate without a control socket, because two of them would want the same one.
func (s *stage) alone(ctx context.Context) (*process, error) {
	return s.run(ctx, append(s.configured(), "--control-socket", "")...)
}

// peakAllocates is the number of Allocate calls before the peak memory is read: as many containers
// as a node starts in days.
const peakAllocates = 5000

// peak measures the peak resident memory of the program, from its first instruction through its
// start and its calls, while it watches and writes to the API server. The container's limit has to
// allow that much.
func peak(ctx context.Context, b bench) ([]figure, error) {
	var figures []figure
	for _, devices := range []int{80, 8000} {
		most, err := peakOf(ctx, b, devices)
		if err != nil {
			return nil, fmt.Errorf("peak with %d devices: %w", devices, err)
		}
		figures = append(figures, figure{fmt.Sprintf("peak/%d/resident", devices), megabytes(most), "MB"})
	}
	return figures, nil
}

func peakOf(ctx context.Context, b bench, devices int) (uint64, error) {
	s, err := newStage(ctx, b.binary)
	if err != nil {
		return 0, err
	}
	defer s.stop()
	if err := s.unpack(); err != nil {
		return 0, err
	}
	virgate, end, err := s.runWithAPI(ctx, devices)
	if err != nil {
		return 0, err
	}
	defer end()
	if err := s.shows(ctx, devices); err != nil {
		return 0, err
	}
	p, err := s.dial()
	if err != nil {
		return 0, err
	}
	defer p.close()
	if err := repeat(peakAllocates, func(i int) error { return p.allocate(ctx, i) }); err != nil {
		return 0, err
	}
	most, err := virgate.peak()
	if err != nil {
		return 0, err
	}
	return most, virgate.stop()
}
