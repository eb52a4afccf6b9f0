package soak

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/virgate/virgate/internal/nvml"
	"github.com/virgate/virgate/internal/simnode"
)

// play does one operation. Its error says which invariant does not hold.
func (w *world) play(o operation) error {
	w.figures.kinds[o.kind]++
	switch o.kind {
	case admit, remove, restartContainer, resizePod:
		w.pods.add(o)
		return nil
	case edit:
		w.pods.disturb(cutting)
		text := o.text
		if o.wish != nil {
			text = o.wish.document(w.uuids)
			if o.wish.oneOnly {
				w.pods.disturb(oneOnly)
			}
		}
		w.cluster.setDocument(o.name, text)
	case label:
		w.pods.disturb(cutting)
		w.pods.disturb(oneOnly)
		w.cluster.setLabel(profileLabel, o.text)
	case migLabel:
		w.pods.disturb(cutting)
		w.cluster.setLabel(layoutLabel, o.text)
	case lose, heal, xid, partitionXID, heat, pull, plug, failCall, slowCall:
		w.pods.disturb(faults)
		w.pods.disturb(cutting)
		return w.hardware(o)
	case hangup:
		w.program.hangup()
	case scrape:
		return w.await(o.String(), func() string {
			if err := w.program.scrape(w.ctx); err != nil {
				return err.Error()
			}
			return ""
		})
	case obeyed:
		return w.await(o.String(), func() string { return w.program.seen.awaited(o) })
	case settle:
		return w.settle(o)
	default:
		if strings.HasPrefix(string(o.kind), "calm") {
			return w.calm(o)
		}
		w.witness.disturbed()
		w.pods.disturb(connections)
		return w.disturb(o)
	}
	return nil
}

func (w *world) hardware(o operation) error {
	node := w.site.node
	index, board := w.boardAt(o.board)
	switch o.kind {
	case lose:
		return node.Lose(index)
	case heal:
		return node.Heal(index)
	case xid:
		w.hurt(o.board)
		return node.XID(index, uint64(o.count), nvml.WholeBoard, nvml.WholeBoard)
	case partitionXID:
		if len(board.Partitions) == 0 {
			return nil
		}
		w.hurt(o.board)
		hit := board.Partitions[o.count%len(board.Partitions)]
		return node.XID(index, uint64(o.count), uint32(hit.GPUInstance), uint32(hit.ComputeInstance))
	case heat:
		return node.Temperature(index, 95)
	case pull:
		return node.Remove(index)
	case plug:
		_, err := node.Add("")
		return err
	case failCall:
		if o.name == "DeviceGetCount" {
			w.reopens = true
			w.mayMissResets()
		}
		w.scripts = append(w.scripts, node.Script(o.name, simnode.Fault{Return: nvml.Unknown, Times: o.count}))
	case slowCall:
		w.scripts = append(w.scripts, node.Script(o.name, simnode.Fault{Delay: o.delay, Times: o.count}))
	}
	return nil
}

func (w *world) disturb(o operation) error {
	switch o.kind {
	case restartProgram:
		return w.restart()
	case killProgram:
		return w.kill()
	case succeed:
		return w.succeed()
	case restartKubelet:
		return w.kubelet.Restart(w.ctx)
	case restorePods:
		return w.kubelet.RestorePods(w.ctx)
	case reboot:
		return w.kubelet.Reboot(w.ctx)
	case wipe:
		if err := w.kubelet.Stop(w.ctx); err != nil {
			return err
		}
		if err := w.removeSockets("*.sock"); err != nil {
			return err
		}
		return w.kubelet.Start(w.ctx)
	case dropStream:
		w.kubelet.DropStream(o.resource)
	case deleteSockets:
		return w.removeSockets("virgate-*.sock")
	case slowStream:
		w.witness.slowed()
		w.kubelet.SlowStream(o.delay)
	case refuse:
		w.kubelet.RefuseRegister(o.count)
	case silence:
		w.kubelet.SetSilent(o.count > 0)
	case cut:
		w.cluster.cut()
	case mend:
		w.cluster.mend()
	case expire:
		w.cluster.expire()
	default:
		return fmt.Errorf("no operation %q", o.kind)
	}
	return nil
}

func (w *world) removeSockets(pattern string) error {
	paths, err := filepath.Glob(filepath.Join(w.site.dir, pattern))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

// settle waits until the pods' operations are done and all is as it should be.
func (w *world) settle(o operation) error {
	for _, end := range w.scripts {
		end()
	}
	w.scripts = nil
	w.kubelet.RefuseRegister(0)
	w.pods.pending.Wait()
	if err := w.rest(o); err != nil {
		return err
	}
	if o.text == "streams" && len(w.restless(o.conditions)) == 0 {
		if now := w.countStreams(); !maps.Equal(now, w.streams) {
			return fmt.Errorf("invariant 1: registrations and streams before and after other replicas: %v, %v", w.streams, now)
		}
	}
	w.witness.calm()
	w.pods.calm()
	w.reopens = false
	if o.wish.oneOnly {
		w.pods.disturb(oneOnly)
	}
	if len(w.settled.blocked) > 0 {
		w.pods.disturb(cutting)
	}
	return nil
}

// countStreams are the registrations and streams of each resource so far.
func (w *world) countStreams() map[string][2]int {
	counts := map[string][2]int{}
	for name, resource := range w.kubelet.Snapshot().Resources {
		if len(resource.Devices) > 0 {
			counts[name] = [2]int{resource.Registrations, resource.StreamsOpened}
		}
	}
	return counts
}

// restless are the boards, by UUID, of which what is listed may change by itself:
// a program that is started while a board is away does not know of it, and a
// board that waits for pods to be cut is tried again now and then.
func (w *world) restless(conditions []condition) map[string]bool {
	boards := map[string]bool{}
	for ordinal, board := range w.site.node.Boards() {
		if conditions[ordinal] != sound || slices.Contains(w.settled.blocked, board.UUID) {
			boards[board.UUID] = true
		}
	}
	return boards
}

// boardOf has the board of each unit that there is, by UUID.
func (w *world) boardOf() map[string]string {
	boards := map[string]string{}
	for _, board := range w.site.node.Boards() {
		boards[board.UUID] = board.UUID
		for _, partition := range board.Partitions {
			boards[partition.UUID] = board.UUID
		}
	}
	return boards
}

// looked waits until the program has looked at its profile twice more: what it
// saw the first time is then in force.
func (w *world) looked() error {
	_, _, before, _ := w.program.seen.look()
	return w.await("SIGHUP", func() string {
		w.program.hangup()
		if _, _, now, _ := w.program.seen.look(); now < before+3 {
			return "the program does not look"
		}
		return ""
	})
}

// breathe gives what should not happen time to happen.
func (w *world) breathe() {
	select {
	case <-time.After(steady):
	case <-w.ctx.Done():
	}
}
