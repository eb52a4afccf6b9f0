package hostile

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
)

// repetitions is how often a leak test does its thing after warming up. With
// LEAKS=1000 in the environment it takes minutes, and is the run whose figures
// docs/reliability.md has.
func repetitions(t *testing.T) int {
	t.Helper()
	text := os.Getenv("LEAKS")
	if text == "" {
		return 40
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 20 {
		t.Fatalf("LEAKS=%q is no number from 20", text)
	}
	return n
}

// usageOf is what this process has: program, node, kubelet and test.
type usageOf struct{ goroutines, descriptors, heap float64 }

func measure(t *testing.T) usageOf {
	t.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("descriptors cannot be counted here: %v", err)
	}
	// Twice, for what a finalizer lets go of.
	runtime.GC()
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return usageOf{float64(runtime.NumGoroutine()), float64(len(descriptors)), float64(memory.HeapAlloc)}
}

// flat repeats the step and holds that nothing grows with it. Of what is measured
// after each tenth of the repetitions the slope counts, by Theil and Sen: the
// median of the slopes between any two, which a moment of noise does not move.
func flat(t *testing.T, step func(n int)) {
	t.Helper()
	const warmUp, parts = 20, 10
	for n := range warmUp {
		step(n)
	}
	count := repetitions(t)
	seen := []usageOf{measure(t)}
	for part := range parts {
		for n := range count / parts {
			step(part*(count/parts) + n)
		}
		seen = append(seen, measure(t))
	}
	for _, kind := range []struct {
		name string
		of   func(usageOf) float64
		// most is what a repetition may add: less than one thing in three, and less
		// memory than any goroutine or connection has.
		most float64
	}{
		{"goroutines", func(u usageOf) float64 { return u.goroutines }, 0.3},
		{"descriptors", func(u usageOf) float64 { return u.descriptors }, 0.3},
		{"heap bytes", func(u usageOf) float64 { return u.heap }, 1500},
	} {
		values := make([]float64, len(seen))
		for i, u := range seen {
			values[i] = kind.of(u)
		}
		growth := slope(values) * parts / float64(count)
		t.Logf("%s over %d repetitions: %.0f, %+.3f with each", kind.name, count, values, growth)
		if growth > kind.most {
			t.Errorf("%s grow: %.0f", kind.name, values)
		}
	}
}

// slope is the median of the slopes between any two of the values.
func slope(values []float64) float64 {
	var slopes []float64
	for i := range values {
		for j := range i {
			slopes = append(slopes, (values[i]-values[j])/float64(i-j))
		}
	}
	slices.Sort(slopes)
	return slopes[len(slopes)/2]
}

// TestProfileSwitchesLeakNothing goes round five profiles: fewer and more
// replicas, a name that comes and goes, another policy, and one that is refused.
func TestProfileSwitchesLeakNothing(t *testing.T) {
	p := start(t, options{profile: replicas(2)})
	p.shows(gpu, 4)
	steps := []struct {
		profile, resource string
		devices           int
	}{
		{replicas(4), gpu, 8},
		{replicas(3), gpu, 6},
		{"sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}", gpu + ".shared", 4},
		{"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, policy: packed}]}}", gpu, 4},
		{"sharing: nonsense", gpu, 4},
	}
	flat(t, func(n int) {
		step := steps[n%len(steps)]
		p.write(step.profile)
		p.shows(step.resource, step.devices)
	})
}

// TestKubeletRestartsLeakNothing has the kubelet wipe the sockets each time.
func TestKubeletRestartsLeakNothing(t *testing.T) {
	p := start(t, options{profile: replicas(4)})
	p.shows(gpu, 8)
	flat(t, func(int) {
		if err := p.kubelet.Restart(p.ctx); err != nil {
			t.Fatal(err)
		}
		p.shows(gpu, 8)
	})
}
