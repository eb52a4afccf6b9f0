package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Limited is a prometheus.Collector of other ones, with a limit to how many
// series they have together. What comes after the limit is dropped and counted,
// so the collectors that matter most come first.
//
// A histogram counts as one; there are few.
type Limited struct {
	most       int
	collectors []prometheus.Collector
	dropped    *prometheus.Desc
}

// Limit returns a collector of all the collectors, which shows no more than most
// series and how many it dropped.
func Limit(most int, collectors ...prometheus.Collector) Limited {
	return Limited{
		most: most, collectors: collectors,
		dropped: desc("dropped_series", "Series that this scrape lacks because there are more than --metrics-max-series."),
	}
}

// Describe implements prometheus.Collector.
func (l Limited) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range l.collectors {
		c.Describe(ch)
	}
	ch <- l.dropped
}

// Collect implements prometheus.Collector.
func (l Limited) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric, 64)
	var passing sync.WaitGroup
	passing.Go(func() { l.pass(all, ch) })
	defer passing.Wait()
	defer close(all)
	// Not in a goroutine of its own, so that the registry hears of a panic.
	for _, c := range l.collectors {
		c.Collect(all)
	}
}

// pass hands on what there is room for, and says at the end how much there was
// not.
func (l Limited) pass(all <-chan prometheus.Metric, ch chan<- prometheus.Metric) {
	shown, dropped := 0, 0
	for metric := range all {
		if shown == l.most {
			dropped++
			continue
		}
		shown++
		ch <- metric
	}
	gauges(ch)(l.dropped, float64(dropped))
}
