package simkubelet

// Event is something that happened in a kubelet, for Options.Witness.
type Event struct {
	Kind EventKind
	// Resource is the resource's name; empty where none is concerned.
	Resource string
	// Devices are those of a Listed event in the order of the list, and those of
	// a Granted one by ID.
	Devices []Device
	// Pod is the UID of the pod that Granted and Freed are about.
	Pod string
	// ByKubelet says of a StreamEnded that the kubelet itself ended the stream.
	ByKubelet bool
}

// EventKind says what an Event tells.
type EventKind int

// The kinds of events.
const (
	// Started and Stopped are the beginning and the end of a process. The streams
	// of a process that has stopped end after it.
	Started EventKind = iota + 1
	Stopped
	// Registering is a Register call before it is answered, or refused.
	Registering
	// StreamOpened and StreamEnded are about ListAndWatch.
	StreamOpened
	StreamEnded
	// Listed is a list that the kubelet has taken in.
	Listed
	// Granted are devices that a pod holds from now on, for one of its containers.
	Granted
	// Freed is the end of a pod, which holds nothing any more.
	Freed
)

func (k EventKind) String() string {
	names := [...]string{"none", "started", "stopped", "registering", "stream opened", "stream ended", "listed", "granted", "freed"}
	if k < 0 || int(k) >= len(names) {
		return "unknown"
	}
	return names[k]
}

// tell hands an event to the witness. The caller holds the lock.
func (k *Kubelet) tell(event Event) {
	if k.options.Witness != nil {
		k.options.Witness(event)
	}
}
