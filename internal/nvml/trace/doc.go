// Package trace records what a driver answers, and answers from such a record:
// Record wraps any nvml.Library, and Parse makes a Library of a trace. With the
// trace of a node everyone can run the program on that node.
//
// A trace is a text file of JSON values, one a line. The first line is a header,
//
//	{"trace":1,"masked":true}
//
// and each other line is a call with its arguments and its answer or error, in
// the order in which the calls returned:
//
//	{"call":"DeviceGetUUID","arguments":[3],"answer":"GPU-…"}
//	{"call":"DeviceGetName","arguments":[3],"error":{"call":"DeviceGetName","return":15}}
//
// Calls are named as in nvml.Library. Arguments are numbers; handles are the
// numbers that the back-end gave them. format.go has the format, record.go writes
// it and replay.go reads it.
package trace
