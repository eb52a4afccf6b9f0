package api

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// fleet is the Virgates of many nodes, each with a connection of its own.
type fleet struct {
	t     *testing.T
	nodes []*follower
}

// startFleet follows the Nodes node-0, node-1, …; change may be nil.
func (s *server) startFleet(t *testing.T, count int, change func(f *follower, node string)) *fleet {
	t.Helper()
	f := &fleet{t: t, nodes: make([]*follower, count)}
	for i := range f.nodes {
		f.nodes[i] = s.followBy(t, nodeName(i), virgateToken, func(f *follower) {
			if change != nil {
				change(f, nodeName(i))
			}
		})
	}
	return f
}

func nodeName(i int) string { return fmt.Sprint("node-", i) }

// awaits waits until all nodes have the profile in force, and returns when the
// last one had it.
func (f *fleet) awaits(inForce string) (last time.Time) {
	f.t.Helper()
	var missing *follower
	defer func() {
		if f.t.Failed() && missing != nil {
			have, why := missing.state()
			f.t.Logf("in force %q, rejected %q, requests %q", have, why, missing.seen())
		}
	}()
	await(f.t, fleetTimeout, "all nodes to have "+inForce, func() bool {
		for _, node := range f.nodes {
			if have, why := node.state(); have != inForce || why != "" {
				missing = node
				return false
			}
		}
		return true
	})
	for _, node := range f.nodes {
		if at := node.since(); at.After(last) {
			last = at
		}
	}
	return last
}

// fleetTimeout is how long a thousand nodes may take on two cores that others
// use as well.
const fleetTimeout = 5 * time.Minute

// cost is what the nodes have asked and moved so far, of all together.
type cost struct {
	// refused are requests that were answered 429, writes those that change something.
	requests, refused, writes, connections float64
	read, written                          float64 // bytes on the wire
}

func (f *fleet) cost() cost {
	var total cost
	for _, node := range f.nodes {
		for _, r := range node.made() {
			total.requests++
			if r.writes() {
				total.writes++
			}
			if r.answer == 429 {
				total.refused++
			}
		}
		total.connections += float64(len(node.dialled()))
		total.read += float64(node.read.Load())
		total.written += float64(node.written.Load())
	}
	return total
}

// minus is what was spent since the earlier time.
func (c cost) minus(earlier cost) cost {
	return cost{
		requests: c.requests - earlier.requests, refused: c.refused - earlier.refused, writes: c.writes - earlier.writes,
		connections: c.connections - earlier.connections, read: c.read - earlier.read, written: c.written - earlier.written,
	}
}

// cut cuts all connections at once, as an API server does that ends; another one
// is there at once.
func (f *fleet) cut() {
	for _, node := range f.nodes {
		node.setCut(true)
		node.setCut(false)
	}
}

// rate is how many times there are in each of the seconds after begin, up to the last.
func rate(times []time.Time, begin time.Time) []int {
	var counts []int
	for _, at := range times {
		second := int(at.Sub(begin) / time.Second)
		if at.Before(begin) {
			continue
		}
		for len(counts) <= second {
			counts = append(counts, 0)
		}
		counts[second]++
	}
	return counts
}

// dials are when connections were asked for, requests when requests were made.
func (f *fleet) dials() []time.Time {
	var all []time.Time
	for _, node := range f.nodes {
		all = append(all, node.dialled()...)
	}
	slices.SortFunc(all, time.Time.Compare)
	return all
}

func (f *fleet) requests() []time.Time {
	var all []time.Time
	for _, node := range f.nodes {
		for _, r := range node.made() {
			all = append(all, r.at)
		}
	}
	slices.SortFunc(all, time.Time.Compare)
	return all
}

func (f *fleet) stop() {
	var ended sync.WaitGroup
	for _, node := range f.nodes {
		ended.Go(node.stop)
	}
	ended.Wait()
}
