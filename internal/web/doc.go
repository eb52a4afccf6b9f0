// Package web serves HTTP on a node: the probes, the page, the status, forecasts and metrics.
// Nothing can be changed there. It gets what it shows from functions (Node); internal/page draws the
// page. It also serves the control socket, where things can be changed.
package web
