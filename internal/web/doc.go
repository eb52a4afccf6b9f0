// Package web serves HTTP on a node: the probes, the page, the status, forecasts and metrics.
// HTTP requests change nothing. The functions of Node supply what it shows; internal/page draws the page.
// The package also serves the control socket, which can change things.
package web
