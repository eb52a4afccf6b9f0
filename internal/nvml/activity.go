package nvml

import (
	"slices"
	"strings"
	"sync"
)

// activity is what the driver is being asked, for the message that it does not
// answer.
type activity struct {
	mu   sync.Mutex
	asks map[string]int
}

func newActivity() *activity { return &activity{asks: map[string]int{}} }

// begin notes that the driver is asked for what; end that it has answered.
func (a *activity) begin(what string) (end func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asks[what]++
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.asks[what]--; a.asks[what] == 0 {
			delete(a.asks, what)
		}
	}
}

// String is what is being asked, sorted, between commas.
func (a *activity) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var asks []string
	for what := range a.asks {
		asks = append(asks, what)
	}
	slices.Sort(asks)
	return strings.Join(asks, ", ")
}
