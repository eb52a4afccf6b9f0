//go:build !linux

package main

// forgetStart does nothing: only the demo and the commands that need no GPU are
// used on other systems.
func forgetStart() {}
