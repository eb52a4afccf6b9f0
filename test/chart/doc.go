// Package chart holds tests of the Helm chart. It is a module of its own so
// that Virgate does not depend on Helm.
package chart
