// Package trace writes down what a driver answers, and answers from what was
// written down: Record stands between the program and any nvml.Library, and Parse
// makes a trace an nvml.Library itself. The trace of a node lets everyone run the
// program on that node.
//
// A trace is a text file of JSON values, one a line. The first line is a header,
//
//	{"trace":1,"masked":true}
//
// and each other line a call with its arguments and its answer or its error, in
// the order in which the calls returned:
//
//	{"call":"DeviceGetUUID","arguments":[3],"answer":"GPU-…"}
//	{"call":"DeviceGetName","arguments":[3],"error":{"call":"DeviceGetName","return":15}}
//
// Calls are named as in nvml.Library. Arguments are numbers; handles are the
// numbers that the back-end gave them.
package trace
