// Package chart has tests of the Helm chart. It is a separate module, so that Virgate does not
// depend on Helm.
package chart
