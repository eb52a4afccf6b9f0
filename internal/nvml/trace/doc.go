// Package trace records a driver's answers and replays them: Record wraps any nvml.Library, and
// Parse returns a Library for a trace. With a trace of a node, anyone can run the program as if on
// that node.
//
// A trace is a text file with one JSON value per line. The first line is a header,
//
//	{"trace":1,"masked":true}
//
// and each other line is a call with its arguments and its answer or error, in the order in which
// the calls returned:
//
//	{"call":"DeviceGetUUID","arguments":[3],"answer":"GPU-…"}
//	{"call":"DeviceGetName","arguments":[3],"error":{"call":"DeviceGetName","return":15}}
//
// Calls are named as in nvml.Library. Arguments are numbers; a handle is the number that the
// back-end gave it. format.go defines the format, record.go writes it and replay.go reads it.
package trace
