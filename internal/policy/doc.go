// Package policy finds the profile that should be in force on this node.
package policy
