package soak

import (
	"fmt"
	"strings"
	"time"
)

// kind is what an operation does.
type kind string

// What happens in a storm. Nothing waits for what comes of it.
const (
	admit            kind = "admit a pod"
	remove           kind = "delete a pod"
	restartContainer kind = "restart a container"
	resizePod        kind = "resize a pod"

	edit     kind = "edit a profile"
	label    kind = "flip the label"
	migLabel kind = "flip the MIG label"

	lose         kind = "lose a board"
	heal         kind = "reset a board"
	xid          kind = "XID of a board"
	partitionXID kind = "XID of a partition"
	heat         kind = "heat a board"
	pull         kind = "pull a board"
	plug         kind = "plug a board"
	failCall     kind = "driver call fails"
	slowCall     kind = "driver call is slow"

	hangup         kind = "SIGHUP"
	scrape         kind = "HTTP requests"
	restartProgram kind = "restart Virgate"
	killProgram    kind = "kill Virgate"
	succeed        kind = "a successor takes over"

	restartKubelet kind = "restart the kubelet"
	restorePods    kind = "kubelet hears of its pods"
	reboot         kind = "reboot the node"
	wipe           kind = "kubelet finds its directory wiped"
	dropStream     kind = "kubelet drops a stream"
	deleteSockets  kind = "delete sockets"
	slowStream     kind = "kubelet reads slowly"
	refuse         kind = "kubelet refuses registrations"
	silence        kind = "kubelet is silent"
	cut            kind = "cut off the API server"
	mend           kind = "API server is back"
	expire         kind = "API server forgets old versions"
)

// What is checked when all is quiet. Each waits for what comes of it.
const (
	obeyed          kind = "wait for the profile"
	settle          kind = "wait until all is as it should be"
	calmHangup      kind = "calm: SIGHUP changes nothing"
	calmRestart     kind = "calm: a restart changes nothing"
	calmKill        kind = "calm: a kill changes nothing"
	calmBad         kind = "calm: a bad profile changes nothing"
	calmReplicas    kind = "calm: replicas change on the open streams"
	calmXID         kind = "calm: a fault is one unit's"
	calmAdmit       kind = "calm: free devices can be had"
	calmContainers  kind = "calm: containers restart"
	calmDrop        kind = "calm: a lost stream comes back"
	calmDrain       kind = "calm: without pods the layout is reached"
	calmSuccession  kind = "calm: a successor changes nothing"
	calmDeadKubelet kind = "calm: Virgate ends in time without a kubelet"
)

// condition is what is known of a board's health.
type condition int

const (
	sound condition = iota
	// faulty is a board that must not be handed out.
	faulty
	// doubtful is one whose errors the program may have seen or missed.
	doubtful
)

// operation is one step of a schedule. Which fields count depends on the kind.
type operation struct {
	kind kind
	// board is an ordinal.
	board int
	// name is of a document, a layout, a pod, a resource or a driver call.
	name string
	// text is a document, or a label's value.
	text string
	// wish is written to a document, or is what must be in force.
	wish     *wish
	resource string
	count    int
	delay    time.Duration
	// conditions are those of all boards, for what is checked at rest.
	conditions []condition
	// rejected says that what labels and documents want cannot be had, so that
	// wish is the last that could be.
	rejected bool
}

func (o operation) String() string {
	var b strings.Builder
	b.WriteString(string(o.kind))
	switch o.kind {
	case lose, heal, xid, partitionXID, heat, pull, plug, calmXID:
		fmt.Fprintf(&b, " %d", o.board)
	}
	for _, part := range []string{o.name, o.resource, o.text} {
		if part != "" {
			fmt.Fprintf(&b, " %q", part)
		}
	}
	if o.count != 0 {
		fmt.Fprintf(&b, " × %d", o.count)
	}
	if o.delay != 0 {
		fmt.Fprintf(&b, " %s", o.delay)
	}
	if o.wish != nil {
		fmt.Fprintf(&b, " %+v", *o.wish)
	}
	return b.String()
}
