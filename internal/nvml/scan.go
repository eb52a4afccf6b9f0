package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/virgate/virgate/sharing"
)

// Scan opens the library, reads the node's GPUs once and closes the library.
//
// The GPUs are sorted by index. A GPU or partition that cannot be read does not hide the others:
// Scan leaves it out, and returns the reason as an error along with the other GPUs. A node without
// GPUs is not an error. If the driver cannot be opened or does not list its GPUs, there are no
// GPUs, and errors.Is finds the return code in the error. GPUs in known keep their indexes.
func Scan(lib Library, known ...KnownGPU) (gpus []sharing.GPU, err error) {
	if err := lib.Init(); err != nil {
		return nil, fmt.Errorf("open the driver: %w", err)
	}
	defer func() {
		if closing := lib.Shutdown(); closing != nil {
			err = errors.Join(err, fmt.Errorf("close the driver: %w", closing))
		}
	}()
	scanner := newScanner(lib, map[string]bool{})
	defer scanner.reads.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	scanned := scanner.scan(ctx)
	if scanned.err != nil {
		return nil, scanned.err
	}
	seen, now := newTracker(newGate().index), moment{rules: sharing.DefaultHealthRules()}
	seen.remember(known, "", now)
	seen.addScan(scanned, now)
	return seen.inventory(), scanned.problems
}

// Versions are the versions of the driver; zero if unknown.
type Versions struct {
	// Driver is, for example, "580.65.06". CUDA is the newest version that the driver supports,
	// 12080 for 12.8.
	Driver string
	CUDA   int
}

// ReadVersions reads the versions from the driver, which must be open. Unknown versions are zero.
func ReadVersions(lib Library) (v Versions) {
	v.Driver, _ = lib.SystemGetDriverVersion()
	v.CUDA, _ = lib.SystemGetCudaDriverVersion()
	return v
}

// scanner reads all GPUs in parallel. It keeps their handles, because looking one up takes up to
// ten seconds on a busy node. A GPU that answers slowly is left out of the scan, and its result is
// handled when it arrives. Only one goroutine uses the scanner.
type scanner struct {
	lib      Library
	topology topology
	indices  []*gpuIndex
	// handles holds the handle by which each GPU was last read, by UUID. lost holds the UUIDs of
	// those whose handle has returned GPU_IS_LOST since. A reset between two scans leaves no other
	// trace, so both outlive an enumeration.
	handles map[string]Device
	lost    map[string]bool
	// results receives the results of the reads in flight, also between scans.
	results     chan result
	inFlight    int
	reads       sync.WaitGroup
	scannedOnce bool
}

// How long a scan waits for GPUs. The first scan waits for all, because a GPU missing in it would
// seem not to be in the node; a hung call fails before that.
const (
	firstPatience = 35 * time.Second
	patience      = 2 * time.Second
)

// gpuIndex is an index of the driver's enumeration, with the GPU found there. While beingRead is
// set, the reading goroutine owns the index and its GPU.
type gpuIndex struct {
	index int
	// gpu is nil if no GPU could be identified.
	gpu       *knownGPU
	beingRead bool
	// answered is true once the driver has told about the GPU, or if it must not be asked.
	answered bool
}

// result is the result of reading the GPU at an index.
type result struct {
	*gpuIndex
	// keep is the GPU to keep for the next read. A GPU that cannot be replaced is kept, because the
	// later answers of its handle distinguish a reset from a brief failure.
	keep    *knownGPU
	reading reading
	err     error
	// lost holds the handles that returned GPU_IS_LOST; newHandle means that a new handle works.
	lost      []Device
	newHandle bool
}

// scanResult is the result of a scan or probe of the GPUs.
type scanResult struct {
	// driver is the driver's version; empty if the driver does not report it.
	driver   string
	versions Versions
	readings []reading
	// unreadable holds the fault of each known GPU that could not be read, by UUID. pending holds
	// the GPUs that have not answered yet.
	unreadable map[string]finding
	pending    map[string]bool
	// refused holds the GPUs in pending that the driver does not let this program read.
	refused map[string]bool
	// listed is how many GPUs the driver lists, and bound holds the addresses of the GPUs that it
	// should list. Both are valid only if compared is true; see Kernel.
	compared bool
	listed   int
	bound    []string
	// unwatchedSince is when the session before ended, in the first scan of a session; otherwise zero.
	unwatchedSince time.Time
	// complete means that the driver was asked for all its GPUs. uncertain means that a known GPU
	// may still be there, at an index that could not be read.
	complete, uncertain bool
	// lostThere means that an unidentified GPU returns GPU_IS_LOST. It may be a known GPU that was
	// not found elsewhere.
	lostThere bool
	// problems holds the errors of what could not be read, joined; nil if everything was read.
	problems error
	// err is set if nothing could be read; all other fields are then empty.
	err error
}

// errListedTwice means that two indices name one GPU: one of them has a handle from before the GPUs
// changed places.
var errListedTwice = errors.New("the driver lists one GPU twice")

// newScanner returns a scanner without known GPUs. lost may come from the scanner of an earlier
// session with the driver.
func newScanner(lib Library, lost map[string]bool) *scanner {
	return &scanner{
		lib:      lib,
		topology: topology{lib: lib, levels: map[[2]Device]string{}},
		lost:     lost,
		handles:  map[string]Device{},
		results:  make(chan result),
	}
}

// scan reads every GPU that the driver lists. It fails as a whole only if the driver does not
// answer or ctx ends.
func (s *scanner) scan(ctx context.Context) scanResult {
	scanned := s.enumerate(ctx)
	if errors.Is(scanned.err, errListedTwice) {
		s.indices = nil
		scanned = s.enumerate(ctx)
	}
	return scanned
}

func (s *scanner) enumerate(ctx context.Context) scanResult {
	count, err := s.lib.DeviceGetCount()
	if err != nil {
		return scanResult{err: fmt.Errorf("list the GPUs: %w", err)}
	}
	if count != len(s.indices) {
		// Results of reads in flight will be ignored: their indices no longer exist.
		s.indices = make([]*gpuIndex, count)
		for index := range s.indices {
			s.indices[index] = &gpuIndex{index: index}
		}
	}
	return s.readAll(ctx, true)
}

// probe reads the condition of the known GPUs. It does not enumerate them, so it cannot detect that
// one is missing.
func (s *scanner) probe(ctx context.Context) scanResult {
	probed := s.readAll(ctx, false)
	if errors.Is(probed.err, errListedTwice) {
		return s.scan(ctx)
	}
	probed.complete = false
	return probed
}

// readAll reads the GPUs at all indices that are not already being read.
func (s *scanner) readAll(ctx context.Context, whole bool) scanResult {
	waiting, handles := map[*gpuIndex]bool{}, maps.Clone(s.handles)
	for _, i := range s.indices {
		if !i.beingRead {
			i.beingRead, waiting[i] = true, true
			s.start(ctx, func() result { return i.read(s.lib, whole, handles) })
		}
	}
	limit := patience
	if !s.scannedOnce {
		limit = firstPatience
	}
	enough := time.After(limit)
	var results []result
	for late := false; len(waiting) > 0 && !late; {
		select {
		case r := <-s.results:
			delete(waiting, r.gpuIndex)
			if s.handle(r) {
				results = append(results, r)
			}
		case <-enough:
			late = true
		case <-ctx.Done():
			return scanResult{err: ctx.Err()}
		}
	}
	s.scannedOnce = true
	return s.merge(results)
}

func (s *scanner) start(ctx context.Context, read func() result) {
	s.inFlight++
	s.reads.Go(func() { send(ctx, s.results, read()) })
}

// handle records a finished read. It reports whether its index is part of the current enumeration.
func (s *scanner) handle(r result) bool {
	s.inFlight--
	r.beingRead = false
	for uuid, handle := range s.handles {
		if slices.Contains(r.lost, handle) {
			s.lost[uuid] = true
		}
	}
	return slices.Contains(s.indices, r.gpuIndex)
}

// late returns a scan result for a read that finished between scans.
func (s *scanner) late(r result) scanResult {
	if !s.handle(r) {
		return scanResult{}
	}
	scanned := s.merge([]result{r})
	scanned.complete = false
	return scanned
}

// merge returns a scan result for the results, and keeps their GPUs for the next scan.
func (s *scanner) merge(results []result) scanResult {
	slices.SortFunc(results, func(a, b result) int { return cmp.Compare(a.index, b.index) })
	seen := map[string]bool{}
	for _, r := range results {
		if uuid := r.reading.gpu.UUID; r.err == nil && seen[uuid] {
			return scanResult{err: errListedTwice}
		} else if r.err == nil {
			seen[uuid] = true
		}
	}
	scanned := scanResult{
		complete:   true,
		unreadable: map[string]finding{},
		pending:    map[string]bool{},
		refused:    map[string]bool{},
	}
	var problems []error
	for _, r := range results {
		before := r.gpu
		r.gpu = r.keep
		gone, released := errors.AsType[*releasedError](r.err)
		r.answered = r.answered || r.err == nil || released || errors.Is(r.err, GPUIsLost) ||
			errors.Is(r.err, NoPermission)
		if err := cmp.Or(r.err, r.reading.problems); err != nil && !released {
			problems = append(problems, fmt.Errorf("read GPU %d: %w", r.index, err))
		}
		switch {
		case r.err == nil:
			uuid := r.reading.gpu.UUID
			r.reading.reset = r.newHandle && s.lost[uuid]
			delete(s.lost, uuid)
			s.handles[uuid] = r.reading.device
			scanned.readings = append(scanned.readings, r.reading)
		case released:
			scanned.pending[gone.gpu] = true
		case before != nil && errors.Is(r.err, GPUIsLost):
			scanned.unreadable[before.fixed.UUID] = lostFinding()
		case before != nil && errors.Is(r.err, NoPermission):
			scanned.pending[before.fixed.UUID], scanned.refused[before.fixed.UUID] = true, true // No fault of the GPU.
		case before != nil:
			scanned.unreadable[before.fixed.UUID] = unreadableFinding(r.err)
		case errors.Is(r.err, GPUIsLost):
			scanned.lostThere = true
		default:
			scanned.uncertain = true
		}
	}
	var known []*knownGPU
	for _, i := range s.indices {
		switch {
		case i.gpu != nil:
			known = append(known, i.gpu)
			if i.beingRead {
				scanned.pending[i.gpu.fixed.UUID] = true
			}
		case i.beingRead:
			scanned.complete = false
		}
	}
	// The links of a GPU that is being read do not change.
	links := s.topology.links(known)
	for i := range scanned.readings {
		scanned.readings[i].gpu.Links = links[scanned.readings[i].gpu.UUID]
	}
	scanned.problems = errors.Join(problems...)
	return scanned
}

// answered reports whether all GPUs that the driver lists have answered.
func (s *scanner) answered() bool {
	return !slices.ContainsFunc(s.indices, func(i *gpuIndex) bool { return !i.answered })
}

// lastProbe waits for all reads and then probes every handle once more, including handles of GPUs
// that are at no index: closing the driver loses what they tell about a reset. It stores that in
// lost. It does nothing if ctx has ended, because the result would not be used.
func (s *scanner) lastProbe(ctx context.Context) {
	s.wait(ctx)
	if ctx.Err() != nil {
		return
	}
	for _, handle := range s.handles {
		s.start(ctx, func() result {
			r := result{gpuIndex: &gpuIndex{}}
			if answersLost(s.lib, handle) {
				r.lost = []Device{handle}
			}
			return r
		})
	}
	s.wait(ctx)
}

// wait handles all reads in flight, or returns when ctx ends.
func (s *scanner) wait(ctx context.Context) {
	for s.inFlight > 0 {
		select {
		case r := <-s.results:
			s.handle(r)
		case <-ctx.Done():
			return
		}
	}
}

// read reads the GPU at the index. If the index has a handle, it uses that, with a probe unless
// whole is set; otherwise it gets a new handle. handles holds the handles by which GPUs were last
// read, by UUID, possibly at another index.
func (i *gpuIndex) read(lib Library, whole bool, handles map[string]Device) result {
	r := result{gpuIndex: i, keep: i.gpu}
	if i.gpu != nil {
		if !whole {
			r.reading, r.err = i.gpu.probe(lib)
			if r.err == nil {
				return r
			}
		}
		r.reading, r.err = i.gpu.read(lib)
		if r.err == nil {
			return r
		}
		if _, hung := errors.AsType[*AbandonedError](r.err); hung {
			return r // The handle may still report later that its GPU was lost.
		}
		if errors.Is(r.err, GPUIsLost) {
			r.lost = append(r.lost, i.gpu.device)
		}
	}
	found, reading, err := find(lib, i.index)
	if err != nil {
		r.err = err
		return r
	}
	r.keep = found
	r.reading = reading
	r.err = nil
	r.newHandle = true
	if handle, had := handles[reading.gpu.UUID]; had && handle != reading.device && answersLost(lib, handle) {
		r.lost = append(r.lost, handle)
	}
	return r
}

func find(lib Library, index int) (*knownGPU, reading, error) {
	device, err := lib.DeviceGetHandleByIndex(index)
	if err != nil {
		return nil, reading{}, err
	}
	found, err := identify(lib, device, index)
	if err != nil {
		return nil, reading{}, err
	}
	r, err := found.read(lib)
	return found, r, err
}

// answersLost reports whether the handle returns GPU_IS_LOST for a probe. Calls that the driver
// answers from memory would not show this.
func answersLost(lib Library, device Device) bool {
	r := reading{device: device}
	return errors.Is(r.readCondition(lib), GPUIsLost)
}
