package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Kernel reads what the machine's kernel, rather than NVML, knows about the driver. A Node's Watch
// calls the other methods from one goroutine at a time.
type Kernel interface {
	// Bound returns the PCI addresses of the GPUs that are bound to the kernel driver and that NVML
	// should list to this process, as NVML writes them: "00000000:3B:00.0".
	Bound() ([]string, error)
	// OpenControl opens and closes the driver's control node, which every use of a GPU opens first.
	OpenControl() error
	// GPUOpen reports whether this process has the device node of a GPU open.
	GPUOpen() bool
}

// Unlisted names, for people, the GPUs that are bound to the kernel driver but that NVML does not
// list; empty if there are none.
func (n *Node) Unlisted() string { return n.current.Load().unlisted }

// compare adds the kernel's data to a scan in which NVML listed that many GPUs.
func (p *poller) compare(scanned *scanResult, listed int) {
	if p.options.Kernel == nil || scanned.err != nil {
		return
	}
	bound, err := p.options.Kernel.Bound()
	if text := message(err); text != p.loggedKernel {
		p.loggedKernel = text
		if err != nil {
			p.log.Warn("GPUs that the driver does not list are not noticed", "error", err)
		}
	}
	scanned.compared = err == nil
	scanned.listed = listed
	scanned.bound = bound
}

// unlistedText names the bound GPUs that are not listed.
func (t *tracker) unlistedText(scanned scanResult) string {
	if len(scanned.bound) <= scanned.listed {
		return ""
	}
	missing := slices.Clone(scanned.bound)
	for _, gpu := range t.gpus {
		if at := slices.Index(missing, gpu.gpu.PCIBusID); gpu.listed && at >= 0 {
			missing = slices.Delete(missing, at, at+1)
		}
	}
	which := "without "
	if len(missing) > len(scanned.bound)-scanned.listed { // Some listed GPU has never been read.
		which = "without some of "
	}
	return fmt.Sprintf("the driver lists %d of the %d GPUs that it is bound to, %s%s", scanned.listed,
		len(scanned.bound), which, strings.Join(missing, ", "))
}

// errNoNodes means that a new container is needed.
var errNoNodes = errors.New(
	"this container cannot open the driver's control node: it has lost its device nodes, as after systemctl " +
		"daemon-reload, or was never given any; a new one is needed")

// controlLimit is how long opening the control node may take.
const controlLimit = 5 * time.Second

// nodesLost returns errNoNodes, with the reason, if the control node is missing or may not be
// opened. A driver that is not loaded or does not answer does not require another container. During
// a pause the node is not opened, because that may load the driver.
func (p *poller) nodesLost(ctx context.Context) error {
	if p.options.Kernel == nil || p.Closed() {
		return nil
	}
	limit := controlLimit
	if p.opening == nil {
		answer := make(chan error, 1)
		p.opening = answer
		go func() { answer <- p.options.Kernel.OpenControl() }()
	} else {
		limit = 0 // An earlier call has already waited for it.
	}
	select {
	case err := <-p.opening:
		p.opening = nil
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
			return fmt.Errorf("%w (%w)", errNoNodes, err)
		}
	case <-time.After(limit):
	case <-ctx.Done():
	}
	return nil
}

// loaded reports whether the kernel has a driver with GPUs. R580 returns DRIVER_NOT_LOADED also where
// only the container's device nodes are missing.
func (p *poller) loaded() bool {
	if p.options.Kernel == nil {
		return false
	}
	bound, err := p.options.Kernel.Bound()
	return err == nil && len(bound) > 0
}

// nothingWorks reports whether the scan found GPUs and none of them answers.
func (s scanResult) nothingWorks() bool {
	answers := func(r reading) bool { return !r.dead }
	if slices.ContainsFunc(s.readings, answers) || len(s.pending) > len(s.refused) {
		return false
	}
	return len(s.readings)+len(s.unreadable)+len(s.refused) > 0 || s.uncertain || s.lostThere ||
		s.compared && s.listed == 0 && len(s.bound) > 0
}
