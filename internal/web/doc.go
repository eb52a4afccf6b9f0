// Package web serves HTTP on a node: the probes, the page, the status, forecasts and metrics. Nothing can
// be changed there. What it shows it gets by functions (Node). It also serves the control socket, where
// things can be changed.
package web
