package soak

import (
	"fmt"
	"runtime"
	"strings"
	"time"
)

// ours are the packages of which nothing may run when no program does. Driver
// calls are left behind at the end by design, so internal/nvml is not one.
var ours = []string{"/internal/agent.", "/internal/policy.", "/internal/policy/report.", "/internal/podresources.", "/internal/state.", "/internal/host.", "/internal/cdi.", "virgate/plugin."}

// leaked says which goroutines a program that has ended left.
func leaked() error {
	var left []string
	// A goroutine whose end was waited for may still be on its way out.
	for range 100 {
		left = running()
		if len(left) == 0 {
			return nil
		}
		<-time.After(10 * time.Millisecond)
	}
	return fmt.Errorf("invariant 10: %d goroutines outlive the program:\n%s", len(left), strings.Join(left, "\n\n"))
}

func running() []string {
	stacks := make([]byte, 1<<20)
	for {
		n := runtime.Stack(stacks, true)
		if n < len(stacks) {
			stacks = stacks[:n]
			break
		}
		stacks = make([]byte, 2*len(stacks))
	}
	var found []string
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		for _, name := range ours {
			if strings.Contains(stack, name) && !strings.Contains(stack, "soak.running(") {
				found = append(found, stack)
				break
			}
		}
	}
	return found
}
