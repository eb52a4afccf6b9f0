// Package agent is the loop of the program: when something changes, it reads
// the node's GPUs and the profile again, plans, and hands the plan to the
// plugin manager. It also answers on HTTP what it is doing, read-only.
//
// It knows the domain and the plugin, and no adapter: what it reads from are
// the interfaces Node and Policy, which main fills.
package agent
