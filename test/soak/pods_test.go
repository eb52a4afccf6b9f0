package soak

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/virgate/virgate/internal/simkubelet"
)

const namespace = "soak"

// pods does what the schedule has pods do, one after the other, beside all the
// rest, and judges the answers.
type pods struct {
	kubelet *simkubelet.Kubelet
	queue   chan operation
	pending sync.WaitGroup

	mu sync.Mutex
	// known are the disturbances since the last calm.
	known   map[disturbance]bool
	answers map[string]int
	wrong   []string
}

// disturbance is a reason for which an admission may be refused.
type disturbance string

const (
	// connections break, and Virgate or the kubelet is not there.
	connections disturbance = "broken connection"
	// faults make devices Unhealthy that the kubelet has just chosen.
	faults disturbance = "fault"
	// cutting closes devices that the kubelet has just chosen.
	cutting disturbance = "board being cut"
	// oneOnly refuses more than one share.
	oneOnly disturbance = "one share only"
	// exhaustion is the kubelet's own refusal: it has too few devices.
	exhaustion disturbance = "too few devices"
)

func newPods(kubelet *simkubelet.Kubelet) *pods {
	return &pods{kubelet: kubelet, queue: make(chan operation, mostQueued), known: map[disturbance]bool{}, answers: map[string]int{}}
}

// mostQueued is more than a storm has operations.
const mostQueued = 1000

// run does what is queued until the queue is closed.
func (p *pods) run(ctx context.Context) {
	for o := range p.queue {
		p.do(ctx, o)
		p.pending.Done()
	}
}

func (p *pods) add(o operation) {
	p.pending.Add(1)
	p.queue <- o
}

func (p *pods) disturb(d disturbance) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[d] = true
}

// calm forgets the disturbances. Nothing may be queued.
func (p *pods) calm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.known)
}

func (p *pods) do(ctx context.Context, o operation) {
	switch o.kind {
	case admit:
		p.count("admission", p.admit(ctx, o))
	case remove:
		if err := p.kubelet.DeletePod(namespace, o.name); err != nil && !errors.Is(err, simkubelet.ErrNoPod) {
			p.complain("%s: %v", o, err)
		}
	case restartContainer:
		_, err := p.kubelet.RestartContainer(ctx, namespace, o.name, "main")
		switch {
		case err == nil, errors.Is(err, simkubelet.ErrNoPod), errors.Is(err, simkubelet.ErrDown):
		case strings.Contains(err.Error(), "pod is Failed"), strings.Contains(err.Error(), "pod is Pending"):
		default:
			p.complain("invariant 5: %s: %v", o, err)
		}
	case resizePod:
		err := p.kubelet.ResizePod(ctx, namespace, o.name)
		switch {
		case err == nil, errors.Is(err, simkubelet.ErrNoPod), errors.Is(err, simkubelet.ErrDown):
		default:
			// A held device may be Unhealthy: then the resize waits, and the pod
			// runs on.
			p.count("resize", err)
		}
	}
}

func (p *pods) admit(ctx context.Context, o operation) error {
	requests := map[string]int{o.resource: o.count}
	pod := simkubelet.Pod{Namespace: namespace, Name: o.name, Containers: []simkubelet.Container{{Name: "main", Requests: requests}}}
	if o.text == "init" {
		pod.Containers = append(pod.Containers, simkubelet.Container{Name: "first", Init: true, Requests: requests})
	}
	status, err := p.kubelet.AddPod(ctx, pod)
	if err == nil {
		p.judgeGrants(o, status)
	}
	return err
}

// judgeGrants compares what the container was told with what the pod was given.
func (p *pods) judgeGrants(o operation, pod simkubelet.PodStatus) {
	for _, container := range pod.Containers {
		for _, grant := range container.Grants {
			var units []string
			for _, id := range grant.Devices {
				if unit, _ := unitOf(id); !slices.Contains(units, unit) {
					units = append(units, unit)
				}
			}
			told := strings.Split(grant.Response.GetEnvs()["NVIDIA_VISIBLE_DEVICES"], ",")
			slices.Sort(units)
			slices.Sort(told)
			if !slices.Equal(units, told) {
				p.complain("%s: %v granted, and the container sees %v", o, grant.Devices, told)
			}
		}
	}
}

// count notes an answer, and complains where nothing explains it.
func (p *pods) count(what string, err error) {
	reason, explained := p.explain(err)
	p.mu.Lock()
	p.answers[what+": "+reason]++
	p.mu.Unlock()
	if !explained {
		p.complain("%s: nothing explains %v", what, err)
	}
}

// explain says what an answer is called, and whether it is one of the program's
// answers that the last disturbances can have led to.
func (p *pods) explain(err error) (reason string, explained bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	because := func(d disturbance) (string, bool) { return string(d), p.known[d] }
	text, code := "", codes.OK
	if err != nil {
		text, code = err.Error(), status.Code(errors.Unwrap(err))
		if from, ok := errors.AsType[*simkubelet.AdmissionError](err); ok {
			code = status.Code(from.Cause)
		}
	}
	contains := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
	}
	switch {
	case err == nil:
		return "admitted", true
	case contains("unregistered device", "no healthy devices", "requested number of devices unavailable", "previously allocated devices are no longer healthy"):
		return string(exhaustion), true
	case errors.Is(err, simkubelet.ErrDown), errors.Is(err, context.Canceled):
		return because(connections)
	case contains("unknown Device Plugin", "has been stopped", "endpoint not found", "transport", "connection", "EOF", "the plugin stops"):
		return because(connections)
	}
	switch code {
	case codes.Canceled:
		return because(connections)
	case codes.FailedPrecondition:
		return because(cutting)
	case codes.InvalidArgument:
		return because(oneOnly)
	case codes.Unavailable:
		return because(faults)
	default:
		return "unexplained: " + code.String(), false
	}
}

func (p *pods) complain(format string, arguments ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wrong = append(p.wrong, fmt.Sprintf(format, arguments...))
}

// check is all that was ever complained of.
func (p *pods) check() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.wrong)
}

// tally are the answers by what they are called.
func (p *pods) tally() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.answers)
}
