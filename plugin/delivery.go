package plugin

import "google.golang.org/grpc"

// delivery is what a stream was last given. The generation is an empty one
// before the first list.
type delivery struct {
	*generation
	stream grpc.ServerStream
}

// deliveries says, for Next, which resources' newest list the kubelet's stream
// was given, and which have lost that stream since this was last asked.
func (r *running) deliveries(into Calls) {
	current, last := r.current.Load(), r.sent.Load()
	if last == nil {
		into.Lost[r.name], r.stream = true, nil
		return
	}
	into.Lost[r.name], r.stream = last.stream != r.stream, last.stream
	into.Sent[r.name] = last.response == current.response
}
